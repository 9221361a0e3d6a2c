"""The Triton kernels of page_write, interpreted on the CPU, and that they lower for a GPU in place."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pallas_kernels.access import DIRECT, Access
from pallas_kernels.kv_layout import RECENT, BitmaskLayout, int8_page_words
from pallas_kernels.page_write import op, pallas, xla
from pallas_kernels.page_write.blocks import filled_blocks, most_blocks
from pallas_kernels.page_write.cases import CASES
from pallas_kernels.pages import BitmaskPages, Int8Pages
from pallas_kernels.rows import Rows
from pallas_kernels.traffic import SECTOR_BYTES, Traffic
from tests.support import exact
from tests.support.gpu_lowering import lowered_for_a100
from tests.support.quantised import BASE_BITS, GARBAGE, block_read
from tests.support.quick import quick_jit

pytestmark = pytest.mark.interpret

FORMATS = ("float32", "bf16", "int8", "bmq4", "bmq2")
LAYERS, KV_HEADS, PAGES, PAGE, SLOTS, WIDTH = 2, 2, 7, 256, 5, 2
TOKENS, DIM = 300, 8
SMALL = [case for case in CASES if case.small]


@functools.cache
def compiled(implementation: str, access: Access = DIRECT):
    run = {"xla": xla.page_write, "pallas": functools.partial(pallas.page_write, interpret=True, access=access)}
    return quick_jit(run[implementation], donate_argnums=0)


def write(implementation, pages, *arguments):
    """The pool after a write; the one given stays."""
    return compiled(implementation)(*jax.tree.map(jnp.array, (pages, *arguments)))


def pool(kv_format: str, rng: np.random.Generator, head_dim: int = DIM):
    """A pool of garbage, and rows in bf16 of numbers."""
    if kv_format in ("float32", "bf16"):
        dtype = np.float32 if kv_format == "float32" else ml_dtypes.bfloat16
        return np.full((LAYERS, PAGES, KV_HEADS, 2, PAGE, head_dim), np.nan, dtype)
    if kv_format == "int8":
        return Int8Pages(np.full((LAYERS, PAGES, KV_HEADS, int8_page_words(PAGE, head_dim)), GARBAGE, np.int32))
    words = BitmaskLayout(head_dim, BASE_BITS[kv_format]).words
    recent = rng.standard_normal((LAYERS, SLOTS, KV_HEADS, 2, RECENT, head_dim)).astype(ml_dtypes.bfloat16)
    return BitmaskPages(np.full((LAYERS, PAGES, KV_HEADS, PAGE // 128, words), GARBAGE, np.int32), recent)


def new_tokens(rng: np.random.Generator, tokens: int, head_dim: int = DIM):
    """Keys and values whose channels differ in size, and an energy of queries."""
    sizes = np.exp(rng.standard_normal((LAYERS, 1, KV_HEADS, head_dim)))
    k, v = rng.standard_normal((2, LAYERS, tokens, KV_HEADS, head_dim)) * sizes
    return k.astype(np.float32), v.astype(np.float32), rng.random((LAYERS, KV_HEADS, head_dim), np.float32)


def assert_same(got, wanted, before, kv_format):
    """Bit for bit, but that a rotated value's sum in another order may move its code by one, in one of 1000 places."""
    if kv_format not in BASE_BITS:
        jax.tree.map(assert_same_bits, got, wanted)
        return
    assert_same_bits(got.recent, wanted.recent)
    mine, theirs, before = np.asarray(got.words), np.asarray(wanted.words), np.asarray(before.words)
    new = (theirs != before).any(-1)
    assert_same_bits(mine[~new], theirs[~new])
    if new.any():
        head_dim, base_bits = got.recent.shape[-1], BASE_BITS[kv_format]
        (mine, theirs) = (block_read(part[new], head_dim, base_bits) for part in (mine, theirs))
        for field in ("key_codes", "marked", "scale", "least"):
            np.testing.assert_array_equal(getattr(mine, field), getattr(theirs, field), field)
        np.testing.assert_allclose(mine.value_scale, theirs.value_scale, rtol=2**-7)
        moved = np.abs(mine.value_codes - theirs.value_codes)
        assert moved.max() <= 1
        assert np.count_nonzero(moved) <= moved.size / 1000


def assert_same_bits(a, b):
    np.testing.assert_array_equal(*(np.asarray(part).view(f"u{part.dtype.itemsize}") for part in (a, b)))


