"""paged_prefill of bitmask pools by two Triton kernels: one unpacks what the rows have in blocks, the other attends.

Owns the first; the second is that of float pages. A launch unpacks each block once, and all its queries then read keys
and values in bf16: a tile of 128 queries spends 2.9 us of an A100's multiprocessor on its products with a block of
head_dim 128, and would spend a third of that again on unpacking it, in every tile. What is unpacked goes to memory and
comes back, which a chunk of 2,048 tokens pays 3 % for. Values are turned back here, since there is one product to a
block and not one to a sum. The workspace holds a stretch of a layer's history in bf16, in pages of 128 positions;
longer histories go through it stretch by stretch, and their softmaxes merge.
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
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.access import DIRECT
from pallas_kernels.bits import unpair
from pallas_kernels.errors import require
from pallas_kernels.kv_bitmask.rotation import rotation
from pallas_kernels.kv_bitmask.rounding import MIDDLE
from pallas_kernels.kv_layout import BLOCK, HIGH_BITS, RECENT, SINKS, STRETCH, VALUE_BITS, BitmaskLayout
from pallas_kernels.operands import chunks, product
from pallas_kernels.paged_prefill import pallas
from pallas_kernels.paged_prefill.pieces import Channels, Softmax, channels_of
from pallas_kernels.pages import BitmaskPages, kept_first, layout_of
from pallas_kernels.rows import Rows
from pallas_kernels.softmax import Partial, finish, merge

_QUARTER = BLOCK // 4
_ROWS = 16  # of what slots keep, a turn
_WIDEST = 64  # channels of a tile that is unpacked
_NARROW = 128  # head dim up to which two turns of a loop fit into shared memory, and one into four warps' registers
_WIDE = plgpu.CompilerParams(num_warps=8, num_stages=1)


@dataclass(frozen=True, slots=True)
class _Block:
    """One block of the pool, and where it goes: rows of the workspace from ``place`` on, its keys and then its values.

    ``first`` is the first position of the block that lies in it and not in what slots keep.
    """

    layout: BitmaskLayout
    words_ref: jax.Ref
    row: Array
    out_ref: jax.Ref
    place: Array
    first: Array

    def load(self, word: Array, exists: Array | None = None) -> Array:
        """Words; zero where they do not exist."""
        return DIRECT.load(self.words_ref, (self.row, word), exists)

    def store(self, value: int, position: Array, part: Channels, found: Array) -> None:
        """Write channels of positions, keys (0) or values (1)."""
        part.store(self.out_ref, self.place + value * BLOCK + position, position >= self.first, found)

    def keys(self) -> None:
        """Unpack the keys, a chunk of channels and a quarter of the positions at a time."""
        size, before = self.layout.head_dim // self.layout.parts, jnp.zeros((), jnp.int32)
        for index in range(self.layout.parts):
            for column, part in zip(_parts(size), _parts(size, index * size), strict=True):
                before = self._keys_of(index, column, part, before)

    def _keys_of(self, index: int, column: Channels, part: Channels, lane: Array) -> Array:
        """Unpack the channels ``part``, whose words are those of ``column``; takes and returns the next lane."""
        layout, t = self.layout, jnp.arange(_QUARTER, dtype=jnp.int32)
        low_start, high_start, _, affine, _, masks = layout.starts
        bits = layout.base_bits
        scale, least = unpair(self.load(affine + part.columns, part.mask))
        marked = self.load(masks + part.columns // 32, part.mask) >> (part.columns % 32) & 1
        lanes = lane + jnp.cumsum(marked) - marked
        exists = None if part.mask is None else part.mask[None, :]
        low = self.load(low_start + column.columns[None, :] * _QUARTER + t[:, None], exists)

        def unpack(quarter: Array, _: None) -> None:
            word = high_start + lanes[None, :] * 8 + 2 * quarter + t[:, None] // 16
            high = self.load(word, jnp.broadcast_to(marked[None, :] > 0, word.shape))
            upper = high >> (HIGH_BITS * (t % 16))[:, None] & ((1 << HIGH_BITS) - 1)
            lower = low >> bits * (4 * index + quarter) & ((1 << bits) - 1)
            found = (lower | upper << bits).astype(jnp.float32) * scale[None, :] + least[None, :]
            self.store(0, quarter * _QUARTER + t, part, found.astype(self.out_ref.dtype))

        jax.lax.fori_loop(0, 4, unpack, None)
        return lane + jnp.sum(marked)

    def values(self, signs_ref: jax.Ref, factor_ref: jax.Ref) -> None:
        """Unpack the values and turn them back; whole and half numbers in the products, which bf16 holds exactly."""
        layout, t = self.layout, jnp.arange(_QUARTER, dtype=jnp.int32)
        start, scale_start, half = layout.starts[2], layout.starts[4], layout.head_dim // 2

        def unpack(quarter: Array, _: None) -> None:
            both = unpair(self.load(scale_start + (quarter & 1) * _QUARTER + t))
            scale = jnp.where(quarter < 2, *both)
            for out in channels_of(pallas.channel_chunks(layout.head_dim), layout.head_dim):
                turned = jnp.zeros((_QUARTER, out.columns.shape[0]), jnp.float32)
                for column in _parts(half):
                    exists = None if column.mask is None else column.mask[None, :]
                    words = self.load(start + t[:, None] * half + column.columns[None, :], exists)
                    for upper in range(2):
                        codes = words >> VALUE_BITS * (4 * upper + quarter) & ((1 << VALUE_BITS) - 1)
                        operand = (codes.astype(jnp.float32) - MIDDLE).astype(signs_ref.dtype)
                        signs = out.load(signs_ref, upper * half + column.columns, column.mask)
                        turned += product(operand, signs)
                factor = DIRECT.load(factor_ref, (out.columns,), out.mask)
                found = turned * scale[:, None] * factor[None, :]
                self.store(1, quarter * _QUARTER + t, out, found.astype(self.out_ref.dtype))

        jax.lax.fori_loop(0, 4, unpack, None)


def _parts(count: int, first: int = 0) -> list[Channels]:
    return channels_of(chunks(count, _WIDEST), count, first)


class _Stretch(NamedTuple):
    """Positions of one row that the workspace has room for, and how many of its positions there are and slots keep."""

    begin: Array
    end: Array
    start: Array
    kept: Array


def _copy_recent(
    of: _Stretch,
    recent_ref: jax.Ref,
    first_row: Array,
    out_ref: jax.Ref,
    first_place: Array,
    stride: int,
    channels: Sequence[Channels],
) -> None:
    """What a slot keeps in bf16, to where it belongs; blocks of the workspace lie ``stride`` rows apart."""
    opened = of.start // BLOCK * BLOCK

    def turn(index: Array, _: None) -> None:
        line = index * _ROWS + jnp.arange(_ROWS, dtype=jnp.int32)
        position = jnp.where(line < SINKS, line, opened + line - SINKS)
        # while the first block is not full, nothing lies in the rows of its sinks
        real = (position < of.start) & jnp.where(line < SINKS, line < of.kept, position >= of.kept)
        real &= (position >= of.begin) & (position < of.end)
        for value in range(2):
            place = first_place + (position - of.begin) // BLOCK * stride + value * BLOCK + position % BLOCK
            for part in channels:
                found = part.load(recent_ref, first_row + value * RECENT + line, real)
                part.store(out_ref, place, real, found.astype(out_ref.dtype))

    jax.lax.fori_loop(0, RECENT // _ROWS, turn, None)


def _kernel(
    layer_ref: jax.Ref,  # [] int32
    window_ref: jax.Ref,  # [] int32
    begin_ref: jax.Ref,  # [] int32, the first position of the stretch
    starts_ref: jax.Ref,  # [rows] int32
    kept_ref: jax.Ref,  # [rows] int32, how many of the first positions lie outside of blocks
    table_ref: jax.Ref,  # [rows width] int32
    slots_ref: jax.Ref,  # [rows] int32
    words_ref: jax.Ref,  # [layers*num_pages*kv_heads*blocks words] int32, all in global memory
    recent_ref: jax.Ref,  # [layers*slots*kv_heads*2*144 head_dim] bf16, all in global memory
    signs_ref: jax.Ref,  # [head_dim head_dim] of the operands' dtype
    factor_ref: jax.Ref,  # [head_dim] float32
    out_ref: jax.Ref,  # [rows*items*kv_heads*2*128 head_dim] of the operands' dtype
    *,
    pool: tuple[int, ...],
    slots: int,
    items: int,
    layout: BitmaskLayout,
) -> None:
    # Bytes: a block's words once, and 4 * 128 * head_dim written in bf16. FLOPs: 256 * head_dim**2 a block, which the
    # tensor cores do while words come. Bound by memory; programs without a block end at once.
    _, num_pages, kv_heads, blocks, _ = pool
    item, head, row = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    start, kept, window = DIRECT.load(starts_ref, (row,)), DIRECT.load(kept_ref, (row,)), DIRECT.load(window_ref, ())
    floor = jnp.where(window > 0, start - window + 1, 0)
    layer, begin = DIRECT.load(layer_ref, ()), DIRECT.load(begin_ref, ())
    number = begin // BLOCK + item

    @pl.when((item < items) & ((number + 1) * BLOCK <= start) & ((number + 1) * BLOCK > floor))
    def _() -> None:
        page = DIRECT.load(table_ref, (row, number // blocks))
        words_row = ((layer * num_pages + page) * kv_heads + head) * blocks + number % blocks
        place = ((row * items + item) * kv_heads + head) * 2 * BLOCK
        block = _Block(layout, words_ref, words_row, out_ref, place, jnp.maximum(kept - number * BLOCK, 0))
        block.keys()
        block.values(signs_ref, factor_ref)

    @pl.when((item == items) & (start > 0))
    def _() -> None:
        slot = jnp.clip(DIRECT.load(slots_ref, (row,)), 0, slots - 1)
        first_row = ((layer * slots + slot) * kv_heads + head) * 2 * RECENT
        first_place, stride = (row * items * kv_heads + head) * 2 * BLOCK, kv_heads * 2 * BLOCK
        channels = channels_of(pallas.channel_chunks(layout.head_dim), layout.head_dim)
        of = _Stretch(begin, begin + items * BLOCK, start, kept)
        _copy_recent(of, recent_ref, first_row, out_ref, first_place, stride, channels)


def turning(head_dim: int) -> tuple[np.ndarray, np.ndarray]:
    """The signs [channel as stored, channel] of the way back from rotated values, and a factor for each channel.

    Signs are -1, 0 and 1, which are exact in bf16.
    """
    turn = rotation(head_dim)
    return np.sign(turn.T), np.abs(turn).max(axis=1)


def unpacked(
    pages: BitmaskPages,
    head_dim: int,
    layer: Int32[Array, ""],
    rows: Rows,
    window: Int32[Array, ""],
    begins: Bool[Array, " rows"] | None,
    begin: Int32[Array, ""],
    length: int,
    *,
    dtype: jnp.dtype,
    interpret: bool = False,
) -> Float[Array, "1 places kv_heads 2 128 head_dim"]:
    """What rows have in a layer from position ``begin`` on, in ``length / 128`` pages of 128 positions a row.

    Positions that a row does not have, and blocks that no query sees through the window, hold anything.
    """
    layers, num_pages, kv_heads, blocks, size = pages.words.shape
    num_rows, items = rows.starts.shape[0], length // BLOCK
    signs, factor = turning(head_dim)
    out = pl.pallas_call(
        functools.partial(
            _kernel,
            pool=(layers, num_pages, kv_heads, blocks, size),
            slots=pages.recent.shape[1],
            items=items,
            layout=layout_of(pages, head_dim),
        ),
        out_shape=jax.ShapeDtypeStruct((num_rows * items * kv_heads * 2 * BLOCK, head_dim), dtype),
        grid=(items + 1, kv_heads, num_rows),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2) if head_dim <= _NARROW else _WIDE,
        interpret=interpret,
        name="paged_prefill_unpack",
    )(
        layer,
        window,
        begin,
        rows.starts,
        kept_first(rows.starts, begins),
        rows.page_table,
        rows.slots,
        pages.words.reshape(-1, size),
        pages.recent.reshape(-1, head_dim),
        jnp.asarray(signs, dtype),
        jnp.asarray(factor),
    )
    return out.reshape(1, num_rows * items, kv_heads, 2, BLOCK, head_dim)


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
    begins: Bool[Array, " rows"] | None = None,
    *,
    scale: float,
    softcap: float = 0.0,
    products: str = "float32",
    interpret: bool = False,
    tile: pallas.Tiling | None = None,
    stretch: int = STRETCH,
) -> Float[Array, "tokens q_heads head_dim"] | Partial:
    """See ``op.paged_prefill``; tokens that belong to no row get zeros.

    ``interpret`` runs the kernels on any backend, slowly; ``tile`` replaces the sizes that the shapes would give.

    Raises:
        ContractError: queries or what slots keep are of a dtype that the kernels do not take, or the scale is not
            positive.
    """
    require(q.dtype in (jnp.bfloat16, jnp.float32), f"q is {q.dtype}; this kernel takes bf16 and float32")
    require(pages.recent.dtype == jnp.bfloat16, f"rows of slots are {pages.recent.dtype}; this kernel takes bf16")
    require(scale > 0, f"scale {scale} is not positive, which this kernel needs to find the largest score")
    dtype = jnp.dtype(jnp.bfloat16 if products == "bf16" else q.dtype)
    rows = Rows(page_table, slots, starts, lengths, offsets)
    longest = page_table.shape[1] * pages.words.shape[3] * BLOCK
    length = min(stretch, longest)
    table = jnp.arange(starts.shape[0] * length // BLOCK, dtype=jnp.int32).reshape(starts.shape[0], -1)

    def over(begin: Array, counts: Bool[Array, " rows"] | None) -> Float[Array, "..."] | Partial:
        history = unpacked(
            pages, q.shape[2], layer, rows, window, begins, begin, length, dtype=dtype, interpret=interpret
        )
        part = Rows(table, slots, starts - begin, lengths, offsets)
        return pallas.attend(
            q, k, v, history, jnp.int32(0), part, jnp.clip(starts - begin, 0, length), window, counts,
            softmax=Softmax(scale, softcap), products=products, interpret=interpret, tile=tile,
        )  # fmt: skip

    if length == longest:
        return over(jnp.int32(0), begins)
    all_count = jnp.ones(starts.shape, bool) if begins is None else begins

    def turn(index: Array, before: Partial) -> Partial:
        found = over(index * length, jnp.zeros(starts.shape, bool))
        assert isinstance(found, Partial), "a part was asked for"
        return merge(before, found)

    first = over(jnp.int32(0), all_count)
    assert isinstance(first, Partial), "a part was asked for"
    merged = jax.lax.fori_loop(1, pl.cdiv(starts.max(), length), turn, first)
    return merged if begins is not None else finish(merged).astype(q.dtype)
