"""Sizes of the quantised layouts: words of sections, sectors, bits of an element, bytes of pages."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import pages as pools
from pallas_kernels.errors import ContractError
from pallas_kernels.kv_layout import (
    BITMASK_HEAD_DIMS,
    BLOCK,
    RECENT,
    SINKS,
    BitmaskLayout,
    bitmask_page_bytes,
    int8_page_bytes,
    int8_page_size,
    int8_page_words,
    recent_bytes,
)
from pallas_kernels.pages import BitmaskPages, Int8Pages
from tests.support import quantised

BITS = {
    (4, 8): 5.5, (4, 16): 4.9375, (4, 32): 4.65625, (4, 64): 4.515625, (4, 80): 4.4875, (4, 96): 4.46875,
    (4, 128): 4.4453125, (4, 256): 4.41015625,
    (2, 8): 4.75, (2, 16): 4.1875, (2, 32): 3.90625, (2, 64): 3.765625, (2, 80): 3.7375, (2, 96): 3.71875,
    (2, 128): 3.6953125, (2, 256): 3.66015625,
}  # fmt: skip

unchecked_shape = inspect.unwrap(pools.pool_shape)


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, np.int32)


def test_constants():
    assert (BLOCK, SINKS, RECENT) == (quantised.BLOCK, quantised.SINKS, quantised.RECENT)
    assert {head_dim for _, head_dim in BITS} == set(BITMASK_HEAD_DIMS)


@pytest.mark.parametrize(("base_bits", "head_dim"), BITS)
def test_a_block_is_its_sections_each_at_a_sector(base_bits, head_dim):
    layout, sections = BitmaskLayout(head_dim, base_bits), quantised.section_words(head_dim, base_bits)
    assert layout.lanes == quantised.lanes_of(head_dim, base_bits)
    assert np.diff([*layout.starts, layout.words]).tolist() == list(sections)
    assert all(start * 4 % 32 == 0 for start in (*layout.starts, layout.words))
    assert layout.words == {4: 35, 2: 29}[base_bits] * head_dim + 72
    for blocks in (1, 2, 4):
        assert bitmask_page_bytes(blocks * BLOCK, head_dim, base_bits) == blocks * layout.words * 4


@pytest.mark.parametrize(("base_bits", "head_dim"), BITS)
def test_bits_of_an_element(base_bits, head_dim):
    found = BitmaskLayout(head_dim, base_bits).bits_per_element
    assert found == BITS[base_bits, head_dim]
    assert found == sum(quantised.section_words(head_dim, base_bits)) * 32 / (2 * 128 * head_dim)
    if head_dim >= 64:
        assert found <= {4: 4.6, 2: 3.8}[base_bits]


@pytest.mark.parametrize("head_dim", [4, 8, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("page_size", [1, 16, 64, 512])
def test_int8_pages(head_dim, page_size):
    words = int8_page_words(page_size, head_dim)
    assert words == quantised.int8_page_words(page_size, head_dim)
    assert int8_page_size(words, head_dim) == page_size
    assert int8_page_bytes(page_size, head_dim) == 4 * words == page_size * (2 * head_dim + 4)


def test_what_a_slot_keeps():
    assert recent_bytes(64) == 2 * 144 * 64 * 2


def test_pools_tell_their_sizes():
    assert pools.pool_shape(Int8Pages(shape(3, 9, 2, 16 * 33)), 64) == (3, 9, 2, 16, 64)
    for words in (2312, 1928):
        bitmask = BitmaskPages(shape(3, 9, 2, 4, words), shape(3, 5, 2, 2, 144, 64))
        assert pools.pool_shape(bitmask, 64) == (3, 9, 2, 512, 64)
    assert pools.pool_shape(jnp.zeros((3, 9, 2, 2, 32, 64)), 64) == (3, 9, 2, 32, 64)


@pytest.mark.parametrize(
    ("pool", "head_dim", "message"),
    [
        (Int8Pages(shape(3, 9, 2, 16 * 33)), 80, "pages of 528 words do not hold keys and values of head_dim 80"),
        (Int8Pages(shape(3, 9, 2, 16 * 32)), 62, "pages of 512 words do not hold keys and values of head_dim 62"),
        (
            BitmaskPages(shape(3, 9, 2, 1, 2312), shape(3, 5, 2, 2, 144, 64)), 128,
            "blocks of 2312 words beside rows of 64 do not hold keys and values of head_dim 128",
        ),
        (
            BitmaskPages(shape(3, 9, 2, 1, 2312), shape(3, 5, 2, 2, 144, 32)), 64,
            "blocks of 2312 words beside rows of 32 do not hold keys and values of head_dim 64",
        ),
        (BitmaskPages(shape(3, 9, 2, 1, 2312), shape(3, 5, 2, 2, 144, 48)), 48, "head_dim 48 is none that bitmask"),
        (jnp.zeros((3, 9, 2, 2, 32, 64)), 32, r"pages \(3, 9, 2, 2, 32, 64\) do not hold"),
    ],
)  # fmt: skip
def test_a_pool_of_other_keys_and_values_is_refused(pool, head_dim, message):
    with pytest.raises(ContractError, match=message):
        unchecked_shape(pool, head_dim)
