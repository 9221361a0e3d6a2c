"""Blocks of the bitmask formats: words, what they say, and how far that lies from the keys and values."""

import functools
import inspect

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.errors import ContractError
from pallas_kernels.kv_bitmask import op
from pallas_kernels.kv_bitmask.cases import CASES, BlockCase
from pallas_kernels.kv_bitmask.rotation import rotation
from pallas_kernels.kv_layout import BITMASK_HEAD_DIMS, BLOCK, SINKS
from tests.support import quantised
from tests.support.quantised import SHARES, Block, block_read, block_rounded, block_words, lanes_of
from tests.support.quick import quick_jit

NAMED = {case.name: case for case in CASES}
FIRST = np.arange(BLOCK) >= SINKS
"""The counted positions of a first block."""
EVERY = np.ones(BLOCK, bool)
READ_BY_BOTH = (64, 80)
"""Head dims at which ``reference`` reads too; it compiles for long."""
ULP = 2.0**-8
"""Largest relative error of rounding to bf16."""

unchecked_quantize, unchecked_dequantize = inspect.unwrap(op.quantize), inspect.unwrap(op.dequantize)


def both_ways(k, v, energy, counted, *, head_dim, base_bits):
    """Words by both implementations, and what they read in the words of ``xla``."""
    words = {i: op.quantize(k, v, energy, counted, base_bits=base_bits, implementation=i) for i in ("xla", "reference")}
    read = functools.partial(op.dequantize, words["xla"], head_dim=head_dim, base_bits=base_bits)
    readers = ("xla", "reference") if head_dim in READ_BY_BOTH else ("xla",)
    return words, {i: read(implementation=i) for i in readers}


@functools.cache
def compiled(case: BlockCase):
    return quick_jit(functools.partial(both_ways, head_dim=case.head_dim, base_bits=case.base_bits))


def run(case: BlockCase, k, v, energy, counted=EVERY):
    """``both_ways`` of one to three blocks, in a launch of three."""
    blocks = np.shape(k)[0]
    arrays = [np.resize(np.asarray(part, np.float32), (case.blocks, *part.shape[1:])) for part in (k, v, energy)]
    words, read = compiled(case)(*arrays, np.resize(counted, (case.blocks, BLOCK)))
    cut = functools.partial(jax.tree.map, lambda leaf: np.asarray(leaf)[:blocks])
    return cut(words), cut(read)


def read_block(case: BlockCase, *arguments) -> Block:
    """What the words of ``xla`` say, by the other statement."""
    words, _ = run(case, *arguments)
    return block_read(words["xla"], case.head_dim, case.base_bits)


def sample(case: BlockCase, seed: int = 0):
    """Keys with channels of different means and widths, values with some that stand out, energies of all sizes."""
    rng = np.random.default_rng(seed)
    shape, channels = (case.blocks, BLOCK, case.head_dim), (case.blocks, 1, case.head_dim)
    k = rng.standard_normal(shape) * np.exp(rng.standard_normal(channels)) + 3 * rng.standard_normal(channels)
    v = rng.standard_normal(shape) * np.exp(rng.standard_normal(channels))
    return k.astype(np.float32), v.astype(np.float32), rng.exponential(size=channels[::2]).astype(np.float32)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_words_are_those_of_the_layout(case):
    k, v, energy = sample(case)
    counted = np.stack([FIRST, EVERY, EVERY])
    words, read = run(case, k, v, energy, counted)
    np.testing.assert_array_equal(words["xla"], words["reference"])
    block, wanted = (
        block_read(words["xla"], case.head_dim, case.base_bits),
        block_rounded(k, v, energy, counted, case.base_bits),
    )
    for name in ("key_codes", "marked", "scale", "least"):
        np.testing.assert_array_equal(getattr(block, name), getattr(wanted, name), name)
    # the sums of the rotation may be done in another order
    np.testing.assert_allclose(block.value_scale, wanted.value_scale, rtol=2 * ULP)
    assert np.abs(block.value_codes - wanted.value_codes).max() <= 1
    assert np.mean(block.value_codes != wanted.value_codes) < 1e-3
    np.testing.assert_array_equal(block_words(block, case.base_bits), words["xla"])
    for keys, turned in read.values():
        np.testing.assert_allclose(keys, block.keys, rtol=1e-6, atol=1e-6 * np.abs(k).max())
        np.testing.assert_allclose(turned, block.turned_values, rtol=1e-6)
    assert_bounds(case, k, v, block, counted)


