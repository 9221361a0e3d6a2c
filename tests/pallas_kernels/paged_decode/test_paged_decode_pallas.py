"""The Triton kernel of paged_decode, interpreted on the CPU, and that it lowers for a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pallas_kernels.errors import ContractError
from pallas_kernels.model_shapes import SMOLLM2_135M
from pallas_kernels.paged_decode import op, pallas
from pallas_kernels.paged_decode.cases import CASES, DecodeCase
from pallas_kernels.paged_decode.pallas import Tiling, channel_chunks, tiling
from tests.support.exact import decode_attention
from tests.support.gpu_lowering import lowered_for_a100
from tests.support.paged import LAYERS, paged_history

pytestmark = pytest.mark.interpret

SMALL = [case for case in CASES if case.small]
SCALE = 0.125
# float32: rounding of sums; bf16: the weights, at most 1, are rounded to 8 bits before they meet values of about 1
TOLERANCE = {"float32": 1e-5, "bf16": 2e-2}


@functools.cache
def compiled(scale: float, softcap: float, tile: Tiling | None = None):
    return jax.jit(functools.partial(pallas.paged_decode, scale=scale, softcap=softcap, tile=tile, interpret=True))


def inputs(case: DecodeCase):
    rng, heads = np.random.default_rng(0), case.heads
    history = paged_history(
        rng, case.lengths, kv_heads=heads.kv_heads, head_dim=heads.head_dim, page_size=case.page_size, width=case.width
    )
    q = rng.standard_normal((len(case.lengths), heads.q_heads, heads.head_dim), dtype=np.float32)
    k, v = rng.standard_normal((2, len(case.lengths), heads.kv_heads, heads.head_dim), dtype=np.float32)
    return q, k, v, history


def run(q, k, v, pages, layer, table, lengths, window, *, scale=SCALE, softcap=0.0, tile=None):
    arrays = (q, k, v, pages, np.int32(layer), table, lengths, np.int32(window))
    return compiled(scale, softcap, tile)(*map(jnp.asarray, arrays))


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_it_is_the_float64_statement(case):
    q, k, v, history = inputs(case)
    arguments = (q, k, v, history.pages, 1, history.table, history.lengths, case.window)
    got = run(*arguments, softcap=case.softcap)
    wanted = decode_attention(*arguments, scale=SCALE, softcap=case.softcap)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=TOLERANCE["float32"])


@pytest.mark.parametrize(
    "case",
    [case for case in SMALL if case.name.startswith(("smollm2-135m", "gemma3", "d80"))],
    ids=lambda case: case.name,
)
def test_bf16_agrees_with_the_reference(case):
    *new, history = inputs(case)
    q, k, v, pages = (jnp.asarray(part, jnp.bfloat16) for part in (*new, history.pages))
    arguments = (
        q,
        k,
        v,
        pages,
        jnp.int32(1),
        *map(jnp.asarray, (history.table, history.lengths)),
        jnp.int32(case.window),
    )
    got = compiled(SCALE, case.softcap)(*arguments)
    plain = functools.partial(op.paged_decode, scale=SCALE, softcap=case.softcap, implementation="reference")
    wanted = jax.jit(plain)(*arguments)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(*(np.asarray(out, np.float32) for out in (got, wanted)), rtol=0, atol=TOLERANCE["bf16"])


SLOTS, WIDTH, PAGE, KV_HEADS, GROUP, DIM = 4, 5, 16, 2, 3, 16
TILE = Tiling(rows=16, positions=32, chunks=(16,), splits=3, least_tiles=1, warps=4, stages=3)


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@settings(max_examples=30)
@given(
    lengths=st.lists(st.integers(0, WIDTH * PAGE), min_size=SLOTS, max_size=SLOTS),
    window=st.one_of(st.just(0), st.integers(1, WIDTH * PAGE + 5)),
    layer=st.integers(0, LAYERS - 1),
    seed=st.integers(0, 2**32 - 1),
)
@example(lengths=[0, 0, 0, 0], window=0, layer=0, seed=0)
@example(lengths=[0, 0, 0, 0], window=1, layer=1, seed=1)
@example(lengths=[80, 79, 1, 0], window=1, layer=0, seed=2)
@example(lengths=[80, 32, 33, 31], window=33, layer=1, seed=3)
def test_ragged_histories_in_pages_of_any_order(softcap, lengths, window, layer, seed):
    rng = np.random.default_rng(seed)
    spare = 1 + SLOTS * WIDTH - sum(-(-length // PAGE) for length in lengths)  # one size of pool: one program
    history = paged_history(rng, lengths, kv_heads=KV_HEADS, head_dim=DIM, page_size=PAGE, width=WIDTH, spare=spare)
    q = rng.standard_normal((SLOTS, KV_HEADS * GROUP, DIM), dtype=np.float32)
    k, v = rng.standard_normal((2, SLOTS, KV_HEADS, DIM), dtype=np.float32)
    arguments = (q, k, v, history.pages, layer, history.table, history.lengths, window)
    wanted = decode_attention(*arguments, scale=0.25, softcap=softcap)
    got = run(*arguments, scale=0.25, softcap=softcap, tile=TILE)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=4e-6)


@pytest.mark.parametrize("page_size", [16, 64, 128])
@pytest.mark.parametrize("splits", [1, 2, 9])
def test_any_number_of_stretches_gives_the_same(page_size, splits):
    case = DecodeCase("stretches", SMOLLM2_135M, (5, 0, 64, 300), page_size)
    q, k, v, history = inputs(case)
    arguments = (q, k, v, history.pages, 0, history.table, history.lengths, 0)
    tile = Tiling(rows=16, positions=64, chunks=(64,), splits=splits, least_tiles=1, warps=4, stages=3)
    wanted = decode_attention(*arguments, scale=SCALE)
    np.testing.assert_allclose(run(*arguments, tile=tile), wanted, rtol=0, atol=TOLERANCE["float32"])


def test_what_lies_in_unused_places_changes_nothing():
    case = DecodeCase("few", SMOLLM2_135M, (5, 0, 33, 90), 16)
    q, k, v, history = inputs(case)
    outcomes = []
    for garbage in (np.nan, np.inf, -3e38, 0.0):
        pages = np.where(np.isnan(history.pages), np.float32(garbage), history.pages)
        table = history.table.copy()
        for row, length in enumerate(case.lengths):
            table[row, -(-length // 16) :] = int(garbage == 0)
        outcomes.append(run(q, k, v, pages, 0, table, history.lengths, 0))
    for outcome in outcomes[1:]:
        np.testing.assert_array_equal(outcome, outcomes[0])


def lowered(case: DecodeCase, dtype: object) -> str:
    heads, slots = case.heads, len(case.lengths)
    new = jax.ShapeDtypeStruct((slots, heads.kv_heads, heads.head_dim), dtype)
    arguments = (
        jax.ShapeDtypeStruct((slots, heads.q_heads, heads.head_dim), dtype),
        new,
        new,
        jax.ShapeDtypeStruct((2, 9, heads.kv_heads, 2, case.page_size, heads.head_dim), dtype),
        *(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((), (slots, case.width), (slots,), ())),
    )
    run = functools.partial(op.paged_decode, scale=SCALE, softcap=case.softcap, implementation="pallas")
    return lowered_for_a100(run, *arguments)


@pytest.mark.parametrize("case", [case for case in CASES if "8k" not in case.name], ids=lambda case: case.name)
def test_it_lowers_for_a_gpu_as_triton(case):
    assert "__gpu$xla.gpu.triton" in lowered(case, jnp.bfloat16)


def test_chunks_cover_the_head_dim_in_powers_of_two():
    assert {dim: channel_chunks(dim, 16) for dim in (8, 64, 80, 96, 128, 256)} == {
        8: (32,), 64: (64,), 80: (64, 32), 96: (64, 32), 128: (128,), 256: (128, 128),
    }  # fmt: skip
    assert channel_chunks(80, 32) == channel_chunks(96, 32) == (128,)


def test_stretches_fill_the_card_but_are_not_too_short():
    assert tiling(8, 32, 8, 128, 8192).splits == 7  # 7 * 8 slots * 8 heads: 448 programs, four a multiprocessor
    assert tiling(64, 64, 8, 128, 8192).splits == 1  # 512 without any split
    assert tiling(1, 8, 1, 256, 8192).splits == 26  # of 320 positions, forty for each of 8 heads
    assert tiling(1, 8, 1, 256, 16).splits == 1


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        ((8, 8, 72), r"head_dim 72 has no tile; this kernel takes \(8, 16, 32, 64, 80, 96, 128, 256\)"),
        ((65, 1, 128), "65 query heads of 128 channels share a key/value head; at most 64 may"),
        ((129, 1, 8), "129 query heads of 8 channels share a key/value head; at most 128 may"),
    ],
)
def test_shapes_without_a_tile_are_refused(heads, message):
    with pytest.raises(ContractError, match=message):
        tiling(1, *heads, 1024)


def test_pages_of_another_dtype_are_refused():
    q, k, v, history = inputs(DecodeCase("one", SMOLLM2_135M, (5,), 16))
    with pytest.raises(ContractError, match="pages are float16; this kernel takes bf16 and float32"):
        run(q, k, v, history.pages.astype(np.float16), 0, history.table, history.lengths, 0)
