"""page_write by rows, into pools of every format: however sequences are cut, packed and placed."""

import functools
import inspect
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pallas_kernels.errors import ContractError
from pallas_kernels.page_write import op
from pallas_kernels.pages import BitmaskPages, Int8Pages
from tests.support.quantised import BASE_BITS, FORMATS, block_read
from tests.support.quantised_writes import Written, assert_written, garbage_pool, meaning
from tests.support.quick import quick_jit

ALL = ("float32", "bf16", *FORMATS)
LAYERS, KV_HEADS, DIM = 2, 2, 16
ROWS, SLOTS, NUM_PAGES = 3, 5, {16: 62, 128: 10, 256: 7}
PAGE_SIZE = {"float32": 16, "bf16": 16, "int8": 16, "bmq4": 128, "bmq2": 256}
MOST = 320
"""Positions of the longest sequence, which a table holds."""

EDGES = (0, 1, 15, 16, 17, 127, 128, 129, 143, 144, 255, 256, 257, 300, 320)
ENERGY = np.random.default_rng(9).exponential(size=(LAYERS, KV_HEADS, DIM)).astype(np.float32)

unchecked = inspect.unwrap(op.page_write)


@functools.cache
def compiled(implementation: str = "xla"):
    return quick_jit(functools.partial(op.page_write, implementation=implementation), donate_argnums=0)


def launch(pool, sequences: Sequence[Written], spans, tokens: int, order: Sequence[int], implementation: str = "xla"):
    """The pool after the given (start, end) of each sequence, rows in ``order``, in a launch of ``tokens`` tokens."""
    spans = [spans[row] for row in order]
    width = max(len(sequence.pages) for sequence in sequences)
    k, v = np.full((2, LAYERS, tokens, KV_HEADS, DIM), np.nan, np.float32)
    table, offset, offsets = np.full((len(order), width), -1, np.int32), 0, []
    for row, (index, (start, end)) in enumerate(zip(order, spans, strict=True)):
        sequence, own = sequences[index], slice(offset, offset + end - start)
        table[row, : len(sequence.pages)] = sequence.pages
        k[:, own], v[:, own] = sequence.k[:, start:end], sequence.v[:, start:end]
        offsets.append(offset)
        offset = own.stop
    rows = (
        table, [sequences[index].slot for index in order], [start for start, _ in spans],
        [end - start for start, end in spans], offsets,
    )  # fmt: skip
    energy = ENERGY if isinstance(pool, BitmaskPages) else None
    return compiled(implementation)(pool, k, v, *(np.asarray(part, np.int32) for part in rows), energy=energy)


def written(
    pool, sequences: Sequence[Written], rng: np.random.Generator, tokens: int, chunk: int, implementation: str = "xla"
):
    """The pool after all of the sequences, in launches of up to ``tokens`` tokens, of a sequence up to ``chunk``."""
    pool, done = jax.tree.map(jnp.asarray, pool), [0] * len(sequences)
    while any(count < sequence.length for count, sequence in zip(done, sequences, strict=True)):
        left, spans = tokens, [(count, count) for count in done]
        order = rng.permutation(len(sequences)).tolist()
        for index in order:
            count = min(left, int(rng.integers(0, chunk + 1)), sequences[index].length - done[index])
            spans[index] = (done[index], done[index] + count)
            left, done[index] = left - count, done[index] + count
        pool = launch(pool, sequences, spans, tokens, order, implementation)
    return jax.tree.map(np.asarray, pool)


