"""What a pool must hold after sequences were written to it, position by position, in NumPy; for every format."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from pallas_kernels.pages import BitmaskPages, Int8Pages
from tests.support.quantised import (
    BASE_BITS,
    BLOCK,
    RECENT,
    SINKS,
    block_read,
    block_rounded,
    block_words,
    int8_code_words,
    int8_page_words,
    int8_rounded,
    paired,
    section_words,
)

Array = np.ndarray


@dataclass(frozen=True, slots=True)
class Written:
    """One sequence: its page ids, its slot, and the keys and values [layers, positions, kv_heads, d] of its tokens."""

    pages: Array
    slot: int
    k: Array
    v: Array

    @property
    def length(self) -> int:
        """Positions."""
        return self.k.shape[1]


def garbage_pool(
    kv_format: str, rng: np.random.Generator, layers: int, num_pages: int, kv_heads: int, page_size: int, head_dim: int,
    slots: int,
) -> Any:  # fmt: skip
    """A pool whose every bit is random; what it holds in bf16, it holds as bits."""

    def words(*shape: int) -> Array:
        return rng.integers(-(2**31), 2**31, (layers, num_pages, kv_heads, *shape), np.int32)

    if kv_format == "float32":
        return words(2, page_size, head_dim).view(np.float32)
    if kv_format == "bf16":
        return rng.integers(0, 2**16, (layers, num_pages, kv_heads, 2, page_size, head_dim), np.uint16)
    if kv_format == "int8":
        return Int8Pages(words(int8_page_words(page_size, head_dim)))
    recent = rng.integers(0, 2**16, (layers, slots, kv_heads, 2, RECENT, head_dim), np.uint16)
    size = sum(section_words(head_dim, BASE_BITS[kv_format]))
    return BitmaskPages(words(page_size // BLOCK, size), recent)


def assert_written(
    kv_format: str, before: Any, after: Any, sequences: Sequence[Written], energy: Array, page_size: int
) -> None:
    """Each sequence lies where it belongs, and all else is as it was, bit for bit.

    Rows in bf16 of a slot that has a sequence, but no position of it, may hold anything.
    """
    if kv_format in BASE_BITS:
        wanted = _blocks(before.words, after.words, sequences, energy, page_size, BASE_BITS[kv_format])
        np.testing.assert_array_equal(after.words, wanted)
        np.testing.assert_array_equal(after.recent, _recent(before.recent, after.recent, sequences))
    elif kv_format == "int8":
        np.testing.assert_array_equal(after.words, _codes(before.words, sequences, page_size))
    else:
        wanted = _floats(before, sequences, page_size)
        np.testing.assert_array_equal(np.asarray(after).view(np.int16), wanted.view(np.int16))


def meaning(kv_format: str, pool: Any, sequences: Sequence[Written]) -> list[Array]:
    """The pool's bits, but for bf16 rows that hold no position."""
    if kv_format not in BASE_BITS:
        return [np.asarray(part).view(np.int16) for part in ([pool] if kv_format in ("float32", "bf16") else pool)]
    recent = np.array(pool.recent)
    for sequence in sequences:
        held = [line for line, _ in _lines(sequence.length)]
        recent[:, sequence.slot, :, :, np.setdiff1d(np.arange(RECENT), held)] = 0
    return [np.asarray(pool.words), recent]


def _page(sequence: Written, position: int, page_size: int, num_pages: int) -> int | None:
    index = position // page_size
    page = int(sequence.pages[index]) if index < len(sequence.pages) else -1
    return page if 0 <= page < num_pages else None


def _floats(pool: Array, sequences: Sequence[Written], page_size: int) -> Array:
    out = pool.copy()
    for sequence in sequences:
        for position in range(sequence.length):
            page = _page(sequence, position, page_size, pool.shape[1])
            if page is not None:
                for value, new in enumerate((sequence.k, sequence.v)):
                    number = new[:, position] if pool.dtype == np.float32 else _bits(new[:, position])
                    out[:, page, :, value, position % page_size] = number
    return out


def _codes(words: Array, sequences: Sequence[Written], page_size: int) -> Array:
    out = words.copy()
    for sequence in sequences:
        (keys, k_scale), (values, v_scale) = int8_rounded(sequence.k), int8_rounded(sequence.v)
        keys, values, scales = int8_code_words(keys), int8_code_words(values), paired(k_scale, v_scale)
        width = keys.shape[-1]
        for position in range(sequence.length):
            page, offset = _page(sequence, position, page_size, words.shape[1]), position % page_size
            if page is not None:
                out[:, page, :, offset * width : (offset + 1) * width] = keys[:, position]
                start = (page_size + offset) * width
                out[:, page, :, start : start + width] = values[:, position]
                out[:, page, :, 2 * page_size * width + offset] = scales[:, position]
    return out


def _blocks(
    before: Array, after: Array, sequences: Sequence[Written], energy: Array, page_size: int, base_bits: int
) -> Array:
    """The words before with every full block; codes are those after where they differ by a rounding."""
    out = before.copy()
    for sequence in sequences:
        rounded = (part.astype(ml_dtypes.bfloat16).astype(np.float32) for part in (sequence.k, sequence.v))
        k, v = (np.swapaxes(part, 1, 2) for part in rounded)  # layers kv_heads positions d
        for number in range(sequence.length // BLOCK):
            page = _page(sequence, number * BLOCK, page_size, before.shape[1])
            if page is None:
                continue
            own = slice(number * BLOCK, (number + 1) * BLOCK)
            counted = np.arange(own.start, own.stop) >= SINKS
            block = block_rounded(k[:, :, own], v[:, :, own], energy, counted, base_bits)
            place = number % (page_size // BLOCK)
            found = block_read(np.asarray(after[:, page, :, place]), k.shape[-1], base_bits)
            # the sums of the rotation may be done in another order; a key between two codes may get either
            np.testing.assert_allclose(found.value_scale, block.value_scale, rtol=2.0**-7)
            assert np.abs(found.value_codes - block.value_codes).max() <= 1
            assert np.mean(found.value_codes != block.value_codes) < 1e-3
            most = np.where(block.marked, 2 ** (base_bits + 2) - 1, 2**base_bits - 1)[..., None, :]
            quotient = (k[:, :, own] - block.least[..., None, :].astype(np.float64)) / block.scale[..., None, :]
            assert np.abs(found.key_codes - np.clip(quotient, 0, most)).max() <= 0.5 + 1e-5
            block.key_codes[:], block.value_codes[:] = found.key_codes, found.value_codes
            block.value_scale[:] = found.value_scale
            out[:, page, :, place] = block_words(block, base_bits)
    return out


def _bits(x: Array) -> Array:
    """The bits of numbers rounded to bf16."""
    return x.astype(ml_dtypes.bfloat16).view(np.uint16)


def _lines(length: int) -> list[tuple[int, int]]:
    """Rows in bf16 that a sequence of that length holds, and the position in each."""
    opened = length // BLOCK * BLOCK
    kept = [position for position in range(length) if position < SINKS or position >= opened]
    return [(position if position < SINKS else SINKS + position % BLOCK, position) for position in kept]


def _recent(before: Array, after: Array, sequences: Sequence[Written]) -> Array:
    out = np.array(before)
    for sequence in sequences:
        if not 0 <= sequence.slot < before.shape[1]:
            continue
        if sequence.length:
            out[:, sequence.slot] = after[:, sequence.slot]
        for line, position in _lines(sequence.length):
            out[:, sequence.slot, :, 0, line] = _bits(sequence.k[:, position])
            out[:, sequence.slot, :, 1, line] = _bits(sequence.v[:, position])
    return out