def assert_bounds(case: BlockCase, k, v, block: Block, counted) -> None:
    """Whatever lies between the codes' ends is within half a step, the rest is cut to an end; the ends are where they
    were meant to be, but for rounding to bf16."""
    assert np.all(block.marked.sum(-1) == lanes_of(case.head_dim, case.base_bits))
    k, v = k.astype(np.float64), v.astype(np.float64)
    most = np.where(block.marked, 2 ** (case.base_bits + 2) - 1, 2**case.base_bits - 1)
    least, top = block.least, block.least + block.scale * most
    beyond = np.maximum(np.maximum(least[:, None] - k, k - top[:, None]), 0)
    error, slack = np.abs(k - block.keys), 1e-6 * np.abs(k).max()
    assert np.all((error <= block.scale[:, None] / 2 + beyond + slack) | ~counted[..., None])
    lowest, highest = (np.where(counted[..., None], k, edge).min(-2) for edge in (np.inf, -np.inf))
    highest = np.where(counted[..., None], k, -np.inf).max(-2)
    share = np.where(block.marked, SHARES[case.base_bits + 2], SHARES[case.base_bits])
    cut = (highest - lowest) * (1 - share) / 2
    blur = ULP * np.maximum(np.abs(lowest), np.abs(highest)) + slack
    assert np.all(np.abs(least - (lowest + cut)) <= blur)
    assert np.all(np.abs(top - (highest - cut)) <= ULP * (highest - lowest) + 2 * blur)
    turned = v @ rotation(case.head_dim).astype(np.float64)
    largest = np.abs(turned).max(-1)
    assert np.all(np.abs(turned - block.turned_values).max(-1) <= (0.5 + 8 * ULP) * largest / 8 * (1 + ULP) + 1e-6)
    step = np.abs(v - block.values)
    assert np.all(np.sqrt(np.sum(step**2, -1)) <= (0.5 + 8 * ULP) / 8 * (1 + ULP) * largest * case.head_dim**0.5 + 1e-6)


MARKS = [NAMED[name] for name in ("bmq4-d64", "bmq2-d80")]


@pytest.mark.parametrize("case", MARKS, ids=lambda case: case.name)
def test_energy_times_squared_range_gets_the_upper_bits(case):
    rng = np.random.default_rng(0)
    d, lanes = case.head_dim, lanes_of(case.head_dim, case.base_bits)
    width, energy = np.exp(rng.standard_normal((2, 1, d)))
    k = rng.uniform(-1, 1, (1, BLOCK, d)) * width
    k[:, 40], k[:, 50] = width, -width
    block = read_block(case, k, np.zeros_like(k), energy)
    wanted = np.argsort(-(energy * width**2)[0])[:lanes]
    assert set(np.flatnonzero(block.marked[0])) == set(wanted)


@pytest.mark.parametrize("case", MARKS, ids=lambda case: case.name)
def test_ties_are_decided_by_the_number_of_the_channel(case):
    d, lanes = case.head_dim, lanes_of(case.head_dim, case.base_bits)
    k = np.linspace(-1, 1, BLOCK)[None, :, None] * np.ones((1, 1, d))
    energy = np.ones((1, d))
    assert np.flatnonzero(read_block(case, k, k, energy).marked[0]).tolist() == list(range(lanes))
    assert np.flatnonzero(read_block(case, k, k, 0 * energy).marked[0]).tolist() == list(range(lanes))
    energy[0, -3:] = 2
    wanted = [*range(lanes - 3), d - 3, d - 2, d - 1]
    assert np.flatnonzero(read_block(case, k, k, energy).marked[0]).tolist() == wanted


def test_positions_that_are_not_counted_move_no_range():
    case = NAMED["bmq4-d64"]
    k, v, energy = (part[:1] for part in sample(case))
    block = read_block(case, k, v, energy, FIRST)
    for wild in (1e4, -1e4, np.nan, np.inf):
        other_k, other_v = k.copy(), v.copy()
        other_k[:, :SINKS], other_v[:, :SINKS] = wild, 3.0
        other = read_block(case, other_k, other_v, energy, FIRST)
        for name in ("marked", "scale", "least"):
            np.testing.assert_array_equal(getattr(other, name), getattr(block, name), name)
        for name in ("key_codes", "value_codes", "value_scale"):
            np.testing.assert_array_equal(getattr(other, name)[:, SINKS:], getattr(block, name)[:, SINKS:], name)


@pytest.mark.parametrize("name", ["bmq4-d64", "bmq2-d64"])
@pytest.mark.parametrize("value", [0.0, 1.0, -1.0, 0.1, -100.7, 3e-5, 1e4])
def test_a_constant_channel_is_held_to_eight_bits(name, value):
    case = NAMED[name]
    k = np.full((1, BLOCK, case.head_dim), value)
    words, read = run(case, k, k, np.ones((1, case.head_dim)))
    np.testing.assert_array_equal(words["xla"], words["reference"])
    keys, turned = read["xla"]
    assert np.all(np.isfinite(turned))
    np.testing.assert_allclose(keys, k, rtol=ULP, atol=1e-28)


