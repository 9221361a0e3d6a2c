"""Page pools of the quantised formats for tests, written and read as the text of ``kv_layout`` says, in NumPy.

Owns a second statement of the word layouts and of the rounding: nothing here comes from the code that is tested but
the two pool types. Every function takes leading axes. Histories lie in pages of random order, with NaN patterns
wherever nothing may be read.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from pallas_kernels.pages import BitmaskPages, Int8Pages
from tests.support.paged import LAYERS

Array = np.ndarray

BASE_BITS = {"bmq4": 4, "bmq2": 2}
FORMATS = ("int8", *BASE_BITS)
GARBAGE = 0x7FC07FC0
"""A word of two bf16 NaN."""

BLOCK, SINKS, RECENT = 128, 16, 144
SHARES = {2: 0.75, 4: 0.98, 6: 1.0}
"""Share of a key channel's range that codes of so many bits span."""


def bf16(x: Array) -> Array:
    """The nearest bf16 numbers, as float32."""
    return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)


def paired(lower: Array, upper: Array) -> Array:
    """Words of two bf16 numbers each."""
    halves = [part.astype(ml_dtypes.bfloat16).view(np.uint16).astype(np.uint32) for part in (lower, upper)]
    return (halves[0] | halves[1] << np.uint32(16)).view(np.int32)


def halves(words: Array) -> tuple[Array, Array]:
    """The lower and the upper bf16 number of each word, as float64."""
    bits = np.ascontiguousarray(words).view(np.uint32)
    both = (bits << np.uint32(16)).view(np.float32), (bits & np.uint32(0xFFFF0000)).view(np.float32)
    return both[0].astype(np.float64), both[1].astype(np.float64)


@functools.cache
def rotation(head_dim: int) -> Array:
    """float64 [d, d]: row d of a Hadamard matrix of the block that d lies in, over its root, times a fixed sign."""
    signs = np.random.default_rng(128).choice(np.array([-1.0, 1.0]), head_dim)
    turn, start = np.zeros((head_dim, head_dim)), 0
    for size in (256, 128, 64, 32, 16, 8):
        if head_dim - start >= size:
            for i in range(size):
                for j in range(size):
                    turn[start + i, start + j] = (-1) ** (i & j).bit_count() / size**0.5
            start += size
    assert start == head_dim
    return signs[:, None] * turn


def int8_page_words(page_size: int, head_dim: int) -> int:
    """Words of a page: keys, values, scales."""
    return 2 * page_size * head_dim // 4 + page_size


def int8_rounded(x: Array) -> tuple[Array, Array]:
    """Codes [..., d] and bf16 scales [...] of vectors, computed in float32."""
    x = np.asarray(x, np.float32)
    scale = bf16(np.maximum(np.abs(x).max(-1) / np.float32(127), np.float32(1e-30)))
    codes = np.floor(x / scale[..., None] + np.float32(0.5))
    return np.clip(codes, -127, 127).astype(np.int32), scale


def int8_code_words(codes: Array) -> Array:
    """[..., d] codes -> [..., d / 4] words."""
    width = codes.shape[-1] // 4
    words = np.zeros((*codes.shape[:-1], width), np.uint32)
    for byte in range(4):
        part = codes[..., byte * width : (byte + 1) * width]
        words |= (part.astype(np.uint32) & np.uint32(0xFF)) << np.uint32(8 * byte)
    return words.view(np.int32)


def int8_page(k_codes: Array, k_scale: Array, v_codes: Array, v_scale: Array) -> Array:
    """Codes [..., page_size, d] and scales [..., page_size] -> pages [..., page_words]."""
    before = k_codes.shape[:-2]
    parts = int8_code_words(k_codes), int8_code_words(v_codes), paired(k_scale, v_scale)
    return np.concatenate([part.reshape(*before, -1) for part in parts], axis=-1)


def int8_read(words: Array, page_size: int, head_dim: int) -> Array:
    """Pages [..., page_words] -> float64 [..., 2, page_size, d]."""
    width, before = head_dim // 4, words.shape[:-1]
    codes = words[..., : 2 * page_size * width].reshape(*before, 2, page_size, width)
    # a byte at the top of a word, moved down with its sign
    channels = [(codes.view(np.uint32) << np.uint32(24 - 8 * byte)).view(np.int32) >> 24 for byte in range(4)]
    scale = np.stack(halves(words[..., 2 * page_size * width :]), axis=-2)
    return np.concatenate(channels, axis=-1) * scale[..., None]


