"""paged_prefill over int8, bmq4 and bmq2 pools, against the float64 statement over what their words say."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pallas_kernels.model_shapes import SMOLLM2_135M, HeadShape
from pallas_kernels.paged_prefill import op, xla
from tests.support.paged import LAYERS
from tests.support.quantised import FORMATS
from tests.support.quantised_prefill import Launch, launch
from tests.support.quick import quick_jit

SCALE = 0.125
ATOL = 1e-5
"""Of a softmax-weighted mean of values of about 1, in float32."""

EDGES = (0, 1, 15, 16, 17, 127, 128, 129, 143, 144, 255, 256, 300)
CHUNKS = ((300, 9), (0, 5), (144, 3), (16, 4), (127, 3), (128, 1), (15, 2), (0, 0))
"""(positions before, tokens): histories that end inside a block, with one, among the first positions, and none."""
TOKENS = 32


@dataclass(frozen=True)
class Case:
    kv_format: str
    heads: HeadShape
    page_size: int
    reference: bool = False

    @property
    def name(self) -> str:
        return f"{self.kv_format}-{self.heads.name}-page-{self.page_size}"


CASES = (
    Case("int8", SMOLLM2_135M, 16),
    Case("int8", HeadShape("wide", 4, 1, 256), 512),
    Case("bmq4", SMOLLM2_135M, 128),
    Case("bmq4", HeadShape("d80", 3, 3, 80), 256, reference=True),
    Case("bmq4", HeadShape("wide", 4, 1, 256), 128),
    Case("bmq2", HeadShape("d96", 4, 2, 96), 128),
    Case("bmq2", HeadShape("d128", 8, 2, 128), 256),
)


@functools.cache
def compiled(implementation: str, softcap: float, products: str):
    run = functools.partial(op.paged_prefill, scale=SCALE, softcap=softcap, products=products)
    return quick_jit(functools.partial(run, implementation=implementation))


def run(implementation, of: Launch, layer=1, window=0, softcap=0.0, products="float32"):
    history = of.history
    pages = jax.tree.map(jnp.asarray, history.pages)
    rows = history.table, history.slots, history.lengths, of.lengths, of.offsets
    call = compiled(implementation, softcap, products)
    return np.asarray(call(of.q, of.k, of.v, pages, jnp.int32(layer), *rows, jnp.int32(window)))


def assert_exact(got, of: Launch, layer=1, window=0, softcap=0.0, atol=ATOL, message="") -> None:
    wanted = of.wanted(layer, window, scale=SCALE, softcap=softcap)
    np.testing.assert_allclose(got[of.used], wanted, rtol=0, atol=atol, err_msg=message)
    assert np.all(np.isfinite(got)), "tokens of no row are finite"


@functools.cache
def of_case(case: Case) -> Launch:
    slots = np.random.default_rng(1).permutation(len(CHUNKS) + 1)[: len(CHUNKS)]
    width = -(-max(start + length for start, length in CHUNKS) // case.page_size) + 1
    return launch(
        np.random.default_rng(0), case.kv_format, case.heads, CHUNKS, TOKENS, page_size=case.page_size, width=width,
        slots=slots, num_slots=len(CHUNKS) + 1,
    )  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_is_the_float64_statement(fast_implementations, case):
    of = of_case(case)
    for window in (0, 3, 140, 300):
        for implementation in (*fast_implementations, *(["reference"] if case.reference else [])):
            got = run(implementation, of, window=window)
            assert_exact(got, of, window=window, message=f"{implementation}, window {window}")


@pytest.mark.parametrize("case", [CASES[0], CASES[3]], ids=lambda case: case.name)
def test_a_soft_cap(fast_implementations, case):
    of = of_case(case)
    for implementation in (*fast_implementations, *(["reference"] if case.reference else [])):
        got = run(implementation, of, window=150, softcap=2.0)
        assert_exact(got, of, window=150, softcap=2.0, message=implementation)


@pytest.mark.parametrize("kv_format", ["int8", "bmq4"])
def test_products_may_be_in_bf16(fast_implementations, kv_format):
    of = of_case(next(case for case in CASES if case.kv_format == kv_format))
    for implementation in fast_implementations:
        got = run(implementation, of, products="bf16")
        assert got.dtype == np.float32
        assert_exact(got, of, atol=4e-2, message=implementation)


ROWS, FEW, SMALL = 4, 24, HeadShape("small", 4, 2, 16)
POOLS = {"int8": (16, 21), "bmq4": (128, 3), "bmq2": (128, 3)}
"""Page size and pages of the longest row."""


def small(
    kv_format: str, rng: np.random.Generator, chunks: Sequence[tuple[int, int]], slots: Sequence[int], **options: int
) -> Launch:
    """A launch over a pool that has one size whatever the chunks are, so that one program serves."""
    page_size, width = POOLS[kv_format]
    needed = sum(-(-start // page_size) for start, _ in chunks)
    return launch(
        rng, kv_format, SMALL, chunks, FEW, page_size=page_size, width=width, slots=slots, num_slots=ROWS + 1,
        spare=1 + ROWS * width - needed, **options,
    )  # fmt: skip


@pytest.fixture(scope="module")
def small_tiles():
    """Tiles so small that rows end mid tile, cross tiles and span several blocks of keys."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(xla, "QUERY_TILE", 8)
        patch.setattr(xla, "KEY_BLOCK", 64)
        compiled.cache_clear()
        yield
    compiled.cache_clear()


