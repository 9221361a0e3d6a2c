"""paged_prefill of bitmask pools by a Triton kernel: codes meet queries as they are, which take up the scales.

Owns the kernel and the sizes of its tiles. A turn of the history is a block of 128 positions, unpacked by quarters of
32 so that what comes out of a tile of words is a whole operand each time. What a block says about its channels is done
to the queries: scales multiply them, the mask gathers the marked channels in lanes (a product with a matrix of ones and
zeros), minima become one number a query. Value scales multiply the weights. The sum over blocks is of rotated values;
it is turned back once, before what the slot keeps in bf16 and the chunk's own values join it.
Source: the sums of ``kv_bitmask.op``; the rest is that of ``pieces``.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.access import DIRECT
from pallas_kernels.bits import unpair
from pallas_kernels.errors import require
from pallas_kernels.kv_bitmask.rotation import rotation
from pallas_kernels.kv_bitmask.rounding import MIDDLE
from pallas_kernels.kv_layout import BLOCK, HIGH_BITS, SINKS, VALUE_BITS, BitmaskLayout
from pallas_kernels.operands import CONSTANTS, Unpack, chunks, product, rounded, sum_of, unpacker
from pallas_kernels.paged_prefill.pallas import channel_chunks
from pallas_kernels.paged_prefill.pieces import (
    Channels,
    Piece,
    Queries,
    Reach,
    Softmax,
    State,
    Work,
    channels_of,
    chunk_piece,
    find_queries,
    nothing,
    plan_of,
    recent_piece,
    store,
    through,
)
from pallas_kernels.pages import BitmaskPages, layout_of

HEAD_DIMS = (8, 16, 32, 64, 80, 96)
"""Head dims that there are tiles for; of wider ones, sums and folded queries leave too few registers."""

_QUARTER = BLOCK // 4


@dataclass(frozen=True, slots=True)
class BitmaskTiling:
    """Sizes of one launch.

    ``queries`` (token, head) pairs meet a block of 128 positions a turn, of which they weigh 32 times ``quarters``
    together, and ``keys`` of those in bf16. Channels of a word of ``key_low``, lanes, and channels of a half of the
    values go through in chunks, powers of two, of which the last may reach past the end. ``warps`` and ``stages`` are
    Triton's.
    """

    queries: int
    quarters: int
    keys: int
    low: tuple[int, ...]
    lanes: tuple[int, ...]
    half: tuple[int, ...]
    warps: int
    stages: int


def tiling(layout: BitmaskLayout) -> BitmaskTiling:
    """The sizes for blocks of a layout.

    Raises:
        ContractError: the head dim is none that the kernel takes.
    """
    head_dim = layout.head_dim
    require(head_dim in HEAD_DIMS, f"head_dim {head_dim} has no tile; this kernel takes {HEAD_DIMS}")
    return BitmaskTiling(
        queries=128,
        quarters=4 if head_dim <= 64 else 1,
        keys=64,
        low=chunks(head_dim // layout.parts, 32),
        lanes=chunks(layout.lanes, 64),
        half=chunks(head_dim // 2, 64),
        warps=8,
        stages=2,
    )


@dataclass(frozen=True, slots=True)
class _Block:
    """A block's words, by their place in it, and the tiles of codes that were loaded a turn early, by chunks."""

    words_ref: jax.Ref
    row: Array
    low: Sequence[Array] = ()  # [channels of a part, 32]
    high: Sequence[Array] = ()  # [8, lanes]
    values: Sequence[Array] = ()  # [32, channels of a half]

    def load(self, place: Array, exists: Array | None = None) -> Array:
        """Words; zero where they do not exist."""
        return DIRECT.load(self.words_ref, (self.row, place), exists)

    def tile(self, place: Array, exists: Array | None) -> Array:
        """Words of codes; zero where they do not exist.

        Through the sum over an axis of one, which the compiler does not look behind: it would have the words themselves
        brought to where the tensor cores want codes, and every warp unpack all of them.
        """
        return self.load(place[None], None if exists is None else exists[None]).sum(axis=0)


class _Folded(NamedTuple):
    """What meets a block's codes: queries by parts and chunks of channels, the same in lanes, and the constant."""

    low: list[list[Array]]  # [part][chunk] [queries, channels]
    lanes: list[Array]  # [chunk] [queries, lanes]
    constant: Array  # [queries] float32


