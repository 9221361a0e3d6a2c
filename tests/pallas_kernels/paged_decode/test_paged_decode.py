import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pallas_kernels.errors import ContractError
from pallas_kernels.model_shapes import SMOLLM2_135M
from pallas_kernels.paged_decode import op
from pallas_kernels.paged_decode.cases import CASES, DecodeCase
from tests.support.exact import decode_attention
from tests.support.paged import LAYERS, paged_history
from tests.support.quick import quick_jit

SMALL = [case for case in CASES if case.small]
MODELS = ("smollm2-135m", "llama-3.1-8b", "gemma", "d80", "tiny")
COMPARED = [case for case in SMALL if case.name.startswith(MODELS)]
DTYPES = {"float32": jnp.float32, "bf16": jnp.bfloat16}
# of a softmax-weighted mean of values of about 1: float32 sums err by rounding only; a bf16 result has 8 bits
TOLERANCE = {"float32": 1e-5, "bf16": 2e-2}
SCALE = 0.125

unchecked = inspect.unwrap(op.paged_decode)


@functools.cache
def compiled(implementation: str, scale: float, softcap: float, quick: bool):
    run = functools.partial(op.paged_decode, scale=scale, softcap=softcap, implementation=implementation)
    return quick_jit(run) if quick or implementation == "reference" else jax.jit(run)


def inputs(case: DecodeCase, seed: int = 0):
    rng = np.random.default_rng(seed)
    heads = case.heads
    history = paged_history(
        rng, case.lengths, kv_heads=heads.kv_heads, head_dim=heads.head_dim, page_size=case.page_size, width=case.width
    )
    slots = len(case.lengths)
    q = rng.standard_normal((slots, heads.q_heads, heads.head_dim), dtype=np.float32)
    k, v = rng.standard_normal((2, slots, heads.kv_heads, heads.head_dim), dtype=np.float32)
    return q, k, v, history


def run(implementation, q, k, v, pages, layer, table, lengths, window, *, scale=SCALE, softcap=0.0, quick=False):
    arrays = (q, k, v, pages, np.int32(layer), table, lengths, np.int32(window))
    return compiled(implementation, scale, softcap, quick)(*map(jnp.asarray, arrays))


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_it_is_the_float64_statement(case):
    q, k, v, history = inputs(case)
    arguments = (q, k, v, history.pages, 1, history.table, history.lengths, case.window)
    got = run("xla", *arguments, softcap=case.softcap, quick=case not in COMPARED)
    wanted = decode_attention(*arguments, scale=SCALE, softcap=case.softcap)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=TOLERANCE["float32"])


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_bf16_pages_lose_nothing_beyond_their_own_rounding(implementation):
    q, k, v, history = inputs(SMALL[0])
    pages = jnp.asarray(history.pages, jnp.bfloat16)
    got = run(implementation, q, k, v, pages, 1, history.table, history.lengths, 0)
    stored = np.asarray(pages, np.float32)
    wanted = decode_attention(q, k, v, stored, 1, history.table, history.lengths, 0, scale=SCALE)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=TOLERANCE["float32"])


@pytest.mark.parametrize("case", COMPARED, ids=lambda case: case.name)
def test_reference_is_the_float64_statement(case):
    q, k, v, history = inputs(case)
    arguments = (q, k, v, history.pages, 1, history.table, history.lengths, case.window)
    got = run("reference", *arguments, softcap=case.softcap)
    wanted = decode_attention(*arguments, scale=SCALE, softcap=case.softcap)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=TOLERANCE["float32"])


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *((case, "float32") for case in COMPARED),
        *((case, "bf16") for case in COMPARED if case.name in ("smollm2-135m-9:3-d64-ragged", "gemma3-270m-window")),
    ],
    ids=lambda part: getattr(part, "name", part),
)
def test_implementations_agree_with_the_reference(fast_implementations, case, dtype):
    *new, history = inputs(case)
    q, k, v = (jnp.asarray(part, DTYPES[dtype]) for part in new)
    pages = jnp.asarray(history.pages, DTYPES[dtype])
    arguments = (q, k, v, pages, 1, history.table, history.lengths, case.window)
    wanted = run("reference", *arguments, softcap=case.softcap)
    for implementation in fast_implementations:
        if implementation == "native" and (dtype != "float32" or case.heads.head_dim % 16):
            continue  # it takes float32 pages and head dims that 16 divides
        got = run(implementation, *arguments, softcap=case.softcap)
        assert got.dtype == DTYPES[dtype]
        np.testing.assert_allclose(
            *(np.asarray(out, np.float32) for out in (got, wanted)),
            rtol=0,
            atol=TOLERANCE[dtype],
            err_msg=implementation,
        )


@pytest.mark.parametrize("case", [case for case in SMALL if case not in COMPARED], ids=lambda case: case.name)
def test_bc169_native_code_for_the_other_head_shapes(missing_for_native, case):
    if missing_for_native:
        pytest.skip(missing_for_native)
    q, k, v, history = inputs(case)
    arguments = (q, k, v, history.pages, 1, history.table, history.lengths, case.window)
    got = run("native", *arguments, softcap=case.softcap)
    wanted = decode_attention(*arguments, scale=SCALE, softcap=case.softcap)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=TOLERANCE["float32"])