def sequences_of(rng: np.random.Generator, lengths: Sequence[int], page_size: int) -> list[Written]:
    """Sequences in pages and slots of any order."""
    ids, slots = rng.permutation(NUM_PAGES[page_size]), rng.permutation(SLOTS)
    found, width = [], -(-MOST // page_size)
    for index, length in enumerate(lengths):
        k, v = rng.standard_normal((2, LAYERS, length, KV_HEADS, DIM), dtype=np.float32)
        own = ids[index * width : (index + 1) * width]
        found.append(Written(own, int(slots[index]), k * np.exp(rng.standard_normal(DIM, np.float32)), v))
    return found


def pool_of(kv_format: str, rng: np.random.Generator):
    page_size = PAGE_SIZE[kv_format]
    return garbage_pool(kv_format, rng, LAYERS, NUM_PAGES[page_size], KV_HEADS, page_size, DIM, SLOTS)


@pytest.mark.parametrize("kv_format", ALL)
@settings(max_examples=12)
@given(
    lengths=st.lists(st.one_of(st.sampled_from(EDGES), st.integers(0, MOST)), min_size=ROWS, max_size=ROWS),
    chunk=st.sampled_from([48, 24, 400]),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_cut_into_launches_gives_the_same_pool(kv_format, lengths, chunk, seed):
    """Rows in any order, some of them empty; a launch may fill blocks of several rows, or begin and end inside one."""
    rng, page_size = np.random.default_rng(seed), PAGE_SIZE[kv_format]
    before, sequences = pool_of(kv_format, rng), sequences_of(rng, lengths, page_size)
    fine = written(before, sequences, rng, 48, chunk)
    assert_written(kv_format, before, fine, sequences, ENERGY, page_size)
    whole = written(before, sequences, rng, 3 * MOST, MOST)
    for one, other in zip(meaning(kv_format, fine, sequences), meaning(kv_format, whole, sequences), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("kv_format", ["float32", *FORMATS])
@settings(max_examples=8)
@given(
    lengths=st.lists(st.one_of(st.sampled_from(EDGES), st.integers(0, MOST)), min_size=ROWS, max_size=ROWS),
    foreign=st.sampled_from([None, -1, -(2**31), 2**31 - 1]),
    seed=st.integers(0, 2**32 - 1),
)
@example(lengths=[320, 40, 0], foreign=-1, seed=0)
def test_native_code_writes_the_same(fast_implementations, kv_format, lengths, foreign, seed):
    """The first row may have a foreign page before its own; scales of vectors of any size, some of them all zero."""
    rng, page_size = np.random.default_rng(seed), PAGE_SIZE[kv_format]
    before, sequences = pool_of(kv_format, rng), sequences_of(rng, lengths, page_size)
    if foreign is not None:
        sequences[0].pages[0] = foreign
    for sequence in sequences:
        sequence.k[:] *= np.exp2(rng.integers(-12, 13, sequence.k.shape[:3]))[..., None].astype(np.float32)
        sequence.v[:, ::7] = 0.0
    for implementation in fast_implementations:
        after = written(before, sequences, np.random.default_rng(seed), 48, 24, implementation)
        assert_written(kv_format, before, after, sequences, ENERGY, page_size)


@pytest.mark.parametrize("kv_format", ALL)
def test_one_launch_may_fill_many_blocks_of_every_row(kv_format):
    rng, page_size = np.random.default_rng(1), PAGE_SIZE[kv_format]
    before, sequences = pool_of(kv_format, rng), sequences_of(rng, (300, 256, 320), page_size)
    pool = launch(jax.tree.map(jnp.asarray, before), sequences, [(0, 60), (0, 127), (0, 0)], 3 * MOST, (1, 0, 2))
    pool = launch(pool, sequences, [(60, 300), (127, 256), (0, 320)], 3 * MOST, (2, 0, 1))
    assert_written(kv_format, before, jax.tree.map(np.asarray, pool), sequences, ENERGY, page_size)


@pytest.mark.parametrize("kv_format", ALL)
def test_a_decode_step_fills_blocks_of_some_rows(kv_format):
    """Every row is a slot; those at 127 and 255 fill a block, one is empty."""
    rng, page_size = np.random.default_rng(2), PAGE_SIZE[kv_format]
    before, sequences = pool_of(kv_format, rng), sequences_of(rng, (128, 256, 200), page_size)
    spans = [(0, sequence.length - 1) for sequence in sequences[:2]]
    pool = launch(jax.tree.map(jnp.asarray, before), sequences, [*spans, (0, 200)], 3 * MOST, (0, 1, 2))
    pool = launch(pool, sequences, [(127, 128), (255, 256), (200, 200)], 3, (0, 2, 1))
    assert_written(kv_format, before, jax.tree.map(np.asarray, pool), sequences, ENERGY, page_size)


@pytest.mark.parametrize("foreign", [-1, -(2**31), "pages", 2**31 - 1])
@pytest.mark.parametrize("kv_format", ALL)
def test_what_has_no_page_is_dropped_and_never_clamped(kv_format, foreign):
    """A row with a foreign page among its own, and one whose table ends before its tokens do."""
    rng, page_size = np.random.default_rng(3), PAGE_SIZE[kv_format]
    before, (first, second, third) = pool_of(kv_format, rng), sequences_of(rng, (320, 320, 90), page_size)
    pages = first.pages.copy()
    pages[0] = NUM_PAGES[page_size] if foreign == "pages" else foreign
    sequences = [
        Written(pages, first.slot, first.k, first.v),
        Written(second.pages[:1], second.slot, second.k, second.v),
    ]
    sequences.append(third)
    after = written(before, sequences, rng, 3 * MOST, MOST)
    assert_written(kv_format, before, after, sequences, ENERGY, page_size)


@pytest.mark.parametrize("slot", [-1, SLOTS, 2**31 - 1])
def test_a_slot_outside_the_pool_keeps_nothing(slot):
    rng = np.random.default_rng(4)
    before, (first, second, third) = pool_of("bmq4", rng), sequences_of(rng, (320, 100, 0), 128)
    sequences = [Written(first.pages, slot, first.k, first.v), second, third]
    after = launch(jax.tree.map(jnp.asarray, before), sequences, [(0, 320), (0, 100), (0, 0)], 3 * MOST, (0, 1, 2))
    assert_written("bmq4", before, jax.tree.map(np.asarray, after), sequences, ENERGY, 128)


def test_a_slot_serves_one_sequence_after_another():
    """What the last one left in the slot's rows reaches no word of the next."""
    rng = np.random.default_rng(5)
    before, (first, second, empty) = pool_of("bmq4", rng), sequences_of(rng, (250, 130, 0), 128)
    second = Written(second.pages, first.slot, second.k, second.v)
    fresh = written(before, [second, empty, empty], rng, 48, 20)
    used = written(before, [first, empty, empty], rng, 48, 48)
    after = written(used, [second, empty, empty], rng, 48, 20)
    for page in second.pages[:1]:
        np.testing.assert_array_equal(after.words[:, page], fresh.words[:, page])


@pytest.mark.parametrize("kv_format", ["bf16", "bmq2"])
def test_numbers_and_their_bits_are_one(kv_format):
    def numbers(part):
        return part.view(jnp.bfloat16) if part.dtype == np.uint16 else part

    rng, page_size = np.random.default_rng(7), PAGE_SIZE[kv_format]
    before, sequences = pool_of(kv_format, rng), sequences_of(rng, (200, 30, 0), page_size)
    before = jax.tree.map(lambda part: part & 0x7F7F if part.dtype == np.uint16 else part, before)  # no NaN
    bits = written(before, sequences, np.random.default_rng(0), 3 * MOST, MOST)
    found = written(jax.tree.map(numbers, before), sequences, np.random.default_rng(0), 3 * MOST, MOST)
    for one, other in zip(jax.tree.leaves(bits), jax.tree.leaves(found), strict=True):
        np.testing.assert_array_equal(one, other.view(one.dtype))


def test_energy_decides_which_channels_are_wide():
    rng = np.random.default_rng(6)
    before, sequences = pool_of("bmq4", rng), sequences_of(rng, (128, 0, 0), 128)
    k = rng.uniform(-1, 1, sequences[0].k.shape).astype(np.float32)
    sequences[0] = Written(sequences[0].pages, 0, k, k)
    after = written(before, sequences, rng, 3 * MOST, MOST)
    block = block_read(after.words[:, sequences[0].pages[0], :, 0], DIM, 4)
    extent = np.ptp(np.swapaxes(k.astype(jnp.bfloat16).astype(np.float64), 1, 2)[:, :, 16:], axis=2)
    order = np.argsort(-ENERGY * extent**2, axis=-1)[..., : DIM // 4]
    for layer in range(LAYERS):
        for head in range(KV_HEADS):
            assert set(np.flatnonzero(block.marked[layer, head])) == set(order[layer, head])


def big_pool(kv_format: str):
    """Shapes of a pool, both of whose parts are large beside what a launch needs."""
    few = garbage_pool(kv_format, np.random.default_rng(0), 4, 2, 3, PAGE_SIZE[kv_format], 64, 2)
    return jax.tree.map(lambda part: jax.ShapeDtypeStruct((4, 10_000, *part.shape[2:]), part.dtype), few)


@pytest.mark.parametrize("tokens", [8, 256])
@pytest.mark.parametrize(
    ("kv_format", "implementation"),
    [*((kv_format, "xla") for kv_format in ALL), *((kv_format, "native") for kv_format in ("float32", *FORMATS))],
)
def test_a_donated_pool_is_written_in_place(fast_implementations, kv_format, implementation, tokens):
    def ints(*shape: int):
        return jax.ShapeDtypeStruct(shape, np.int32)

    if implementation not in fast_implementations:
        pytest.skip("native code needs a CPU and a compiler for it")
    pool = big_pool(kv_format)
    energy = jax.ShapeDtypeStruct((4, 3, 64), np.float32) if kv_format in BASE_BITS else None
    new = jax.ShapeDtypeStruct((4, tokens, 3, 64), np.float32)
    rows = ints(8, 16), ints(8), ints(8), ints(8), ints(8)
    run = jax.jit(functools.partial(op.page_write, implementation=implementation), donate_argnums=0)
    analysis = run.lower(pool, new, new, *rows, energy=energy).compile().memory_analysis()
    size = sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(pool))
    assert analysis.alias_size_in_bytes == size
    # the launch's own tokens, a few times over, and a block of all layers and heads
    assert analysis.temp_size_in_bytes < 20 * 4 * 3 * 64 * 4 * (2 * tokens + 2 * 128) < size / 4


def zeros(*shape, dtype=np.int32):
    return jnp.zeros(shape, dtype)


RECENT_BITS = zeros(2, 4, 2, 2, 144, 16, dtype=np.uint16)
BITMASK = BitmaskPages(zeros(2, 3, 2, 1, 632), zeros(2, 4, 2, 2, 144, 16, dtype=jnp.bfloat16))


@pytest.mark.parametrize(
    ("wrong", "implementation", "message"),
    [
        ({"energy": None}, "xla", r"energy of shape None must be \(2, 2, 16\) for a bitmask pool"),
        (
            {"energy": zeros(2, 2, 8, dtype=np.float32)}, "xla",
            r"energy of shape \(2, 2, 8\) must be \(2, 2, 16\) for a bitmask pool",
        ),
        ({"pages": BITMASK._replace(words=zeros(2, 3, 2, 1, 600))}, "xla", "blocks of 600 words beside rows of 16"),
        ({"pages": Int8Pages(zeros(2, 3, 2, 145))}, "xla", "pages of 145 words do not hold keys and values"),
        ({"slots": zeros(2)}, "xla", r"slots \(2,\), starts \(3,\), .* need one entry a row, 3"),
        ({"pages": zeros(2, 3, 2, 2, 4, 16, dtype=np.uint16)}, "native", "pages are bits of bf16; the native path"),
        ({"pages": zeros(2, 3, 2, 2, 4, 16, dtype=jnp.bfloat16)}, "native", "pages are bfloat16; the native path"),
        ({"pages": zeros(2, 3, 2, 2, 4, 16, dtype=np.uint16)}, "pallas", "pages are bits of bf16; this kernel takes"),
        ({"pages": BITMASK._replace(recent=RECENT_BITS)}, "pallas", "rows beside pages are uint16; this kernel"),
    ],
)  # fmt: skip
def test_contract(wrong, implementation, message):
    new, rows = zeros(2, 5, 2, 16, dtype=np.float32), zeros(3)
    good = {
        "pages": BITMASK, "k": new, "v": new, "page_table": zeros(3, 4), "slots": rows, "starts": rows, "lengths": rows,
        "offsets": rows, "energy": zeros(2, 2, 16, dtype=np.float32),
    }  # fmt: skip
    with pytest.raises(ContractError, match=message):
        unchecked(**{**good, **wrong}, implementation=implementation)