@dataclass(frozen=True, slots=True)
class _Blocks:
    """The history of one program's queries, which lies in blocks."""

    layout: BitmaskLayout
    tile: BitmaskTiling
    softmax: Softmax
    queries: Queries
    unpack: Unpack
    q_ref: jax.Ref

    def query(self, channels: Channels) -> Array:
        """Channels of the queries, [queries channels]."""
        # volatile: read again for every block, where registers would hold it all the while
        index = self.queries.matrix_row[:, None], channels.columns[None, :]
        mask, zero = channels.exists(self.queries.real), jnp.zeros((), self.q_ref.dtype)
        return plgpu.load(self.q_ref.at[index], mask=mask, other=zero, volatile=True)

    def codes(self, block: _Block) -> list[Array]:
        """The words of all tiles of codes, in the order of a block's fields."""
        layout, tile = self.layout, self.tile
        low_start, high_start, value_start = layout.starts[:3]
        t, word, half = jnp.arange(_QUARTER), jnp.arange(8), layout.head_dim // 2
        low = [
            block.tile(low_start + part.columns[:, None] * _QUARTER + t[None, :], _column(part))
            for part in channels_of(tile.low, layout.head_dim // layout.parts)
        ]
        high = [
            block.tile(high_start + part.columns[None, :] * 8 + word[:, None], part.exists(None))
            for part in channels_of(tile.lanes, layout.lanes)
        ]
        values = [
            block.tile(value_start + t[:, None] * half + part.columns[None, :], part.exists(None))
            for part in channels_of(tile.half, half)
        ]
        return [*low, *high, *values]

    def fold(self, block: _Block) -> _Folded:
        """The queries, and a block's scales, mask and minima, in one."""
        layout, unpack = self.layout, self.unpack
        per_part, widened = layout.head_dim // layout.parts, float(1 << layout.base_bits)
        _, _, _, affine, _, masks = layout.starts
        lanes = [jnp.zeros((self.tile.queries, size), jnp.float32) for size in self.tile.lanes]
        constants: list[Array] = []
        before = jnp.zeros((), jnp.int32)
        low: list[list[Array]] = []
        for part in range(layout.parts):
            low.append([])
            for channels in channels_of(self.tile.low, per_part, part * per_part):
                scale, least = unpair(block.load(affine + channels.columns, channels.mask))
                wide = self.query(channels).astype(jnp.float32)
                folded, whole = rounded(wide * scale[None, :], unpack.dtype)
                marked = block.load(masks + channels.columns // 32, channels.mask) >> (channels.columns % 32) & 1
                rank = jnp.where(marked == 1, before + jnp.cumsum(marked) - 1, -1)
                before += jnp.sum(marked)
                for index, lane in enumerate(channels_of(self.tile.lanes, layout.lanes)):
                    chosen = (rank[:, None] == lane.columns[None, :]).astype(unpack.dtype)
                    lanes[index] += product(folded, chosen)
                above = unpack.excess * (1.0 + widened * marked.astype(jnp.float32))
                constants.append((wide * least[None, :] - whole * above[None, :]).sum(axis=1))
                low[-1].append(folded)
        return _Folded(low, [rounded(part * widened, unpack.dtype)[0] for part in lanes], sum_of(constants))

    def scores(self, folded: _Folded, block: _Block, quarters: range) -> list[Array]:
        """The products of some quarters' positions, [queries, 32] float32 each."""
        layout, unpack, bits = self.layout, self.unpack, self.layout.base_bits
        t = jnp.arange(_QUARTER, dtype=jnp.int32)
        scores = [jnp.broadcast_to(folded.constant[:, None], (self.tile.queries, _QUARTER)) for _ in quarters]
        for place, words in enumerate(block.low):
            for part in range(layout.parts // 2):
                for index, quarter in enumerate(quarters):
                    lower, upper = unpack.pair(words, bits * (4 * part + quarter), bits)
                    scores[index] += product(folded.low[part][place], lower)
                    scores[index] += product(folded.low[part + layout.parts // 2][place], upper)
        shift = (HIGH_BITS * (t % 16))[:, None]
        for place, tile in enumerate(block.high):
            words = jnp.split(tile, 8, axis=0)
            for index, quarter in enumerate(quarters):
                wide = jnp.where((t < 16)[:, None], words[2 * quarter], words[2 * quarter + 1]) >> shift
                scores[index] += product(folded.lanes[place], unpack.one(wide, HIGH_BITS).T)
        return scores

    def sums(self, block: _Block, quarters: range, weights: Sequence[Array], weighted: Sequence[Array]) -> list[Array]:
        """The weighted sums of rotated values by chunks and halves, and those so far."""
        scale_start = self.layout.starts[4]
        t, unpack = jnp.arange(_QUARTER, dtype=jnp.int32), self.unpack
        scales = [unpair(block.load(scale_start + quarter % 2 * _QUARTER + t))[quarter // 2] for quarter in quarters]
        folded = [rounded(part * by[None, :], unpack.dtype) for part, by in zip(weights, scales, strict=True)]
        above = sum_of([whole for _, whole in folded]).sum(axis=1) * (MIDDLE + unpack.excess)
        found = [part - above[:, None] for part in weighted]
        for place, words in enumerate(block.values):
            for (operand, _), quarter in zip(folded, quarters, strict=True):
                for upper, codes in enumerate(unpack.pair(words, VALUE_BITS * quarter, VALUE_BITS)):
                    found[2 * place + upper] += product(operand, codes)
        return found

    def piece(self, words_ref: jax.Ref, table_ref: jax.Ref, in_pool: Array, kv_heads: int, blocks: int) -> Piece:
        """What the row has in blocks, behind its first positions and up to the last full block's end."""
        queries = self.queries
        end = queries.start // BLOCK * BLOCK

        counts = [len(self.tile.low), len(self.tile.low) + len(self.tile.lanes)]

        def ahead(index: Array) -> State:
            page = DIRECT.load(table_ref, (queries.row, index // blocks), index * BLOCK < end)
            row = ((in_pool + page) * kv_heads + queries.head) * blocks + index % blocks
            return (row,)

        def turn(index: Array, known: State, state: State, masked: bool) -> State:
            (row,) = known
            codes = self.codes(_Block(words_ref, row))
            block = _Block(words_ref, row, codes[: counts[0]], codes[counts[0] : counts[1]], codes[counts[1] :])
            folded = self.fold(block)
            for first in range(0, 4, self.tile.quarters):
                quarters = range(first, first + self.tile.quarters)
                places = [index * BLOCK + quarter * _QUARTER + jnp.arange(_QUARTER) for quarter in quarters]
                seen = [(place >= SINKS)[None, :] & queries.seen(place) for place in places] if masked else None
                sums = functools.partial(self.sums, block, quarters)
                state = self.softmax.turn(state, self.scores(folded, block, quarters), seen, sums)
            return state

        begin, whole_begin = (jnp.maximum(queries.floor(token), SINKS) for token in (queries.oldest, queries.newest))
        return Piece(Reach(jnp.minimum(begin, end), whole_begin, end, end), ahead, turn)


def _column(channels: Channels) -> Array | None:
    return None if channels.mask is None else channels.mask[:, None]


def _halves(tile: BitmaskTiling, head_dim: int) -> list[Channels]:
    """The chunks of sums: of each chunk of a half the one in the lower half, then the one in the upper."""
    half = head_dim // 2
    both = [channels_of(tile.half, half, first) for first in (0, half)]
    return [part for pair in zip(*both, strict=True) for part in pair]


def turning(head_dim: int) -> tuple[np.ndarray, np.ndarray]:
    """The signs [channel as stored, channel] of the way back from rotated values, and a factor for each channel.

    Signs are -1, 0 and 1, which are exact in bf16.
    """
    turn = rotation(head_dim)
    return np.sign(turn.T), np.abs(turn).max(axis=1)


def _turned_back(
    state: State, signs_ref: jax.Ref, factor_ref: jax.Ref, channels: Sequence[Channels], head_dim: int
) -> State:
    """The state with sums of values in place of sums of rotated ones.

    A matrix of Hadamard is that of half its size four times over, once with the other sign: the sum and the difference
    of two halves then need one product each. Products are of two bf16 numbers for each sum, its beginning and its rest.
    """
    peak, total, *weighted = state
    alike = head_dim & (head_dim - 1) == 0
    if alike:
        pairs = zip(weighted[::2], weighted[1::2], strict=True)
        weighted = [part for lower, upper in pairs for part in (lower + upper, lower - upper)]
    dtype = signs_ref.dtype
    beginnings = [rounded(part, dtype) for part in weighted]
    operands = [(part, rounded(x - whole, dtype)[0]) for x, (part, whole) in zip(weighted, beginnings, strict=True)]
    found: list[Array] = []
    for index, target in enumerate(channels):
        parts: list[Array] = []
        for place, source in enumerate(channels):
            if alike and (index - place) % 2:
                continue
            stored = channels[place - place % 2] if alike else source
            signs = target.load(signs_ref, stored.columns, stored.mask)
            parts += [product(operand, signs) for operand in operands[place]]
        factor = DIRECT.load(factor_ref, (target.columns,), target.mask)
        found.append(sum_of(parts) * factor[None, :])
    return peak, total, *found


def _kernel(
    plan_ref: jax.Ref,  # [5 tiles] int32
    layer_ref: jax.Ref,  # [] int32
    window_ref: jax.Ref,  # [] int32
    table_ref: jax.Ref,  # [rows width] int32
    slots_ref: jax.Ref,  # [rows] int32
    q_ref: jax.Ref,  # [tokens*q_heads head_dim] of the operands' dtype
    k_ref: jax.Ref,  # [tokens*kv_heads head_dim] of the operands' dtype
    v_ref: jax.Ref,  # [tokens*kv_heads head_dim] of the operands' dtype
    words_ref: jax.Ref,  # [layers*num_pages*kv_heads*blocks words] int32, all in global memory
    recent_ref: jax.Ref,  # [layers*slots*kv_heads*2*144 head_dim] bf16, all in global memory
    constants_ref: jax.Ref,  # [2] int32, ``operands.CONSTANTS``
    signs_ref: jax.Ref,  # [head_dim head_dim] of the operands' dtype
    factor_ref: jax.Ref,  # [head_dim] float32
    out_ref: jax.Ref,  # [tokens*q_heads head_dim]
    *,
    pool: tuple[int, ...],
    recent: tuple[int, ...],
    layout: BitmaskLayout,
    tile: BitmaskTiling,
    softmax: Softmax,
) -> None:
    # FLOPs: 4 * queries * keys * head_dim a block, and a quarter more for lanes and their gathering. Bytes: 4 * words a
    # block, which the tiles of a head find in L2 after the first. Bound by the tensor cores and by folding.
    _, num_pages, kv_heads, blocks, _ = pool
    group, head_dim = q_ref.shape[0] // k_ref.shape[0], layout.head_dim
    find = functools.partial(find_queries, plan_ref, window_ref, table_ref.shape[0], kv_heads, group, tile.queries)
    queries, layer = find(), DIRECT.load(layer_ref, ())
    sums = _halves(tile, head_dim)
    stored = _Blocks(layout, tile, softmax, queries, unpacker(constants_ref, q_ref.dtype, DIRECT), q_ref)
    piece = stored.piece(words_ref, table_ref, layer * num_pages, kv_heads, blocks)
    state = _turned_back(through(piece, BLOCK, nothing(tile.queries, sums)), signs_ref, factor_ref, sums, head_dim)
    queries, whole = find(), channels_of(channel_chunks(head_dim), head_dim)
    plain = [part.load(q_ref, queries.matrix_row, queries.real) for part in whole]
    work = Work(tile.keys, softmax, queries, whole, sums, plain)
    state = through(recent_piece(work, recent_ref, slots_ref, layer, recent), tile.keys, state)
    state = through(chunk_piece(work, k_ref, v_ref, kv_heads), tile.keys, state)
    store(out_ref, find(), state, sums)


def paged_prefill(
    q: Float[Array, "tokens q_heads head_dim"],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    pages: BitmaskPages,
    layer: Int32[Array, ""],
    page_table: Int32[Array, "rows width"],
    slots: Int32[Array, " rows"],
    starts: Int32[Array, " rows"],
    lengths: Int32[Array, " rows"],
    offsets: Int32[Array, " rows"],
    window: Int32[Array, ""],
    *,
    scale: float,
    softcap: float = 0.0,
    products: str = "float32",
    interpret: bool = False,
    tile: BitmaskTiling | None = None,
) -> Float[Array, "tokens q_heads head_dim"]:
    """See ``op.paged_prefill``; tokens that belong to no row get zeros.

    ``interpret`` runs the kernel on any backend, slowly; ``tile`` replaces the sizes that the layout would give.

    Raises:
        ContractError: no tile fits this head dim, queries or what slots keep are of a dtype that the kernel does not
            take, or the scale is not positive.
    """
    tokens, q_heads, head_dim = q.shape
    kv_heads = pages.words.shape[2]
    require(q.dtype in (jnp.bfloat16, jnp.float32), f"q is {q.dtype}; this kernel takes bf16 and float32")
    require(pages.recent.dtype == jnp.bfloat16, f"rows of slots are {pages.recent.dtype}; this kernel takes bf16")
    require(scale > 0, f"scale {scale} is not positive, which this kernel needs to find the largest score")
    layout = layout_of(pages, head_dim)
    tile = tile or tiling(layout)
    plan = plan_of(starts, lengths, offsets, tokens, q_heads // kv_heads, tile.queries)
    operands = jnp.bfloat16 if products == "bf16" else q.dtype
    signs, factor = turning(head_dim)
    out = pl.pallas_call(
        functools.partial(
            _kernel,
            pool=pages.words.shape,
            recent=pages.recent.shape,
            layout=layout,
            tile=tile,
            softmax=Softmax(scale, softcap),
        ),
        out_shape=jax.ShapeDtypeStruct((tokens * q_heads, head_dim), q.dtype),
        grid=(plan.row.shape[0], kv_heads),
        compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
        name="paged_prefill_bitmask",
    )(
        jnp.stack(plan),
        layer,
        window,
        page_table,
        slots,
        *(part.reshape(-1, head_dim).astype(operands) for part in (q, k, v)),
        pages.words.reshape(-1, layout.words),
        pages.recent.reshape(-1, head_dim),
        jnp.array(CONSTANTS, jnp.int32),
        jnp.asarray(signs, operands),
        jnp.asarray(factor),
    )
    return out.reshape(q.shape)
