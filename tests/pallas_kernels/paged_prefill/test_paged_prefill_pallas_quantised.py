"""The Triton kernels of paged_prefill over int8, bmq4 and bmq2 pools, interpreted on the CPU, and that they lower."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pallas_kernels.errors import ContractError
from pallas_kernels.kv_bitmask.rotation import rotation
from pallas_kernels.kv_layout import BITMASK_HEAD_DIMS, BitmaskLayout
from pallas_kernels.model_shapes import HeadShape
from pallas_kernels.paged_prefill import examine, op, pallas, pallas_bitmask, pallas_int8
from pallas_kernels.paged_prefill.cases import BLOCK_CASES, FORMATS, QUANTISED_CASES
from pallas_kernels.pages import BitmaskPages, Int8Pages
from tests.support.gpu_lowering import lowered_for_a100
from tests.support.paged import LAYERS
from tests.support.quantised_prefill import Launch, launch
from tests.support.quick import quick_jit

pytestmark = pytest.mark.interpret

SCALE = 0.125
# float32: rounding of sums; bf16: queries, folded queries and weights have 8 bits before they meet numbers of about 1
TOLERANCE = {"float32": 1e-5, "bf16": 4e-2}
CHUNKS = ((300, 9), (0, 5), (144, 3), (16, 4), (127, 3), (128, 1), (15, 2), (0, 0))
"""(positions before, tokens): histories that end inside a block, with one, among the first positions, and none."""


@dataclasses.dataclass(frozen=True)
class Case:
    kv_format: str
    heads: HeadShape
    page_size: int

    @property
    def name(self) -> str:
        return f"{self.kv_format}-{self.heads.name}-page-{self.page_size}"


CASES = (
    Case("int8", HeadShape("heads", 3, 1, 64), 16),
    Case("int8", HeadShape("heads", 2, 2, 80), 64),
    Case("int8", HeadShape("heads", 4, 1, 256), 512),
    Case("bmq4", HeadShape("heads", 6, 2, 64), 128),
    Case("bmq4", HeadShape("heads", 2, 1, 80), 256),
    Case("bmq4", HeadShape("heads", 1, 1, 8), 384),
    Case("bmq2", HeadShape("heads", 2, 2, 96), 128),
    Case("bmq2", HeadShape("heads", 8, 2, 64), 512),
    Case("bmq4", HeadShape("heads", 2, 1, 128), 128),
    Case("bmq2", HeadShape("heads", 1, 1, 256), 128),
)


def tile_of(kv_format, head_dim, **sizes):
    """Lower tiles than a GPU would get, which take an interpreter less time."""
    tile = pallas_int8.tiling(head_dim) if kv_format == "int8" else pallas.tiling(2048, 1, 1, head_dim)
    return dataclasses.replace(tile, **sizes)


@functools.cache
def compiled(softcap, products, tile, **options):
    options |= {"scale": SCALE, "softcap": softcap, "products": products, "interpret": True, "tile": tile}

    def run(q, k, v, pages, *rest):
        return op.kernel_for(pages)(q, k, v, pages, *rest, **options)

    return quick_jit(run)


def run(of: Launch, tile, layer=1, window=0, softcap=0.0, products="float32", **options):
    history = of.history
    rows = history.table, history.slots, history.lengths, of.lengths, of.offsets
    pages = jax.tree.map(jnp.asarray, history.pages)
    call = compiled(softcap, products, tile, **options)
    return np.asarray(call(of.q, of.k, of.v, pages, jnp.int32(layer), *rows, jnp.int32(window)))


def check(got, of: Launch, layer=1, window=0, softcap=0.0, tolerance=TOLERANCE["float32"]):
    """What belongs to a row is right, and what belongs to none is zero."""
    wanted = of.wanted(layer, window, scale=SCALE, softcap=softcap)
    np.testing.assert_allclose(got[of.used], wanted, rtol=0, atol=tolerance, err_msg=f"window {window}")
    np.testing.assert_array_equal(got[of.used.stop :], 0)


@functools.cache
def of_case(case: Case, chunks=CHUNKS, tokens=32) -> Launch:
    slots = np.random.default_rng(1).permutation(len(chunks) + 1)[: len(chunks)]
    width = -(-max(start + length for start, length in chunks) // case.page_size) + 1
    return launch(
        np.random.default_rng(0), case.kv_format, case.heads, chunks, tokens, page_size=case.page_size, width=width,
        slots=slots, num_slots=len(chunks) + 1,
    )  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_is_the_float64_statement(case):
    of, tile = of_case(case), tile_of(case.kv_format, case.heads.head_dim, queries=32)
    for window in (0, 3, 140, 300):
        check(run(of, tile, window=window), of, window=window)


@pytest.mark.parametrize("kv_format", FORMATS)
def test_chunks_of_several_tiles_with_a_soft_cap(kv_format):
    case = next(case for case in CASES if case.kv_format == kv_format)
    of = of_case(case, ((260, 150), (0, 140), (130, 7)), 300)
    tile = tile_of(kv_format, case.heads.head_dim)
    check(run(of, tile, window=170, softcap=2.0), of, window=170, softcap=2.0)


@pytest.mark.parametrize("kv_format", ["bmq4", "bmq2"])
def test_histories_of_several_stretches(kv_format):
    """Rows end in the first stretch, at its end, and in the third; windows begin in this one or in an earlier one."""
    case = next(case for case in CASES if case.kv_format == kv_format and case.page_size == 128)
    of = of_case(case, ((600, 9), (0, 5), (256, 3), (16, 4), (255, 3), (257, 1), (512, 2)), 32)
    tile = tile_of(kv_format, case.heads.head_dim, queries=32)
    for window in (0, 100, 300):
        check(run(of, tile, window=window, stretch=256), of, window=window)


@pytest.mark.parametrize("kv_format", FORMATS)
def test_products_may_be_in_bf16(kv_format):
    case = next(case for case in CASES if case.kv_format == kv_format)
    of, tile = of_case(case), tile_of(kv_format, case.heads.head_dim, queries=32)
    got = run(of, tile, products="bf16")
    assert got.dtype == np.float32
    check(got, of, tolerance=TOLERANCE["bf16"])


ROWS, FEW, SMALL = 4, 24, HeadShape("small", 6, 2, 16)
POOLS = {"int8": (16, 21), "bmq4": (128, 3), "bmq2": (128, 3)}
"""Page size and pages of the longest row. Tiles of 16 pairs are 5 tokens and a third."""


def small(kv_format, rng, chunks, slots, **options) -> tuple[Launch, object]:
    """A launch over a pool that has one size whatever the chunks are, so that one program serves."""
    page_size, width = POOLS[kv_format]
    needed = sum(-(-start // page_size) for start, _ in chunks)
    of = launch(
        rng, kv_format, SMALL, chunks, FEW, page_size=page_size, width=width, slots=slots, num_slots=ROWS + 1,
        spare=1 + ROWS * width - needed, **options,
    )  # fmt: skip
    return of, tile_of(kv_format, SMALL.head_dim, queries=16, keys=16)


@st.composite
def chunk_lists(draw):
    """Rows back to back, empty ones last."""
    left, chunks = FEW, []
    for _ in range(draw(st.integers(1, ROWS))):
        if left:
            length = draw(st.integers(1, left))
            left -= length
            edges = st.sampled_from((0, 1, 15, 16, 17, 127, 128, 129, 143, 144, 255, 256, 300))
            chunks.append((draw(st.one_of(edges, st.integers(0, 300))), length))
    return [*chunks, *[(0, 0)] * (ROWS - len(chunks))]


@pytest.mark.parametrize("kv_format", FORMATS)
@settings(max_examples=25)
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
def test_ragged_rows_in_any_slots(kv_format, chunks, slots, window, layer, seed):
    of, tile = small(kv_format, np.random.default_rng(seed), chunks, slots[:ROWS])
    check(run(of, tile, layer=layer, window=window), of, layer=layer, window=window)


@pytest.mark.parametrize("kv_format", FORMATS)
def test_what_lies_in_unused_places_changes_nothing(kv_format):
    chunks, outcomes = [(37, 9), (200, 5), (0, 4), (0, 0)], []
    for garbage in (0x7FC07FC0, 0x7F807F80, 0x7F7F7F7F, 0, 0xFFFFFFFF):
        of, tile = small(kv_format, np.random.default_rng(5), chunks, [3, 0, 1, 4], garbage=garbage)
        of.q[of.used.stop :], of.k[of.used.stop :], of.v[of.used.stop :] = np.nan, np.nan, np.nan
        outcomes.append(run(of, tile))
    for outcome in outcomes[1:]:
        np.testing.assert_array_equal(outcome, outcomes[0])


@pytest.mark.parametrize("head_dim", BITMASK_HEAD_DIMS)
def test_signs_and_factors_turn_back(head_dim):
    signs, factor = pallas_bitmask.turning(head_dim)
    assert set(np.unique(signs)) <= {-1.0, 0.0, 1.0}
    np.testing.assert_array_equal(signs * factor, rotation(head_dim).T)


LOWERED = [case for case in (*QUANTISED_CASES, *BLOCK_CASES) if "smollm2" in case.name or "d80" in case.name]


@pytest.mark.parametrize("case", LOWERED, ids=lambda case: case.name)
def test_it_lowers_for_a_gpu_as_triton(case):
    leaves, structure = jax.tree.flatten(examine.shapes(case, 2))

    def run(*arrays):
        return op.paged_prefill(*jax.tree.unflatten(structure, arrays), scale=SCALE, implementation="pallas")

    assert "__gpu$xla.gpu.triton" in lowered_for_a100(run, *leaves)


def refused(pages, head_dim, message, dtype=jnp.bfloat16, scale=SCALE):
    q = jnp.zeros((4, 2, head_dim), dtype)
    rows = jnp.zeros((1, 2), jnp.int32), *[jnp.zeros(1, jnp.int32)] * 4
    with pytest.raises(ContractError, match=message):
        op.paged_prefill(
            q, q[:, :1], q[:, :1], pages, jnp.int32(0), *rows, jnp.int32(0), scale=scale, implementation="pallas"
        )


def test_what_a_kernel_does_not_take_is_refused():
    int8 = Int8Pages(jnp.zeros((1, 2, 1, 16 * 33), jnp.int32))
    refused(Int8Pages(jnp.zeros((1, 2, 1, 16 * 97), jnp.int32)), 192, r"head_dim 192 has no tile; .* takes \(8, 16, 32")
    refused(int8, 64, "q is float16; this kernel takes bf16 and float32", dtype=jnp.float16)
    refused(int8, 64, r"scale -1.0 is not positive", scale=-1.0)
    words = jnp.zeros((1, 2, 1, 1, BitmaskLayout(64, 4).words), jnp.int32)
    bmq4 = BitmaskPages(words, jnp.zeros((1, 1, 1, 2, 144, 64), jnp.bfloat16))
    refused(bmq4, 64, "q is float16; this kernel takes bf16 and float32", dtype=jnp.float16)
    refused(bmq4, 64, r"scale -1.0 is not positive", scale=-1.0)
    refused(bmq4._replace(recent=bmq4.recent.astype(jnp.float16)), 64, "rows of slots are float16; this kernel takes")
    refused(bmq4, 192, "head_dim 192")
