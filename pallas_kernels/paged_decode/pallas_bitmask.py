"""paged_decode of bitmask pools by a Triton kernel: codes meet the query as they are, scales go into query and weights.

Owns the kernel and the sizes of its tiles. A turn is a block of 128 positions, unpacked by quarters of 32 so that what
comes out of a tile of words is a whole operand each time. Everything that a block says about its channels is done to
the query: scales multiply it, the mask gathers the marked channels in lanes (a product with a matrix of ones and
zeros), minima become one number a query head. Value scales multiply the weights. The sum of values stays rotated. What
slots keep in bf16 is attended to beside the kernel. Source: the sums of ``kv_bitmask.op``; split-K as in FlashDecoding.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.access import DIRECT, Access
from pallas_kernels.bits import unpair
from pallas_kernels.errors import require
from pallas_kernels.kv_bitmask.rounding import MIDDLE
from pallas_kernels.kv_layout import BLOCK, HIGH_BITS, VALUE_BITS, BitmaskLayout
from pallas_kernels.operands import CONSTANTS, Unpack, chunks, product, rounded, sum_of, unpacker
from pallas_kernels.paged_decode.beside import finished, in_window
from pallas_kernels.paged_decode.stretches import (
    FLOOR,
    Shares,
    Softmax,
    columns,
    over_stretches,
    shares,
)
from pallas_kernels.pages import BitmaskPages, kept_first, layout_of
from pallas_kernels.softmax import Partial

_QUARTER = BLOCK // 4
_WIDE = 256  # head dim from which on chunks are narrow, for registers
_PROGRAMS_PER_MULTIPROCESSOR = 8  # four that run at once, in two waves


@dataclass(frozen=True, slots=True)
class BitmaskTiling:
    """Sizes of one launch.

    Channels of a word of ``key_low``, lanes, and channels of a half of the values go through in chunks, powers of two,
    of which the last may reach past the end. ``warps`` and ``stages`` are Triton's.
    """

    shares: Shares
    low: tuple[int, ...]
    lanes: tuple[int, ...]
    half: tuple[int, ...]
    warps: int
    stages: int


def tiling(slots: int, q_heads: int, kv_heads: int, context: int, layout: BitmaskLayout) -> BitmaskTiling:
    """The sizes for a launch over at most ``context`` positions a slot."""
    head_dim, base_bits = layout.head_dim, layout.base_bits
    widest = 32 if head_dim >= _WIDE else 64
    share = shares(
        slots,
        q_heads,
        kv_heads,
        head_dim,
        context=context,
        positions=BLOCK,
        turn_bytes=layout.words * 4,
        per_multiprocessor=_PROGRAMS_PER_MULTIPROCESSOR,
    )
    in_parts = share.rows > 8 and head_dim & (head_dim - 1)  # chunks of several sizes
    return BitmaskTiling(
        shares=share,
        low=chunks(head_dim // layout.parts, widest),
        lanes=chunks(layout.lanes, widest),
        half=chunks(head_dim // 2, widest),
        warps=4 if base_bits < VALUE_BITS and (head_dim >= _WIDE or in_parts) else 2,
        stages=2,
    )


@dataclass(frozen=True, slots=True)
class _Block:
    """A block's words, by their place in it."""

    words_ref: jax.Ref
    row: Array
    access: Access

    def load(self, place: Array, exists: Array | None = None) -> Array:
        """Words; zero where they do not exist."""
        return self.access.load(self.words_ref, (self.row, place), exists)


@dataclass(frozen=True, slots=True)
class _Query:
    """What meets a block's codes: the query by parts and chunks of channels, the same in lanes, and the constant."""

    low: list[list[Array]]  # [part][chunk] [channels, rows]
    lanes: list[Array]  # [chunk] [lanes, rows]
    constant: Array  # [rows] float32