@st.composite
def chunk_lists(draw):
    """Rows back to back, empty ones last."""
    left, chunks = FEW, []
    for _ in range(draw(st.integers(1, ROWS))):
        if left:
            length = draw(st.integers(1, left))
            left -= length
            start = draw(st.one_of(st.sampled_from(EDGES), st.integers(0, 300)))
            chunks.append((start, length))
    return [*chunks, *[(0, 0)] * (ROWS - len(chunks))]


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("kv_format", FORMATS)
@settings(max_examples=30)
@given(
    chunks=chunk_lists(),
    slots=st.permutations(range(ROWS + 1)),
    window=st.one_of(st.just(0), st.integers(1, 330)),
    layer=st.integers(0, LAYERS - 1),
    seed=st.integers(0, 2**32 - 1),
)
@example(chunks=[(0, 0)] * 4, slots=range(5), window=0, layer=0, seed=0)
@example(chunks=[(300, 24), (0, 0), (0, 0), (0, 0)], slots=[4, 3, 2, 1, 0], window=300, layer=0, seed=1)
@example(chunks=[(120, 20), (16, 1), (144, 3), (0, 0)], slots=[2, 0, 4, 1, 3], window=0, layer=1, seed=2)
def test_ragged_rows_in_any_slots(fast_implementations, kv_format, chunks, slots, window, layer, seed):
    of = small(kv_format, np.random.default_rng(seed), chunks, slots[:ROWS])
    for implementation in (*fast_implementations, "reference"):
        got = run(implementation, of, layer=layer, window=window)
        assert_exact(got, of, layer=layer, window=window, message=implementation)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("kv_format", FORMATS)
def test_what_lies_in_unused_places_changes_nothing(kv_format, implementation):
    chunks, outcomes = [(37, 9), (200, 5), (0, 4), (0, 0)], []
    for garbage in (0x7FC07FC0, 0x7F807F80, 0x7F7F7F7F, 0, 0xFFFFFFFF):
        of = small(kv_format, np.random.default_rng(5), chunks, [3, 0, 1, 4], garbage=garbage)
        outcomes.append(run(implementation, of)[of.used])
    for outcome in outcomes[1:]:
        np.testing.assert_array_equal(outcome, outcomes[0])


@pytest.mark.parametrize("kv_format", FORMATS)
def test_rows_of_many_tokens_and_windows_that_begin_anywhere(fast_implementations, kv_format):
    """Several work items a row; the first key that a row sees lies at every distance from a block's quarters."""
    page_size = POOLS[kv_format][0]
    of = launch(
        np.random.default_rng(7), kv_format, SMALL, [(300, 150), (130, 40)], 190, page_size=page_size,
        width=-(-300 // page_size),
    )  # fmt: skip
    for window in (0, 170, 203, 285, 299, 333):
        for implementation in fast_implementations:
            got = run(implementation, of, window=window)
            assert_exact(got, of, window=window, message=f"{implementation}, window {window}")