@dataclass(frozen=True, slots=True)
class Block:
    """What the words of blocks say; codes of marked channels with their upper bits, values as they were turned."""

    key_codes: Array  # [..., 128, d]
    marked: Array  # [..., d] bool
    scale: Array  # [..., d]
    least: Array  # [..., d]
    value_codes: Array  # [..., 128, d]
    value_scale: Array  # [..., 128]

    @property
    def keys(self) -> Array:
        """float64 [..., 128, d]."""
        scale, least = (part.astype(np.float64)[..., None, :] for part in (self.scale, self.least))
        return self.key_codes * scale + least

    @property
    def turned_values(self) -> Array:
        """float64 [..., 128, d], before the rotation is undone."""
        return (self.value_codes - 7.5) * self.value_scale.astype(np.float64)[..., None]

    @property
    def values(self) -> Array:
        """float64 [..., 128, d]."""
        return self.turned_values @ rotation(self.value_codes.shape[-1]).T


def lanes_of(head_dim: int, base_bits: int) -> int:
    """Marked channels of a block."""
    return head_dim // 4 if base_bits == 4 else head_dim // 2


def section_words(head_dim: int, base_bits: int) -> tuple[int, ...]:
    """Words of the six sections of a block."""
    parts = 8 // base_bits
    return head_dim // parts * 32, lanes_of(head_dim, base_bits) * 8, 32 * head_dim // 2, head_dim, 64, 8


def block_rounded(k: Array, v: Array, energy: Array, counted: Array, base_bits: int) -> Block:
    """The block of keys and values [..., 128, d], computed in float32; ties of channels go to the lower ones."""
    half = np.float32(0.5)
    k, v, energy = (np.asarray(part, np.float32) for part in (k, v, energy))
    inside = np.broadcast_to(counted[..., None], k.shape)
    lowest = np.where(inside, k, np.float32(np.inf)).min(-2)
    highest = np.where(inside, k, np.float32(-np.inf)).max(-2)
    disturbance = energy * (highest - lowest) ** 2
    first = np.argsort(-disturbance, axis=-1, kind="stable")[..., : lanes_of(k.shape[-1], base_bits)]
    marked = np.zeros(disturbance.shape, bool)
    np.put_along_axis(marked, first, values=True, axis=-1)
    most = np.where(marked, 2 ** (base_bits + 2) - 1, 2**base_bits - 1).astype(np.float32)
    share = np.where(marked, SHARES[base_bits + 2], SHARES[base_bits]).astype(np.float32)
    middle, reach = (highest + lowest) * half, (highest - lowest) * half * share
    least = bf16(middle - reach)
    scale = bf16(np.maximum((middle + reach - least) / most, np.float32(1e-30)))
    codes = np.floor((k - least[..., None, :]) / scale[..., None, :] + half)
    codes = np.clip(codes, 0, most[..., None, :]).astype(np.int32)
    turned = (v.astype(np.float64) @ rotation(v.shape[-1])).astype(np.float32)
    value_scale = bf16(np.maximum(np.abs(turned).max(-1) / np.float32(8), np.float32(1e-30)))
    value_codes = np.floor(turned / value_scale[..., None] + np.float32(8))
    return Block(codes, marked, scale, least, np.clip(value_codes, 0, 15).astype(np.int32), value_scale)