def _folded(
    q: list[list[Array]], block: _Block, layout: BitmaskLayout, tile: BitmaskTiling, factor: float, unpack: Unpack
) -> _Query:
    """The query, a factor, and a block's scales, mask and minima in one."""
    per_part, widened = layout.head_dim // layout.parts, float(1 << layout.base_bits)
    _, _, _, affine, _, masks = layout.starts
    lane_columns = columns(tile.lanes)
    lanes = [jnp.zeros((size, tile.shares.rows), jnp.float32) for size in tile.lanes]
    constants: list[Array] = []
    before = jnp.zeros((), jnp.int32)
    low: list[list[Array]] = []
    for part in range(layout.parts):
        low.append([])
        for place, column in enumerate(columns(tile.low)):
            exists, channel = column < per_part, part * per_part + column
            scale, least = (half * factor for half in unpair(block.load(affine + channel, exists)))
            wide = q[part][place].astype(jnp.float32)
            folded, whole = rounded(wide * scale[:, None], unpack.dtype)
            marked = (block.load(masks + channel // 32, exists) >> (channel % 32)) & 1
            rank = jnp.where(marked == 1, before + jnp.cumsum(marked) - 1, -1)
            before += jnp.sum(marked)
            for index, lane in enumerate(lane_columns):
                chosen = (lane[:, None] == rank[None, :]).astype(unpack.dtype)
                lanes[index] += product(chosen, folded)
            above = unpack.excess * (1.0 + widened * marked.astype(jnp.float32))
            constants.append((wide * least[:, None] - whole * above[:, None]).sum(axis=0))
            low[-1].append(folded)
    return _Query(low, [rounded(part * widened, unpack.dtype)[0] for part in lanes], sum_of(constants))


def _scores(query: _Query, block: _Block, layout: BitmaskLayout, tile: BitmaskTiling, unpack: Unpack) -> list[Array]:
    """The scores of each quarter's positions, [32, rows] float32."""
    low_start, high_start = layout.starts[:2]
    t, bits = jnp.arange(_QUARTER, dtype=jnp.int32), layout.base_bits
    scores = [jnp.broadcast_to(query.constant[None, :], (_QUARTER, tile.shares.rows)) for _ in range(4)]
    for place, column in enumerate(columns(tile.low)):
        exists = (column < layout.head_dim // layout.parts)[None, :]
        words = block.load(low_start + column[None, :] * _QUARTER + t[:, None], exists)
        for part in range(layout.parts // 2):
            for quarter in range(4):
                lower, upper = unpack.pair(words, bits * (4 * part + quarter), bits)
                scores[quarter] += product(lower, query.low[part][place])
                scores[quarter] += product(upper, query.low[part + layout.parts // 2][place])
    word, shift = jnp.arange(8, dtype=jnp.int32), (HIGH_BITS * (t % 16))[:, None]
    for place, lane in enumerate(columns(tile.lanes)):
        exists = (lane < layout.lanes)[None, :]
        words = jnp.split(block.load(high_start + lane[None, :] * 8 + word[:, None], exists), 8, axis=0)
        for quarter in range(4):
            wide = jnp.where((t < 16)[:, None], words[2 * quarter], words[2 * quarter + 1]) >> shift
            scores[quarter] += product(unpack.one(wide, HIGH_BITS), query.lanes[place])
    return scores


def _kernel(
    layer_ref: jax.Ref,  # [] int32
    window_ref: jax.Ref,  # [] int32
    lengths_ref: jax.Ref,  # [slots] int32
    kept_ref: jax.Ref,  # [slots] int32, how many of the first positions lie outside of blocks
    table_ref: jax.Ref,  # [slots width] int32
    q_ref: jax.Ref,  # [slots*q_heads head_dim] bf16, float32 in interpreted tests
    words_ref: jax.Ref,  # [layers*num_pages*kv_heads*blocks words] int32, all in global memory
    constants_ref: jax.Ref,  # [2] int32, ``operands.CONSTANTS``
    weighted_ref: jax.Ref,  # [slots*kv_heads*splits*group head_dim] float32
    peak_ref: jax.Ref,  # [slots*kv_heads*splits*group] float32
    total_ref: jax.Ref,  # [slots*kv_heads*splits*group] float32
    *,
    pool: tuple[int, ...],
    layout: BitmaskLayout,
    tile: BitmaskTiling,
    softmax: Softmax,
    access: Access,
) -> None:
    # Bytes: every word of the stretch's blocks once, 4 * words a block. FLOPs: 4 * rows * positions * head_dim and a
    # half more for lanes and their gathering, of which group / rows count. Bound by memory and by unpacking codes.
    _, num_pages, kv_heads, blocks, _ = pool
    group, share = q_ref.shape[0] // (table_ref.shape[0] * kv_heads), tile.shares
    at = share.program(group)
    length, window = access.load(lengths_ref, (at.slot,)), access.load(window_ref, ())
    end = length // BLOCK * BLOCK
    first = jnp.minimum(jnp.maximum(in_window(length, window), access.load(kept_ref, (at.slot,))), end)
    begin, stop = share.turns(first, end, at.split)
    per_part, half = layout.head_dim // layout.parts, layout.head_dim // 2
    q = [
        [at.query(q_ref, part * per_part + column, column < per_part, access) for column in columns(tile.low)]
        for part in range(layout.parts)
    ]
    in_pool = access.load(layer_ref, ()) * num_pages
    t = jnp.arange(_QUARTER, dtype=jnp.int32)
    value_start, scale_start = layout.starts[2], layout.starts[4]
    unpack = unpacker(constants_ref, q_ref.dtype, access)

    def page_of(index: Array) -> Array:
        return access.load(table_ref, (at.slot, index // blocks), index < stop)

    def turn(index: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
        page, peak, total, *weighted = state
        block = _Block(words_ref, ((in_pool + page) * kv_heads + at.head) * blocks + index % blocks, access)
        query = _folded(q, block, layout, tile, softmax.factor, unpack)
        scores = _scores(query, block, layout, tile, unpack)
        seen = [index * BLOCK + quarter * _QUARTER + t >= first for quarter in range(4)]
        peak, factor, weights = softmax.weigh(scores, seen, peak)
        total = total * factor + sum_of(weights).sum(axis=0)
        pairs = [unpair(block.load(scale_start + quarter * _QUARTER + t)) for quarter in range(2)]
        scales = [pair[0] for pair in pairs] + [pair[1] for pair in pairs]
        folded = [rounded(part * by[:, None], unpack.dtype) for part, by in zip(weights, scales, strict=True)]
        above = sum_of([whole for _, whole in folded]).sum(axis=0) * (MIDDLE + unpack.excess)
        weighted = [part * factor[None, :] - above[None, :] for part in weighted]
        for place, column in enumerate(columns(tile.half)):
            words = block.load(value_start + t[None, :] * half + column[:, None], (column < half)[:, None])
            for quarter in range(4):
                for upper, part in enumerate(unpack.pair(words, VALUE_BITS * quarter, VALUE_BITS)):
                    weighted[2 * place + upper] += product(part, folded[quarter][0])
        return page_of(index + 1), peak, total, *weighted

    state = (
        page_of(begin),
        jnp.full((tile.shares.rows,), FLOOR, jnp.float32),
        jnp.zeros((tile.shares.rows,), jnp.float32),
        *(jnp.zeros((size, tile.shares.rows), jnp.float32) for size in tile.half for _ in range(2)),
    )
    _, peak, total, *weighted = jax.lax.fori_loop(begin, stop, turn, state)
    channels = [(upper * half + column, column < half) for column in columns(tile.half) for upper in range(2)]
    at.store((weighted_ref, peak_ref, total_ref), (peak, total, weighted), channels, access)


def paged_decode(
    q: Float[Array, "slots q_heads head_dim"],
    k: Float[Array, "slots kv_heads head_dim"],
    v: Float[Array, "slots kv_heads head_dim"],
    pages: BitmaskPages,
    layer: Int32[Array, ""],
    page_table: Int32[Array, "slots width"],
    lengths: Int32[Array, " slots"],
    window: Int32[Array, ""],
    begins: Bool[Array, " slots"] | None = None,
    *,
    scale: float,
    softcap: float = 0.0,
    interpret: bool = False,
    tile: BitmaskTiling | None = None,
    access: Access = DIRECT,
) -> Float[Array, "slots q_heads head_dim"] | Partial:
    """See ``op.paged_decode``.

    ``interpret`` runs the kernel on any backend, slowly; ``tile`` replaces the sizes that the shapes would give;
    ``access`` lets a caller watch what is read and written. Sums are made of operands of q's dtype.

    Raises:
        ContractError: the query is of a dtype that the kernel does not take, or the scale is not positive.
    """
    slots, q_heads, head_dim = q.shape
    _, _, kv_heads, blocks, _ = pages.words.shape
    require(q.dtype in (jnp.bfloat16, jnp.float32), f"q is {q.dtype}; this kernel takes bf16 and float32")
    require(scale > 0, f"scale {scale} is not positive")
    layout = layout_of(pages, head_dim)
    tile = tile or tiling(slots, q_heads, kv_heads, page_table.shape[1] * blocks * BLOCK, layout)
    group = q_heads // kv_heads
    weighted, peak, total = pl.pallas_call(
        functools.partial(
            _kernel,
            pool=pages.words.shape,
            layout=layout,
            tile=tile,
            softmax=Softmax(scale, softcap),
            access=access,
        ),
        out_shape=tile.shares.partials(slots, kv_heads, group, head_dim),
        grid=tile.shares.grid(slots, kv_heads, group),
        compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
        name="paged_decode_bitmask",
    )(
        layer,
        window,
        lengths,
        kept_first(lengths, begins),
        page_table,
        q.reshape(slots * q_heads, head_dim),
        pages.words.reshape(-1, layout.words),
        jnp.array(CONSTANTS, jnp.int32),
    )
    paged = over_stretches(weighted, peak, total, (slots, kv_heads, tile.shares.splits, group))
    return finished(paged, q, k, v, pages, layer, lengths, window, begins, scale=scale, softcap=softcap)
