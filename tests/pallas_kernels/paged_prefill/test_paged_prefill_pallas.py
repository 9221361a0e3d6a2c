"""The Triton kernel of paged_prefill, interpreted on the CPU, and that it lowers for a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pallas_kernels.errors import ContractError
from pallas_kernels.model_shapes import SMOLLM2_135M, HeadShape
from pallas_kernels.paged_prefill import examine, op, pallas, pieces
from pallas_kernels.paged_prefill.cases import CASES, PrefillCase
from pallas_kernels.paged_prefill.pallas import Tiling, channel_chunks, tiling
from pallas_kernels.pages import Int8Pages
from tests.support.exact import prefill_attention
from tests.support.gpu_lowering import lowered_for_a100
from tests.support.paged import LAYERS, paged_history

pytestmark = pytest.mark.interpret

SPARED = ("smollm2-360m", "qwen2-0.5b", "qwen2-7b", "llama-3.1-70b")  # groups and head dims as in others
SMALL = [case for case in CASES if case.small and not case.name.startswith(SPARED)]
LOWERED = [
    case for case in CASES if case.name.startswith(("smollm2-135m-9:3", "d80-12:12", "gemma-2b", "llama-3.1-8b-page"))
]
SCALE = 0.125
# float32: rounding of sums; bf16: the weights, at most 1, are rounded to 8 bits before they meet values of about 1
TOLERANCE = {"float32": 1e-5, "bf16": 4e-2}


@functools.cache
def compiled(scale: float, softcap: float, tile: Tiling | None = None, products: str = "float32"):
    run = functools.partial(pallas.paged_prefill, scale=scale, softcap=softcap, products=products, tile=tile)
    return jax.jit(functools.partial(run, interpret=True))


def launch(rng, chunks, *, heads, tokens, page_size, width, spare=2):
    """Arguments of a launch; tokens behind the last row, and keys and values that nobody may see, are NaN."""
    starts, lengths = (np.array(column, np.int32) for column in zip(*chunks, strict=True))
    offsets = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int32)
    history = paged_history(
        rng, starts, kv_heads=heads.kv_heads, head_dim=heads.head_dim, page_size=page_size, width=width, spare=spare
    )
    q = rng.standard_normal((tokens, heads.q_heads, heads.head_dim), dtype=np.float32)
    k, v = rng.standard_normal((2, tokens, heads.kv_heads, heads.head_dim), dtype=np.float32)
    for part in (q, k, v):
        part[lengths.sum() :] = np.nan
    return (q, k, v, history.pages), (history.table, starts, lengths, offsets)


def of_case(case: PrefillCase):
    rng = np.random.default_rng(1)
    return launch(rng, case.chunks, heads=case.heads, tokens=case.tokens, page_size=case.page_size, width=case.width)


def run(data, layer, rows, window, *, scale=SCALE, softcap=0.0, tile=None, products="float32"):
    table, *rest = rows
    slots = np.zeros(len(table), np.int32)
    arrays = (*data, np.int32(layer), table, slots, *rest, np.int32(window))
    return np.asarray(compiled(scale, softcap, tile, products)(*jax.tree.map(jnp.asarray, arrays)), np.float32)


def check(got, wanted, rows, tolerance):
    """What belongs to a row is right, and what belongs to none is zero."""
    used = int(rows[2].sum())
    np.testing.assert_allclose(got[:used], wanted[:used], rtol=0, atol=tolerance)
    np.testing.assert_array_equal(got[used:], 0)


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_it_is_the_float64_statement(case):
    data, rows = of_case(case)
    wanted = prefill_attention(*data, 1, *rows, case.window, scale=SCALE, softcap=case.softcap)
    check(run(data, 1, rows, case.window, softcap=case.softcap), wanted, rows, TOLERANCE["float32"])


@pytest.mark.parametrize("case", [SMALL[0], SMALL[-2]], ids=lambda case: case.name)
@pytest.mark.parametrize("pages", [jnp.bfloat16, jnp.float32])
def test_bf16_operands(case, pages):
    data, rows = of_case(case)
    new, pool = [jnp.asarray(part, jnp.bfloat16) for part in data[:3]], jnp.asarray(data[3], pages)
    rounded = [np.asarray(part, np.float32) for part in (*new, pool)]
    wanted = prefill_attention(*rounded, 1, *rows, case.window, scale=SCALE, softcap=case.softcap)
    got = run((*new, pool), 1, rows, case.window, softcap=case.softcap)
    check(got, wanted, rows, TOLERANCE["bf16"])


def test_float32_operands_may_be_multiplied_in_bf16():
    data, rows = of_case(SMALL[0])
    wanted = prefill_attention(*data, 1, *rows, 0, scale=SCALE)
    got = run(data, 1, rows, 0, products="bf16")
    check(got, wanted, rows, TOLERANCE["bf16"])
    assert np.abs(got[: int(rows[2].sum())] - wanted[: int(rows[2].sum())]).max() > TOLERANCE["float32"]


ROWS, TOKENS, WIDTH, PAGE = 4, 24, 6, 4
TILE = Tiling(queries=16, keys=8, chunks=(16,), warps=4, stages=3)
HEADS = HeadShape("three-to-one", 6, 2, 16)
"""Tiles of 16 pairs are 5 tokens and a third: rows end mid tile, and tiles begin inside a token."""


@st.composite
def chunk_lists(draw):
    """Rows back to back, empty ones last, at most TOKENS tokens together and WIDTH pages each."""
    left, chunks = TOKENS, []
    for _ in range(draw(st.integers(0, ROWS))):
        if left:
            length = draw(st.integers(1, left))
            left -= length
            chunks.append((draw(st.integers(0, WIDTH * PAGE - 1)), length))
    return [*chunks, *[(0, 0)] * (ROWS - len(chunks))]


@pytest.mark.parametrize(("softcap", "page_size"), [(0.0, 4), (2.0, 4), (0.0, 8)])
@settings(max_examples=40)
@given(
    chunks=chunk_lists(),
    window=st.one_of(st.just(0), st.integers(1, WIDTH * PAGE + TOKENS)),
    layer=st.integers(0, LAYERS - 1),
    seed=st.integers(0, 2**32 - 1),
)
@example(chunks=[(0, 0)] * 4, window=0, layer=0, seed=0)
@example(chunks=[(0, 24), (0, 0), (0, 0), (0, 0)], window=0, layer=0, seed=1)
@example(chunks=[(23, 24), (0, 0), (0, 0), (0, 0)], window=1, layer=1, seed=2)
@example(chunks=[(23, 3), (0, 9), (8, 8), (17, 4)], window=5, layer=1, seed=3)
@example(chunks=[(20, 1), (21, 1), (22, 1), (23, 1)], window=0, layer=0, seed=4)
@example(chunks=[(16, 24), (0, 0), (0, 0), (0, 0)], window=17, layer=0, seed=5)
def test_ragged_launches_with_and_without_history(softcap, page_size, chunks, window, layer, seed):
    rng = np.random.default_rng(seed)
    spare = 1 + ROWS * WIDTH - sum(-(-start // page_size) for start, _ in chunks)  # one size of pool: one program
    data, rows = launch(rng, chunks, heads=HEADS, tokens=TOKENS, page_size=page_size, width=WIDTH, spare=spare)
    wanted = prefill_attention(*data, layer, *rows, window, scale=0.25, softcap=softcap)
    check(run(data, layer, rows, window, scale=0.25, softcap=softcap, tile=TILE), wanted, rows, 4e-6)


@pytest.mark.parametrize("page_size", [16, 64, 128, 512])
@pytest.mark.parametrize("queries", [16, 64])
def test_any_tile_and_page_gives_the_same(page_size, queries):
    case = PrefillCase("pages", SMOLLM2_135M, ((300, 9), (0, 20), (64, 3)), 40, page_size)
    data, rows = of_case(case)
    wanted = prefill_attention(*data, 0, *rows, 0, scale=SCALE)
    tile = Tiling(queries=queries, keys=64, chunks=(64,), warps=4, stages=3)
    check(run(data, 0, rows, 0, tile=tile), wanted, rows, TOLERANCE["float32"])


@pytest.mark.parametrize("head_dim", [8, 24, 72, 160, 192])
def test_head_dims_of_no_known_model(head_dim):
    case = PrefillCase("odd", HeadShape("odd", 2, 1, head_dim), ((20, 9), (0, 5)), 16, 16)
    data, rows = of_case(case)
    wanted = prefill_attention(*data, 1, *rows, 0, scale=SCALE)
    check(run(data, 1, rows, 0), wanted, rows, TOLERANCE["float32"])


def test_what_lies_in_unused_places_changes_nothing():
    (*new, pages), (table, *rest) = of_case(SMALL[0])
    outcomes = []
    for garbage in (np.nan, np.inf, -3e38, 0.0):
        filled = [np.where(np.isnan(part), np.float32(garbage), part) for part in (*new, pages)]
        places = table.copy()
        for row, (start, _) in enumerate(SMALL[0].chunks):
            places[row, -(-start // 16) :] = int(garbage == 0)
        outcomes.append(run(filled, 0, (places, *rest), 0))
    for outcome in outcomes[1:]:
        np.testing.assert_array_equal(outcome, outcomes[0])


def test_a_row_does_not_depend_on_its_neighbours():
    (q, k, v, pages), (table, starts, lengths, offsets) = of_case(SMALL[0])
    whole = run((q, k, v, pages), 0, (table, starts, lengths, offsets), 0)
    own = slice(offsets[1], offsets[1] + lengths[1])
    moved = (np.concatenate([part[own], part[: 32 - lengths[1]]]) for part in (q, k, v))
    alone = (table[[1, 0, 2, 3]], starts[[1, 0, 2, 3]], np.array([20, 0, 0, 0]), np.array([0, 20, 20, 20]))
    got = run((*moved, pages), 0, [np.asarray(part, np.int32) for part in alone], 0)
    np.testing.assert_allclose(got[: lengths[1]], whole[own], rtol=0, atol=2e-6)


def test_the_plan_names_the_row_and_the_first_pair_of_each_tile():
    lengths, starts = jnp.array([11, 1, 0], jnp.int32), jnp.array([7, 0, 0])
    plan = pieces.plan_of(starts, lengths, jnp.array([0, 11, 12]), starts - 4, tokens=14, group=3, queries=16)
    # 33 pairs in three tiles, 3 in one, 6 of nobody in one; of 14 * 3 pairs and four rows there may be six tiles
    assert plan.row.tolist() == [0, 0, 0, 1, 3, 3]
    assert plan.first.tolist() == [0, 16, 32, 0, 0, 16]
    assert plan.start.tolist() == [7, 7, 7, 0, 0, 0]
    assert plan.held.tolist() == [3, 3, 3, -4, 0, 0]
    assert plan.length.tolist() == [11, 11, 11, 1, 2, 2]
    assert plan.offset.tolist() == [0, 0, 0, 11, 12, 12]


@pytest.mark.parametrize("case", LOWERED, ids=lambda case: case.name)
def test_it_lowers_for_a_gpu_as_triton(case):
    run = functools.partial(op.paged_prefill, scale=SCALE, softcap=case.softcap, implementation="pallas")
    assert "__gpu$xla.gpu.triton" in lowered_for_a100(run, *examine.shapes(case, 2))


def test_chunks_cover_the_head_dim_in_powers_of_two():
    assert {dim: channel_chunks(dim) for dim in (8, 16, 40, 64, 72, 80, 96, 112, 128, 136, 192, 256)} == {
        8: (16,), 16: (16,), 40: (32, 16), 64: (64,), 72: (64, 16), 80: (64, 16), 96: (64, 32), 112: (64, 64),
        128: (128,), 136: (128, 16), 192: (128, 64), 256: (128, 128),
    }  # fmt: skip


def test_tiles_are_low_where_tall_ones_would_not_fill_the_card():
    assert tiling(2048, 32, 8, 128).queries == 128  # 64 tiles for each of 8 heads
    assert tiling(128, 32, 8, 128).queries == 64  # 4 for each


@pytest.mark.parametrize("head_dim", [4, 20, 264])
def test_head_dims_without_a_tile_are_refused(head_dim):
    message = f"head_dim {head_dim} has no tile; this kernel takes multiples of 8 from 8 to 256"
    with pytest.raises(ContractError, match=message):
        tiling(64, 4, 2, head_dim)


def test_pages_of_another_dtype_and_a_scale_that_is_not_positive_are_refused():
    (*new, pages), rows = of_case(SMALL[0])
    with pytest.raises(ContractError, match="pages are float16; this kernel takes bf16 and float32"):
        run((*new, pages.astype(np.float16)), 0, rows, 0)
    with pytest.raises(ContractError, match="pages are Int8Pages; this kernel takes bf16 and float32"):
        run((*new, Int8Pages(np.zeros((1, 2, 3, 16 * 33), np.int32))), 0, rows, 0)
    with pytest.raises(ContractError, match=r"scale -1.0 is not positive, which this kernel needs"):
        run((*new, pages), 0, rows, 0, scale=-1.0)