SLOTS, WIDTH, PAGE, KV_HEADS, GROUP, DIM = 4, 5, 4, 2, 3, 16


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(0, WIDTH * PAGE), min_size=SLOTS, max_size=SLOTS),
    window=st.one_of(st.just(0), st.integers(1, WIDTH * PAGE + 5)),
    layer=st.integers(0, LAYERS - 1),
    seed=st.integers(0, 2**32 - 1),
)
@example(lengths=[0, 0, 0, 0], window=0, layer=0, seed=0)
@example(lengths=[0, 0, 0, 0], window=1, layer=1, seed=1)
@example(lengths=[20, 19, 1, 0], window=1, layer=0, seed=2)
@example(lengths=[20, 4, 5, 3], window=4, layer=1, seed=3)
def test_ragged_histories_in_pages_of_any_order(fast_implementations, softcap, lengths, window, layer, seed):
    rng = np.random.default_rng(seed)
    spare = 1 + SLOTS * WIDTH - sum(-(-length // PAGE) for length in lengths)  # one size of pool: one program
    history = paged_history(rng, lengths, kv_heads=KV_HEADS, head_dim=DIM, page_size=PAGE, width=WIDTH, spare=spare)
    q = rng.standard_normal((SLOTS, KV_HEADS * GROUP, DIM), dtype=np.float32)
    k, v = rng.standard_normal((2, SLOTS, KV_HEADS, DIM), dtype=np.float32)
    arguments = (q, k, v, history.pages, layer, history.table, history.lengths, window)
    wanted = decode_attention(*arguments, scale=0.25, softcap=softcap)
    for implementation in fast_implementations:
        got = run(implementation, *arguments, scale=0.25, softcap=softcap)
        np.testing.assert_allclose(got, wanted, rtol=0, atol=4e-6, err_msg=implementation)


FEW = DecodeCase("few", SMOLLM2_135M, (5, 0, 33, 90), 16)


def test_what_lies_in_unused_places_changes_nothing(implementation):
    q, k, v, history = inputs(FEW)
    outcomes = []
    for garbage in (np.nan, np.inf, -3e38, 0.0):
        pages = np.where(np.isnan(history.pages), np.float32(garbage), history.pages)
        table = history.table.copy()
        for row, length in enumerate(FEW.lengths):
            table[row, -(-length // 16) :] = int(garbage == 0)
        outcomes.append(run(implementation, q, k, v, pages, 0, table, history.lengths, 0))
    for outcome in outcomes[1:]:
        np.testing.assert_array_equal(outcome, outcomes[0])


def test_an_empty_slot_gives_its_own_value_and_a_window_of_one_as_well(implementation):
    q, k, v, history = inputs(FEW)
    for window, rows in ((0, [1]), (1, [0, 1, 2, 3])):
        got = run(implementation, q, k, v, history.pages, 0, history.table, history.lengths, window)
        np.testing.assert_allclose(np.asarray(got)[rows], np.repeat(v, 3, axis=1)[rows], rtol=0, atol=1e-6)


def test_a_slot_does_not_depend_on_its_neighbours(implementation):
    q, k, v, history = inputs(FEW)
    whole = run(implementation, q, k, v, history.pages, 0, history.table, history.lengths, 0)
    shorter = np.array([0, 0, 33, 3], np.int32)
    other = run(implementation, q, k, v, history.pages, 0, history.table, shorter, 0)
    np.testing.assert_array_equal(whole[2], other[2])


def zeros(*shape, dtype=np.float32):
    return jnp.zeros(shape, dtype)


GOOD = {
    "q": zeros(2, 4, 8), "k": zeros(2, 2, 8), "v": zeros(2, 2, 8), "pages": zeros(1, 3, 2, 2, 4, 8),
    "layer": jnp.int32(0), "page_table": zeros(2, 3, dtype=np.int32), "lengths": zeros(2, dtype=np.int32),
    "window": jnp.int32(0),
}  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"k": zeros(2, 1, 8)}, r"k \(2, 1, 8\) and v \(2, 2, 8\) must be one row a slot"),
        ({"v": zeros(3, 2, 8)}, r"v \(3, 2, 8\) must be one row a slot"),
        ({"k": zeros(2, 2, 8, dtype=jnp.bfloat16)}, "k bfloat16 and v float32 must be of one dtype"),
        ({"pages": zeros(1, 3, 2, 2, 4, 16)}, r"pages \(1, 3, 2, 2, 4, 16\) do not hold keys and values of head_dim 8"),
        ({"pages": zeros(1, 3, 2, 1, 4, 8)}, r"pages \(1, 3, 2, 1, 4, 8\) do not hold keys and values"),
        ({"q": zeros(2, 3, 8)}, "q_heads 3 is no multiple of kv_heads 2"),
        ({"page_table": zeros(3, 3, dtype=np.int32)}, r"page_table \(3, 3\) and lengths \(2,\) need one row"),
        ({"lengths": zeros(1, dtype=np.int32)}, r"lengths \(1,\) need one row for each of 2 slots"),
    ],
)  # fmt: skip
def test_contract(wrong, message):
    with pytest.raises(ContractError, match=message):
        unchecked(**{**GOOD, **wrong}, scale=1.0, implementation="xla")