def block_words(block: Block, base_bits: int) -> Array:
    """[..., words] of blocks."""
    *before, _, head_dim = block.key_codes.shape
    sizes = section_words(head_dim, base_bits)
    part, width = head_dim // (8 // base_bits), head_dim // 2
    low = np.zeros((*before, part, 32), np.uint32)
    values = np.zeros((*before, 32, width), np.uint32)
    mask = np.zeros((*before, 8), np.uint32)
    key_codes, value_codes = block.key_codes.astype(np.uint32), block.value_codes.astype(np.uint32)
    for n in range(32 // base_bits):
        i, g = divmod(n, 4)
        codes = key_codes[..., 32 * g : 32 * g + 32, i * part : (i + 1) * part] & np.uint32((1 << base_bits) - 1)
        low |= np.swapaxes(codes, -1, -2) << np.uint32(base_bits * n)
    for n in range(8):
        h, g = divmod(n, 4)
        values |= value_codes[..., 32 * g : 32 * g + 32, h * width : (h + 1) * width] << np.uint32(4 * n)
    for channel in range(head_dim):
        mask[..., channel // 32] |= block.marked[..., channel].astype(np.uint32) << np.uint32(channel % 32)
    channels = np.argsort(~block.marked, axis=-1, kind="stable")[..., : sizes[1] // 8]  # of the lanes
    upper = np.swapaxes(np.take_along_axis(key_codes, channels[..., None, :], axis=-1) >> np.uint32(base_bits), -1, -2)
    high = np.zeros((*before, sizes[1] // 8, 8), np.uint32)
    for n in range(16):
        high |= upper[..., n::16] << np.uint32(2 * n)
    sections = (
        low, high, values, paired(block.scale, block.least),
        paired(block.value_scale[..., :64], block.value_scale[..., 64:]), mask,
    )  # fmt: skip
    return np.concatenate([section.reshape(*before, -1).view(np.int32) for section in sections], axis=-1)


def block_read(words: Array, head_dim: int, base_bits: int) -> Block:
    """Blocks [..., words] -> what they say.

    Raises:
        ValueError: the words are not of a block, or its mask has too few or too many marks.
    """
    sizes, before = section_words(head_dim, base_bits), words.shape[:-1]
    if words.shape[-1] != sum(sizes):
        raise ValueError(f"{words.shape[-1]} words, a block has {sum(sizes)}")
    low, high, values, affine, value_scale, mask = np.split(words, np.cumsum(sizes)[:-1], axis=-1)
    part, width = head_dim // (8 // base_bits), head_dim // 2
    low, high, values, mask = (
        section.view(np.uint32) for section in map(np.ascontiguousarray, (low, high, values, mask))
    )
    low, high, values = (
        low.reshape(*before, part, 32), high.reshape(*before, -1, 8), values.reshape(*before, 32, width),
    )  # fmt: skip
    key_codes, value_codes = np.zeros((2, *before, BLOCK, head_dim), np.int32)
    for n in range(32 // base_bits):
        i, g = divmod(n, 4)
        codes = low >> np.uint32(base_bits * n) & np.uint32((1 << base_bits) - 1)
        key_codes[..., 32 * g : 32 * g + 32, i * part : (i + 1) * part] = np.swapaxes(codes, -1, -2)
    for n in range(8):
        h, g = divmod(n, 4)
        codes = values >> np.uint32(4 * n) & np.uint32(15)
        value_codes[..., 32 * g : 32 * g + 32, h * width : (h + 1) * width] = codes
    marked = np.stack([mask[..., d // 32] >> np.uint32(d % 32) & np.uint32(1) for d in range(head_dim)], -1) > 0
    if np.any(marked.sum(-1) != high.shape[-2]):
        raise ValueError(f"{marked.sum(-1)} channels are marked, {high.shape[-2]} must be")
    upper = np.stack([high[..., t // 16] >> np.uint32(2 * (t % 16)) & np.uint32(3) for t in range(BLOCK)], -1)
    lane = np.maximum(np.cumsum(marked, -1) - 1, 0)
    above = np.swapaxes(np.take_along_axis(upper, lane[..., None], axis=-2), -1, -2) * marked[..., None, :]
    key_codes += above.astype(np.int32) << base_bits
    scale, least = halves(affine)
    return Block(key_codes, marked, scale, least, value_codes, np.concatenate(halves(value_scale), -1))


@dataclass(frozen=True, slots=True)
class QuantisedHistory:
    """A pool of NumPy arrays, what belongs to its rows, and the same keys and values plainly.

    ``plain`` is float64 [LAYERS, rows, kv_heads, 2, positions, d]: a pool whose page i, the only one of row i, holds
    the row's whole history, NaN behind its length; ``plain_table`` is the page table of that.
    """

    pages: Int8Pages | BitmaskPages
    table: Array
    slots: Array
    lengths: Array
    plain: Array
    plain_table: Array


def quantised_history(
    kv_format: str,
    rng: np.random.Generator,
    lengths: Sequence[int],
    *,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    width: int,
    slots: Sequence[int] | None = None,
    num_slots: int = 0,
    spare: int = 2,
    garbage: int = GARBAGE,
) -> QuantisedHistory:
    """Rows of the given lengths, with random codes and scales, whose pages lie in random order among ``spare`` others.

    ``slots`` are the rows' places in what bitmask pools keep in bf16 (default: in order), which has ``num_slots``
    places (0: ``spare`` more than needed). Whatever belongs to no position of a row holds ``garbage``; places of the
    table behind the row's pages hold ids inside and outside the pool.
    """
    of_row = np.arange(len(lengths)) if slots is None else np.asarray(slots)
    bitmask = kv_format in BASE_BITS
    in_pages = [length // BLOCK * BLOCK if bitmask else length for length in lengths]
    # a sequence owns pages for all of its positions, also where they are not in a block yet
    needed = [-(-length // page_size) for length in lengths]
    num_pages = sum(needed) + spare
    table = rng.choice(np.array([-1, 0, num_pages - 1, num_pages, 2**31 - 1], np.int32), (len(lengths), width))
    ids = rng.permutation(num_pages).astype(np.int32)
    for row, count in enumerate(needed):
        table[row, :count], ids = ids[:count], ids[count:]
    shape = (LAYERS, num_pages, kv_heads)
    used = np.zeros((num_pages, page_size), bool)
    for row, end in enumerate(in_pages):
        for position in range(end):
            used[table[row, position // page_size], position % page_size] = True
    recent = None
    if bitmask:
        words, both = _bitmask_words(rng, shape, head_dim, BASE_BITS[kv_format], page_size // BLOCK)
        full = used.reshape(num_pages, 1, -1, BLOCK).all(-1)[None, ..., None]
        words = np.where(full, words, np.uint32(garbage).view(np.int32))
        num_slots = num_slots or int(max(of_row, default=0)) + 1 + spare
        pattern = np.full((LAYERS, num_slots, kv_heads, 2, RECENT, head_dim), garbage & 0xFFFF, np.uint16)
        recent = pattern.view(ml_dtypes.bfloat16)
    else:
        words, both = _int8_words(rng, shape, head_dim, used, garbage)
    plain = np.full((LAYERS, len(lengths), kv_heads, 2, max(1, *lengths), head_dim), np.nan)
    for row, (length, end) in enumerate(zip(lengths, in_pages, strict=True)):
        for position in range(length):
            inside = position < end and not (bitmask and position < SINKS)
            if inside:
                page, offset = table[row, position // page_size], position % page_size
                plain[:, row, :, :, position] = both[:, page, :, :, offset]
            else:
                assert recent is not None
                exact = rng.standard_normal((LAYERS, kv_heads, 2, head_dim), np.float32).astype(ml_dtypes.bfloat16)
                line = position if position < SINKS else SINKS + position % BLOCK
                recent[:, of_row[row], :, :, line] = exact
                plain[:, row, :, :, position] = exact.astype(np.float64)
    pages = Int8Pages(words) if recent is None else BitmaskPages(words, recent)
    rows = np.arange(len(lengths), dtype=np.int32)
    return QuantisedHistory(pages, table, of_row.astype(np.int32), np.asarray(lengths, np.int32), plain, rows[:, None])


def _int8_words(
    rng: np.random.Generator, shape: tuple[int, ...], head_dim: int, used: Array, garbage: int
) -> tuple[Array, Array]:
    page_size = used.shape[1]
    codes = rng.integers(-127, 128, (2, *shape, page_size, head_dim))
    scales = bf16(rng.uniform(0.01, 0.03, (2, *shape, page_size)))
    words = int8_page(codes[0], scales[0], codes[1], scales[1])
    whole = used[:, None, :, None]
    per_position = [np.broadcast_to(whole, (*shape, page_size, head_dim // 4)).reshape(*shape, -1)] * 2
    kept = np.concatenate([*per_position, np.broadcast_to(used[:, None], (*shape, page_size))], axis=-1)
    words = np.where(kept, words, np.uint32(garbage).view(np.int32))
    return words, int8_read(words, page_size, head_dim)


def _bitmask_words(
    rng: np.random.Generator, shape: tuple[int, ...], head_dim: int, base_bits: int, blocks: int
) -> tuple[Array, Array]:
    before = (*shape, blocks)
    order = rng.permuted(np.broadcast_to(np.arange(head_dim), (*before, head_dim)), axis=-1)
    marked = order < lanes_of(head_dim, base_bits)
    most = np.where(marked, 2 ** (base_bits + 2) - 1, 2**base_bits - 1)
    block = Block(
        key_codes=np.floor(rng.random((*before, BLOCK, head_dim)) * (most[..., None, :] + 1)).astype(np.int32),
        marked=marked,
        scale=bf16(rng.uniform(2.0, 5.0, (*before, head_dim)) / most),
        least=bf16(rng.uniform(-3.0, 0.0, (*before, head_dim))),
        value_codes=rng.integers(0, 16, (*before, BLOCK, head_dim)),
        value_scale=bf16(rng.uniform(0.1, 0.4, (*before, BLOCK))),
    )
    words = block_words(block, base_bits)
    read = block_read(words, head_dim, base_bits)
    both = np.stack([read.keys, read.values], axis=-4)  # ... kv_heads 2 blocks 128 d
    return words, both.reshape(*shape, 2, blocks * BLOCK, head_dim)