def rows_of(lengths, starts, slots, table):
    """Rows that lie back to back."""
    offsets = np.cumsum(lengths) - lengths
    return Rows(*(np.asarray(part, np.int32) for part in (table, slots, starts, lengths, offsets)))


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_plain_pools_are_the_statement(case):
    rng, heads = np.random.default_rng(0), case.heads
    pages = rng.standard_normal((2, case.num_pages, heads.kv_heads, 2, case.page_size, heads.head_dim), np.float32)
    k, v = rng.standard_normal((2, 2, case.tokens, heads.kv_heads, heads.head_dim), np.float32)
    places = rng.choice(case.num_pages * case.page_size, case.tokens, replace=False).astype(np.int32)
    ids, offsets = places // case.page_size, places % case.page_size
    rows = rows_of(np.ones_like(ids), offsets, np.zeros_like(ids), ids[:, None])
    assert_same_bits(write("pallas", pages, k, v, rows, None), exact.page_write(pages, k, v, ids, offsets))


RAGGED = rows_of([130, 0, 150], [100, 7, 250], [4, 0, 2], [[3, 5], [1, 1], [6, 0]])
"""One row fills a block that it found and a part of the next, one is empty, one fills two blocks on two pages."""


@pytest.mark.parametrize(
    ("kv_format", "head_dim"),
    [("int8", 64), ("int8", 80), ("bmq4", 80), ("bmq2", 128), ("bmq4", 256)],
)
def test_quantised_pools_are_those_of_xla(kv_format, head_dim):
    rng = np.random.default_rng(1)
    pages, (k, v, energy) = pool(kv_format, rng, head_dim), new_tokens(rng, TOKENS, head_dim)
    k[:, 280:], v[:, 280:] = np.nan, np.nan  # tokens of nobody
    got, wanted = (write(name, pages, k, v, RAGGED, energy) for name in ("pallas", "xla"))
    assert_same(got, wanted, pages, kv_format)
    if kv_format in BASE_BITS:
        full = (np.asarray(got.words) != GARBAGE).any((0, 2, -1))
        assert sorted(map(tuple, np.argwhere(full))) == [(0, 0), (3, 0), (6, 1)]


IDS = st.sampled_from([-(2**31), -PAGES, -1, PAGES, PAGES + 3, 2**31 - 1])


@st.composite
def launches(draw):
    """Rows of a launch on pages and slots of their own, some of which do not exist."""
    lengths = draw(st.lists(st.sampled_from([0, 1, 2, 16, 29, 127, 128, 129, 150]), min_size=3, max_size=3))
    lengths = [length if sum(lengths[:index]) + length <= TOKENS else 0 for index, length in enumerate(lengths)]
    starts = draw(
        st.lists(st.sampled_from([0, 1, 15, 16, 17, 100, 127, 128, 255, 256, 400, 511]), min_size=3, max_size=3)
    )
    pages, slots = draw(st.permutations(range(PAGES))), draw(st.permutations(range(SLOTS)))
    table = np.array(pages[: 3 * WIDTH]).reshape(3, WIDTH)
    for row, column in draw(st.lists(st.tuples(st.integers(0, 2), st.integers(0, WIDTH - 1)), max_size=2)):
        table[row, column] = draw(IDS)
    slots = [draw(st.sampled_from([slot, slot, slot, -1, SLOTS])) for slot in slots[:3]]
    return rows_of(lengths, starts, slots, table)


@settings(max_examples=60)
@given(rows=launches(), seed=st.integers(0, 2**32 - 1), kv_format=st.sampled_from(FORMATS))
@example(rows=RAGGED, seed=0, kv_format="bf16")
@example(rows=rows_of([1, 1, 1], [127, 255, 383], [0, 1, 2], [[0, 1], [2, 3], [4, 5]]), seed=1, kv_format="bmq4")
@example(rows=rows_of([300, 0, 0], [127, 0, 0], [0, 0, 0], [[1, 2], [0, 0], [0, 0]]), seed=2, kv_format="bmq2")
def test_any_rows_go_where_they_belong_and_nothing_else_changes(rows, seed, kv_format):
    rng = np.random.default_rng(seed)
    k, v, energy = new_tokens(rng, TOKENS)
    k[:, rows.lengths.sum() :], v[:, rows.lengths.sum() :] = np.nan, np.nan
    pages = pool(kv_format, rng)
    got, wanted = (write(name, pages, k, v, rows, energy) for name in ("pallas", "xla"))
    assert_same(got, wanted, pages, kv_format)


@settings(max_examples=15)
@given(
    cuts=st.lists(st.integers(1, TOKENS - 1), max_size=6, unique=True).map(sorted),
    kv_format=st.sampled_from(["bmq4", "bmq2"]),
)
@example(cuts=[7, 128, 255], kv_format="bmq4")
@example(cuts=[17, 127, 257], kv_format="bmq2")
def test_the_cuts_of_a_sequence_leave_no_trace(cuts, kv_format):
    k, v, energy = new_tokens(np.random.default_rng(3), TOKENS)
    empty = pool(kv_format, np.random.default_rng(4))
    live = np.r_[:16, 16 : 16 + TOKENS % 128]  # in the slot; behind them is what blocks have taken over
    for implementation in ("xla", "pallas"):
        ends = [0, *cuts, TOKENS]
        pages = empty
        for begin, end in itertools.pairwise(ends):
            pages = write(implementation, pages, *launch_of(k, v, begin, end), energy)
        wanted = write(implementation, empty, *launch_of(k, v, 0, TOKENS), energy)
        assert_same_bits(pages.words, wanted.words)
        assert_same_bits(np.asarray(pages.recent)[:, 2, ..., live, :], np.asarray(wanted.recent)[:, 2, ..., live, :])