@pytest.mark.parametrize("name", ["bmq4-d64", "bmq2-d96"])
@pytest.mark.parametrize("size", [1e-38, 1e-20, 1e-3, 1e3, 1e10, 1e30])
def test_every_magnitude_gives_a_block(name, size):
    case = NAMED[name]
    k, v, energy = sample(case)
    words, read = run(case, k * np.float32(size), v * np.float32(size), energy)
    np.testing.assert_array_equal(words["xla"], words["reference"])
    block = block_read(words["xla"], case.head_dim, case.base_bits)
    assert all(np.all(np.isfinite(part)) for part in read["xla"])
    if size >= 1e-20:
        most = np.where(block.marked, 2 ** (case.base_bits + 2) - 1, 2**case.base_bits - 1)
        largest = np.abs(k).max() * size
        assert np.abs(k * np.float64(size) - block.keys).max() <= largest
        assert np.all(block.scale * most <= 2 * largest * (1 + ULP))


def test_a_block_of_zeros_reads_as_zeros():
    case = NAMED["bmq4-d64"]
    zeros = np.zeros((1, BLOCK, 64))
    block = read_block(case, zeros, zeros, np.zeros((1, 64)))
    np.testing.assert_allclose(block.keys, 0, atol=1e-28)
    np.testing.assert_allclose(block.values, 0, atol=1e-28)


@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**32 - 1),
    spread=st.floats(-8, 8),
    offset=st.floats(-100, 100),
    first=st.booleans(),
    base_bits=st.sampled_from([2, 4]),
)
def test_any_block_keeps_the_bounds(seed, spread, offset, first, base_bits):
    case = NAMED[f"bmq{base_bits}-d64"]
    rng = np.random.default_rng(seed)
    k = (rng.standard_t(3, (1, BLOCK, 64)) * 2.0**spread + offset).astype(np.float32)
    v = (rng.standard_t(3, (1, BLOCK, 64)) * 2.0**spread).astype(np.float32)
    counted = (FIRST if first else EVERY)[None]
    words, _ = run(case, k, v, rng.exponential(size=(1, 64)), counted)
    np.testing.assert_array_equal(words["xla"], words["reference"])
    assert_bounds(case, k, v, block_read(words["xla"], 64, base_bits), counted)


@pytest.mark.parametrize("head_dim", BITMASK_HEAD_DIMS)
def test_the_rotation_is_orthogonal_and_that_of_its_blocks(head_dim):
    turn = rotation(head_dim)
    assert turn.dtype == np.float32
    np.testing.assert_allclose(turn.astype(np.float64) @ turn.T, np.eye(head_dim), atol=2e-7)
    np.testing.assert_allclose(turn, quantised.rotation(head_dim), rtol=1e-7)
    first = {80: 64, 96: 64}.get(head_dim, head_dim)
    assert not turn[:first, first:].any()
    assert not turn[first:, :first].any()
    sizes = np.where(np.arange(head_dim) < first, first, head_dim - first)
    filled = np.abs(turn) * np.sqrt(sizes)[:, None]
    np.testing.assert_allclose(filled[filled > 0], 1, rtol=1e-6)
    assert np.count_nonzero(filled) == first**2 + (head_dim - first) ** 2


def blocks(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


GOOD = {
    "k": blocks(2, 128, 64), "v": blocks(2, 128, 64), "energy": blocks(2, 64), "counted": blocks(2, 128, dtype=bool),
    "base_bits": 4,
}  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"v": blocks(2, 128, 32)}, r"k \(2, 128, 64\) and v \(2, 128, 32\) must be blocks of 128"),
        ({"k": blocks(2, 64, 64), "v": blocks(2, 64, 64)}, r"k \(2, 64, 64\) and v \(2, 64, 64\) must be blocks"),
        (
            {"k": blocks(2, 128, 48), "v": blocks(2, 128, 48)},
            r"head_dim 48 is none that bitmask formats take: \(8, 16, 32, 64, 80, 96, 128, 256\)",
        ),
        ({"base_bits": 3}, "base_bits 3 is neither 2 nor 4"),
    ],
)
def test_contract_of_quantize(wrong, message):
    with pytest.raises(ContractError, match=message):
        unchecked_quantize(**{**GOOD, **wrong}, implementation="xla")


@pytest.mark.parametrize(
    ("words", "head_dim", "base_bits", "message"),
    [
        (2311, 64, 4, r"words \(2, 2311\) are no blocks of 2312 words"),
        (2312, 64, 2, r"words \(2, 2312\) are no blocks of 1928 words"),
        (2312, 60, 4, "head_dim 60 is none"),
    ],
)
def test_contract_of_dequantize(words, head_dim, base_bits, message):
    with pytest.raises(ContractError, match=message):
        unchecked_dequantize(
            blocks(2, words, dtype=np.int32), head_dim=head_dim, base_bits=base_bits, implementation="xla"
        )
