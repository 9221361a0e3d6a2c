"""page_write of bitmask pools by a Triton kernel: each program rounds and packs the keys or values of one full block.

Owns the kernel and the sizes of its tiles. Codes are those of ``kv_bitmask.rounding``, words lie as ``kv_layout`` says.
Programs whose block does not exist end at once, so that a launch in which no block fills costs next to nothing.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.access import Access
from pallas_kernels.bits import pair
from pallas_kernels.kv_bitmask.rotation import rotation
from pallas_kernels.kv_bitmask.rounding import KeyRange, disturbance, key_codes, key_range, value_codes, value_scale
from pallas_kernels.kv_layout import BLOCK, HIGH_BITS, MASK_WORDS, RECENT, SINKS, VALUE_BITS, BitmaskLayout
from pallas_kernels.page_write.blocks import Filled
from pallas_kernels.pages import BitmaskPages, layout_of

_QUARTER = 32  # positions that lie behind each other in a section; its words hold four of them side by side
_QUARTERS = 4
_NUMBERS = 4096  # in the tiles that a turn holds, 32 a thread
_WIDEST_TILE = _NUMBERS // BLOCK
_LEAST_SIDE = 16  # of an operand of the tensor cores
_DEPTH = 32  # channels that a turn of the rotation sums over
_HEIGHT = 16  # positions of a tile of values

_LOW, _HIGH, _VALUES, _AFFINE, _VALUE_SCALE, _MASK = range(6)
_MOST_BITS = 31  # of a float32 number that is not negative


class _Block(NamedTuple):
    """The block of one program: where its keys or values are read and its words written."""

    access: Access
    layout: BitmaskLayout
    new_ref: jax.Ref  # [layers*tokens*kv_heads head_dim] bf16
    recent_ref: jax.Ref  # [layers*slots*kv_heads*2*144 head_dim] bf16
    words_ref: jax.Ref  # [layers*num_pages*kv_heads*blocks block_words] int32
    new_row: Array  # of the first position, which may lie before the launch's tokens
    token_rows: int  # from a token to the next
    recent_row: Array  # of the slot's first row
    words_row: Array
    kept: Array
    number: Array

    def load(self, position: Int32[Array, " t"], channel: Int32[Array, " c"], real: Bool[Array, " c"]) -> Array:
        """bf16 [t c] of the block; zeros where a channel is not ``real``."""
        is_new, exists = (position >= self.kept)[:, None], real[None, :]
        line = jnp.where(self.counted(position), SINKS + position, position)
        kept = self.access.load(
            self.recent_ref, ((self.recent_row + line)[:, None], channel[None, :]), ~is_new & exists
        )
        row = self.new_row + position * self.token_rows
        new = self.access.load(self.new_ref, (row[:, None], channel[None, :]), is_new & exists)
        return jnp.where(is_new, new, kept)

    def counted(self, position: Int32[Array, " t"]) -> Bool[Array, " t"]:
        """Which keys must fit the range; the others are never read back from the block."""
        return (self.number > 0) | (position >= SINKS)

    def extremes(self, tile: Array, position: Int32[Array, " t"]) -> tuple[Array, Array]:
        """The lowest and the highest counted key of each channel of a tile."""
        counted = self.counted(position)[:, None]
        return jnp.where(counted, tile, jnp.inf).min(axis=0), jnp.where(counted, tile, -jnp.inf).max(axis=0)

    def store(self, section: int, word: Array, value: Array, mask: Array | None = None) -> None:
        """Write words of a section."""
        self.access.store(self.words_ref, (self.words_row, self.layout.starts[section] + word), value, mask)


class _Choice(NamedTuple):
    """Which channels have two more bits: those above a score, and those of that score up to some channel."""

    score: Array
    last: Array

    def marked(self, score: Int32[Array, " c"], channel: Int32[Array, " c"]) -> Bool[Array, " c"]:
        """Whether channels of these scores are among them."""
        return (score > self.score) | ((score == self.score) & (channel <= self.last))


def _choose(score: Int32[Array, " c"], channel: Int32[Array, " c"], lanes: int) -> _Choice:
    """The ``lanes`` channels of the largest scores, of equal ones the first; without a sort, bit by bit."""

    def turn(index: Array, least: Array) -> Array:
        candidate = least | (1 << (_MOST_BITS - 1 - index))
        return jnp.where(jnp.sum((score >= candidate).astype(jnp.int32)) >= lanes, candidate, least)

    least = jax.lax.fori_loop(0, _MOST_BITS, turn, jnp.int32(0))
    wanted = lanes - jnp.sum((score > least).astype(jnp.int32))
    equal = (score == least).astype(jnp.int32)
    return _Choice(least, jnp.max(jnp.where((equal > 0) & (jnp.cumsum(equal) <= wanted), channel, -1)))


def _score(lowest: Array, highest: Array, energy: Array) -> Int32[Array, " c"]:
    """Numbers that order channels as their disturbance does, from 0 up."""
    return jnp.maximum(jax.lax.bitcast_convert_type(disturbance(lowest, highest, energy), jnp.int32), 0)


def _keys(block: _Block, energy_ref: jax.Ref, energy_row: Array) -> None:
    """Round and pack the keys. Marks depend on all channels, so that ranges are found twice: for them, and by tiles."""
    layout = block.layout
    channel = jnp.arange(pl.next_power_of_2(layout.head_dim), dtype=jnp.int32)
    real = channel < layout.head_dim
    height = min(BLOCK, _NUMBERS // channel.size)

    def turn(index: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        position = index * height + jnp.arange(height, dtype=jnp.int32)
        lowest, highest = block.extremes(block.load(position, channel, real).astype(jnp.float32), position)
        return jnp.minimum(state[0], lowest), jnp.maximum(state[1], highest)

    start = (jnp.full(channel.shape, jnp.inf, jnp.float32), jnp.full(channel.shape, -jnp.inf, jnp.float32))
    lowest, highest = jax.lax.fori_loop(0, BLOCK // height, turn, start)
    score = jnp.where(real, _score(lowest, highest, block.access.load(energy_ref, (energy_row, channel), real)), -1)
    choice = _choose(score, channel, layout.lanes)
    marked = choice.marked(score, channel)
    word = jnp.arange(MASK_WORDS, dtype=jnp.int32)
    bits = jnp.where(marked, 1 << (channel % 32), 0)[None, :]
    block.store(_MASK, word, jnp.sum(jnp.where(channel[None, :] // 32 == word[:, None], bits, 0), axis=1))

    size = layout.head_dim // layout.parts
    width = min(_WIDEST_TILE, pl.next_power_of_2(size))

    def columns(index: Array, _: None) -> None:
        column = index * width + jnp.arange(width, dtype=jnp.int32)
        inside = column < size
        t = jnp.arange(_QUARTER, dtype=jnp.int32)

        def part_of(part: Array, low: Array) -> Array:
            here = part * size + column
            energy = block.access.load(energy_ref, (energy_row, here), inside)
            below = jnp.sum((marked & (channel < part * size + index * width)).astype(jnp.int32))
            return low | _key_tile(block, choice, here, inside, energy, below) << (layout.base_bits * _QUARTERS * part)

        low = jax.lax.fori_loop(0, layout.parts, part_of, jnp.zeros((_QUARTER, width), jnp.int32))
        block.store(_LOW, column[None, :] * _QUARTER + t[:, None], low, inside[None, :])

    jax.lax.fori_loop(0, pl.cdiv(size, width), columns, None)


def _key_tile(
    block: _Block,
    choice: _Choice,
    channel: Int32[Array, " c"],
    inside: Bool[Array, " c"],
    energy: Float[Array, " c"],
    below: Int32[Array, ""],
) -> Int32[Array, "32 c"]:
    """The low codes of channels, the first quarter lowest; stores ranges, and upper bits from lane ``below`` on."""
    layout, t = block.layout, jnp.arange(_QUARTER, dtype=jnp.int32)
    quarters = [block.load(g * _QUARTER + t, channel, inside).astype(jnp.float32) for g in range(_QUARTERS)]
    ends = [block.extremes(tile, g * _QUARTER + t) for g, tile in enumerate(quarters)]
    lowest = functools.reduce(jnp.minimum, (low for low, _ in ends))
    highest = functools.reduce(jnp.maximum, (high for _, high in ends))
    marked = choice.marked(_score(lowest, highest, energy), channel) & inside
    within = key_range(lowest, highest, marked, layout)
    block.store(_AFFINE, channel, pair(within.scale, within.least), inside)
    within = KeyRange(*(part[None, :] for part in within))
    ones = marked.astype(jnp.int32)
    lane = below + jnp.cumsum(ones) - ones
    half, n = jnp.arange(2, dtype=jnp.int32), jnp.arange(16, dtype=jnp.int32)
    low = jnp.zeros((_QUARTER, channel.size), jnp.int32)
    for g, tile in enumerate(quarters):
        codes = key_codes(tile, within)
        low |= (codes & ((1 << layout.base_bits) - 1)) << (layout.base_bits * g)
        upper = (codes >> layout.base_bits).reshape(2, 16, channel.size) << (HIGH_BITS * n[None, :, None])
        block.store(_HIGH, lane[None, :] * 8 + 2 * g + half[:, None], jnp.sum(upper, axis=1), marked[None, :])
    return low


def _values(block: _Block, turn_ref: jax.Ref, norm_ref: jax.Ref, height: int, depth: int) -> None:
    """Rotate, round and pack the values, a tile of positions after the other."""
    head_dim = block.layout.head_dim
    size = head_dim // 2
    column = jnp.arange(max(_LEAST_SIDE, pl.next_power_of_2(size)), dtype=jnp.int32)
    inside = column < size
    norms = [block.access.load(norm_ref, (half * size + column,), inside) for half in (0, 1)]

    def turned(position: Int32[Array, " t"]) -> list[Array]:
        """The halves of rotated values; whole numbers in the sums, so that bf16 operands lose nothing."""

        def turn(index: Array, sums: list[Array]) -> list[Array]:
            channel = index * depth + jnp.arange(depth, dtype=jnp.int32)
            real = channel < head_dim
            part = block.load(position, channel, real)
            for half in (0, 1):
                place = (channel[:, None], (half * size + column)[None, :])
                signs = block.access.load(turn_ref, place, real[:, None] & inside[None, :])
                sums[half] += jax.lax.dot(part, signs, preferred_element_type=jnp.float32)
            return sums

        nothing = [jnp.zeros((height, column.size), jnp.float32) for _ in (0, 1)]
        sums = jax.lax.fori_loop(0, pl.cdiv(head_dim, depth), turn, nothing)
        return [part * norm[None, :] for part, norm in zip(sums, norms, strict=True)]

    def rows(index: Array, _: None) -> None:
        t = index * height + jnp.arange(height, dtype=jnp.int32)

        def quarters(g: Array, words: Array) -> Array:
            """The words with the codes of quarters ``g`` and ``g + 2``, whose scales share words."""
            scales = list[Array]()
            for quarter in (g, g + _QUARTERS // 2):
                halves = turned(quarter * _QUARTER + t)
                scale = value_scale(jnp.maximum(*(jnp.abs(part).max(axis=1) for part in halves)))
                for half, part in enumerate(halves):
                    words |= value_codes(part, scale[:, None]) << (VALUE_BITS * (_QUARTERS * half + quarter))
                scales.append(scale)
            block.store(_VALUE_SCALE, g * _QUARTER + t, pair(*scales))
            return words

        words = jax.lax.fori_loop(0, _QUARTERS // 2, quarters, jnp.zeros((height, column.size), jnp.int32))
        block.store(_VALUES, t[:, None] * size + column[None, :], words, inside[None, :])

    jax.lax.fori_loop(0, _QUARTER // height, rows, None)


def _kernel(
    plan_ref: jax.Ref,  # [6 items] int32, the fields of Filled
    k_ref: jax.Ref,  # [layers*tokens*kv_heads head_dim] bf16
    v_ref: jax.Ref,  # [layers*tokens*kv_heads head_dim] bf16
    energy_ref: jax.Ref,  # [layers*kv_heads head_dim] float32
    turn_ref: jax.Ref,  # [head_dim head_dim] bf16, -1, 0 and 1
    norm_ref: jax.Ref,  # [head_dim] float32
    recent_ref: jax.Ref,  # [layers*slots*kv_heads*2*144 head_dim] bf16
    _: jax.Ref,  # the words, which only the result writes
    words_ref: jax.Ref,  # [layers*num_pages*kv_heads*blocks block_words] int32
    *,
    layers: int,
    num_pages: int,
    blocks: int,
    layout: BitmaskLayout,
    height: int,
    depth: int,
    access: Access,
) -> None:
    # Bytes: a block of keys or values of a head in bf16 once or twice, and its words; the rotation's matrix comes from
    # L2. FLOPs of values: 256 * head_dim**2. Bound by neither: a block fills in one of 128 decode steps.
    item, head, layer = pl.program_id(0), pl.program_id(1) // 2, pl.program_id(2)
    kv_heads = energy_ref.shape[0] // layers
    slots, tokens = recent_ref.shape[0] // (layers * kv_heads * 2 * RECENT), k_ref.shape[0] // (layers * kv_heads)
    page = access.load(plan_ref, (jnp.int32(0), item))

    def block(new_ref: jax.Ref, value: int) -> _Block:
        place, number, slot, kept, first = (access.load(plan_ref, (jnp.int32(field), item)) for field in range(1, 6))
        return _Block(
            access=access,
            layout=layout,
            new_ref=new_ref,
            recent_ref=recent_ref,
            words_ref=words_ref,
            new_row=(layer * tokens + first) * kv_heads + head,
            token_rows=kv_heads,
            recent_row=(((layer * slots + slot) * kv_heads + head) * 2 + value) * RECENT,
            words_row=((layer * num_pages + page) * kv_heads + head) * blocks + place,
            kept=kept,
            number=number,
        )

    @pl.when((page < num_pages) & (pl.program_id(1) % 2 == 0))
    def _() -> None:
        _keys(block(k_ref, 0), energy_ref, layer * kv_heads + head)

    @pl.when((page < num_pages) & (pl.program_id(1) % 2 == 1))
    def _() -> None:
        _values(block(v_ref, 1), turn_ref, norm_ref, height, depth)


def write_blocks(
    pages: BitmaskPages,
    k: Float[Array, "layers tokens kv_heads head_dim"],
    v: Float[Array, "layers tokens kv_heads head_dim"],
    energy: Float[Array, "layers kv_heads head_dim"],
    plan: Filled,
    *,
    interpret: bool,
    access: Access,
) -> Int32[Array, "layers num_pages kv_heads blocks block_words"]:
    """The pool's words with the blocks of ``plan``, in their place."""
    layers, num_pages, kv_heads, blocks, _ = pages.words.shape
    head_dim = k.shape[3]
    turn = rotation(head_dim)
    size = pages.words.shape[-1]
    kernel = functools.partial(
        _kernel,
        layers=layers,
        num_pages=num_pages,
        blocks=blocks,
        layout=layout_of(pages, head_dim),
        height=_HEIGHT,
        depth=max(_LEAST_SIDE, min(_DEPTH, pl.next_power_of_2(head_dim))),
        access=access,
    )
    words = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((math.prod(pages.words.shape[:-1]), size), jnp.int32),
        grid=(plan.page.shape[0], 2 * kv_heads, layers),
        input_output_aliases={7: 0},
        compiler_params=plgpu.CompilerParams(num_warps=4 if head_dim <= 128 else 8, num_stages=1),
        interpret=interpret,
        name="page_write_blocks",
    )(
        jnp.stack(plan[:-1]),
        *(new.astype(pages.recent.dtype).reshape(-1, head_dim) for new in (k, v)),
        energy.astype(jnp.float32).reshape(-1, head_dim),
        jnp.asarray(np.sign(turn), jnp.bfloat16),
        jnp.asarray(np.abs(turn).max(axis=0)),
        pages.recent.reshape(-1, head_dim),
        pages.words.reshape(-1, size),
    )
    return words.reshape(pages.words.shape)