def launch_of(k, v, begin, end):
    """Some tokens of a sequence in front, NaN behind, and rows of which one is not empty."""
    padding = [(0, 0), (0, TOKENS - (end - begin)), (0, 0), (0, 0)]
    new = (np.pad(part[:, begin:end], padding, constant_values=np.nan) for part in (k, v))
    return *new, rows_of([0, end - begin, 0], [0, begin, 0], [1, 2, 3], [[0, 0], [5, 1], [0, 0]])


def test_of_equal_channels_the_first_are_marked():
    k, v, energy = new_tokens(np.random.default_rng(5), TOKENS)
    k[:], energy[:] = k[..., :1], 1.0
    pages = pool("bmq2", np.random.default_rng(6))
    words = np.asarray(write("pallas", pages, *launch_of(k, v, 0, 128), energy).words)[:, 5, :, 0]
    marked = block_read(words, DIM, BASE_BITS["bmq2"]).marked
    np.testing.assert_array_equal(marked, np.broadcast_to(np.arange(DIM) < DIM // 2, marked.shape))


def test_a_decode_step_that_fills_no_block_reads_a_sector_for_each_that_it_could():
    tokens, head_dim, watch = 8, 16, Traffic()
    rng = np.random.default_rng(7)
    pages, (k, v, energy) = pool("bmq4", rng, head_dim), new_tokens(rng, tokens, head_dim)
    starts, slots = [0, 5, 16, 126, 128, 254, 256, 300], np.arange(tokens) % SLOTS
    rows = rows_of(np.ones(tokens, int), starts, slots, np.zeros((tokens, WIDTH)))
    run = quick_jit(functools.partial(pallas.page_write, interpret=True, access=watch))
    run(pages, jnp.asarray(k, jnp.bfloat16), jnp.asarray(v, jnp.bfloat16), rows, energy)
    jax.effects_barrier()
    vectors = 2 * tokens * head_dim * 2  # keys and values in bf16
    places = 2 * tokens * 4  # the slot and the line of each token
    assert watch.written_bytes == LAYERS * KV_HEADS * vectors
    assert watch.read_bytes == LAYERS * KV_HEADS * (vectors + places + 2 * tokens * SECTOR_BYTES)


@pytest.mark.parametrize(("tokens", "rows", "most"), [(1, 1, 1), (64, 64, 64), (128, 1, 1), (129, 1, 2), (2048, 8, 23)])
def test_no_launch_fills_more_blocks_than_it_has_programs_for(tokens, rows, most):
    assert most_blocks(tokens, rows) == most
    share = -(-tokens // rows)
    lengths = np.diff(np.minimum(np.arange(rows + 1) * share, tokens))
    plan = filled_blocks(
        Rows(*map(jnp.asarray, rows_of(lengths, np.full(rows, 127), np.arange(rows), np.zeros((rows, 20))))),
        tokens,
        rows,
        1,
        1,
    )
    assert plan.total <= most


@pytest.mark.parametrize("kv_format", FORMATS)
def test_pools_are_written_in_place(kv_format):
    rng = np.random.default_rng(8)
    pages, (k, v, energy) = pool(kv_format, rng, 16), new_tokens(rng, TOKENS, 16)
    shapes = jax.tree.map(lambda part: jax.ShapeDtypeStruct(part.shape, part.dtype), (pages, k, v, RAGGED, energy))
    parts = jax.tree.leaves(shapes[0])
    if kv_format not in BASE_BITS:  # interpreted, the kernel of blocks copies what each program writes
        analysis = compiled("pallas").lower(*shapes).compile().memory_analysis()
        assert analysis.alias_size_in_bytes == sum(math.prod(part.shape) * part.dtype.itemsize for part in parts)
    text = lowered_for_a100(
        lambda pages, k, v, rows, energy: op.page_write(
            pages, k, v, *rows, energy=energy if kv_format in BASE_BITS else None, implementation="pallas"
        ),
        *shapes,
    )
    calls = [line for line in text.splitlines() if "__gpu$xla.gpu.triton" in line]
    assert [line.count("output_operand_alias<") for line in calls] == ([1, 2] if kv_format in BASE_BITS else [1])
