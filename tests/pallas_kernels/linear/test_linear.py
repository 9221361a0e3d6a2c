import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.errors import ContractError
from pallas_kernels.linear import op
from pallas_kernels.linear.cases import CASES, LinearCase
from pallas_kernels.linear.op import Int8Weight

SMALL = [case for case in CASES if case.small]
LAYERS, LAYER = 2, 1
EPSILON = np.finfo(np.float32).eps

unchecked = inspect.unwrap(op.linear)


@functools.cache
def compiled(implementation: str, products: str):
    return jax.jit(functools.partial(op.linear, products=products, implementation=implementation))


def run(implementation, x, weight, products="planes"):
    out = compiled(implementation, products)(jnp.asarray(x), jax.tree.map(jnp.asarray, weight))
    assert out.dtype == jnp.float32
    return np.asarray(out, np.float64)


def of_case(case: LinearCase) -> tuple[np.ndarray, Int8Weight]:
    rng = np.random.default_rng(case.k)
    x = rng.standard_normal((case.rows, case.k), dtype=np.float32)
    x[0, 0] = 40.0  # an outlier, as models have them
    codes = rng.integers(-127, 128, (LAYERS, case.k, case.n), dtype=np.int8)
    scale = rng.uniform(1e-4, 1e-2, (LAYERS, case.n)).astype(np.float32)
    return x, Int8Weight(codes, scale, np.int32(LAYER))


def full(weight: Int8Weight) -> np.ndarray:
    return weight.codes[weight.layer].astype(np.float64) * weight.scale[weight.layer]


def rounding(x, matrix) -> np.ndarray:
    """What float32 sums of k products may err by: a few ulp of the sum of magnitudes."""
    return 4 * EPSILON * (np.abs(x).astype(np.float64) @ np.abs(matrix)) + 1e-30


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_reference_is_the_float64_product(case):
    x, weight = of_case(case)
    error = np.abs(run("reference", x, weight) - x.astype(np.float64) @ full(weight))
    assert (error <= rounding(x, full(weight))).all()


PRODUCTS = ("planes", "blocks16", "blocks32", "bf16")


@pytest.mark.parametrize("products", PRODUCTS)
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_int8_error_stays_within_its_bound(fast_implementations, case, products):
    x, weight = of_case(case)
    matrix = full(weight)
    wanted = run("reference", x, weight)
    if products == "planes":  # half a step of the second plane, an input
        steps = np.abs(x).max(1, keepdims=True) / 127 / 254
        bound = 0.5 * steps * np.abs(matrix).sum(0)
    elif products.startswith("blocks"):  # half a step of each block, an input
        starts = np.arange(0, case.k, int(products.removeprefix("blocks")))
        steps = np.maximum.reduceat(np.abs(x), starts, axis=1) / 127
        bound = 0.5 * steps @ np.add.reduceat(np.abs(matrix), starts, axis=0)
    else:  # bf16 keeps 8 bits of each activation, so it errs by 2^-9 of it
        bound = 2.0**-8 * 0.5 * (np.abs(x).astype(np.float64) @ np.abs(matrix))
    for implementation in fast_implementations:
        error = np.abs(run(implementation, x, weight, products) - wanted)
        assert (error <= 1.01 * bound + 2 * rounding(x, matrix)).all(), implementation


@pytest.mark.parametrize("rows", [1, 5])
def test_integers_up_to_127_are_exact(fast_implementations, rows):
    rng = np.random.default_rng(3)
    x = rng.integers(-127, 128, (rows, 70)).astype(np.float32)
    x[:, 0] = 127.0
    weight = Int8Weight(rng.integers(-127, 128, (1, 70, 33), dtype=np.int8), np.ones((1, 33), np.float32), np.int32(0))
    for implementation in fast_implementations:
        got = run(implementation, x, weight)
        np.testing.assert_array_equal(got, x.astype(np.int64) @ weight.codes[0].astype(np.int64), implementation)


def test_the_largest_sums_do_not_overflow(fast_implementations):
    k = 28_672
    x = np.full((2, k), -3.0, np.float32)
    weight = Int8Weight(np.full((1, k, 2), -127, np.int8), np.ones((1, 2), np.float32), np.int32(0))
    for implementation in fast_implementations:
        np.testing.assert_allclose(run(implementation, x, weight), 3.0 * 127 * k, rtol=1e-6, err_msg=implementation)


def test_rows_of_zeros_and_of_tiny_numbers(fast_implementations):
    x = np.zeros((3, 64), np.float32)
    x[1] = 1e-36
    weight = Int8Weight(np.full((1, 64, 2), 127, np.int8), np.ones((1, 2), np.float32), np.int32(0))
    for implementation in fast_implementations:
        got = run(implementation, x, weight)
        np.testing.assert_array_equal(got[[0, 2]], 0.0)
        np.testing.assert_allclose(got[1], 64 * 127e-36, rtol=0, atol=64 * 127 * 1e-30 / 127, err_msg=implementation)


ROWS, INPUTS, OUTPUTS = 4, 19, 70


@settings(max_examples=60)
@given(scales=st.lists(st.integers(-20, 20), min_size=ROWS, max_size=ROWS), seed=st.integers(0, 2**32 - 1))
def test_every_row_has_its_own_step_and_does_not_see_the_others(fast_implementations, scales, seed):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((ROWS, INPUTS), dtype=np.float32) * np.float32(2.0) ** np.array(scales, np.float32)[:, None]
    codes = rng.integers(-128, 128, (1, INPUTS, OUTPUTS), dtype=np.int8)
    weight = Int8Weight(codes, np.ones((1, OUTPUTS), np.float32), np.int32(0))
    bound = np.abs(x).max(1, keepdims=True) / 127 / 254 / 2 * np.abs(codes[0].astype(np.float64)).sum(0)
    others = x.copy()
    others[1:] *= 7.0
    for implementation in fast_implementations:
        got = run(implementation, x, weight)
        error = np.abs(got - x.astype(np.float64) @ codes[0])
        assert (error <= 1.01 * bound + 2 * rounding(x, codes[0].astype(np.float64))).all(), implementation
        np.testing.assert_array_equal(run(implementation, others, weight)[0], got[0], implementation)


@pytest.mark.parametrize("products", PRODUCTS)
@pytest.mark.parametrize("rows", [1, 3, 8, 47])
def test_an_int8_row_is_the_same_bits_for_any_number_of_rows(fast_implementations, rows, products):
    x, weight = of_case(LinearCase("any", 47, 200, 96))
    for implementation in fast_implementations:
        if implementation == "xla" and products != "planes":
            continue  # XLA sums floats in an order that depends on the number of rows
        alone, among = run(implementation, x[:rows], weight, products), run(implementation, x, weight, products)
        np.testing.assert_array_equal(alone, among[:rows], implementation)


@pytest.mark.parametrize("products", PRODUCTS)
def test_a_nan_stays_in_its_row_and_is_not_rounded_away(fast_implementations, products):
    x, weight = of_case(LinearCase("any", 5, 200, 96))
    poisoned = x.copy()
    poisoned[2, 7] = np.nan
    for implementation in fast_implementations:
        clean, got = run(implementation, x, weight, products), run(implementation, poisoned, weight, products)
        assert np.isnan(got[2]).all(), implementation
        others = [0, 1, 3, 4]
        np.testing.assert_array_equal(got[others], clean[others], implementation)


def exact_gate(first: np.ndarray, gate: str) -> np.ndarray:
    """SiLU, and GELU by its tanh form, in float64."""
    if gate == "silu":
        return first / (1 + np.exp(-first))
    return 0.5 * first * (1 + np.tanh(np.sqrt(2 / np.pi) * (first + 0.044715 * first**3)))


@functools.cache
def compiled_gated(implementation: str, gate: str, products: str):
    return jax.jit(functools.partial(op.gated_linear, gate=gate, products=products, implementation=implementation))


@pytest.mark.parametrize("gate", ["silu", "gelu"])
@pytest.mark.parametrize("products", PRODUCTS)
@pytest.mark.parametrize(("rows", "k", "n"), [(1, 64, 128), (273, 131, 214), (11, 96, 50)])
def test_a_gate_is_the_product_and_then_the_gate(fast_implementations, rows, k, n, products, gate):
    x, weight = of_case(LinearCase("gated", rows, k, n))
    for implementation in fast_implementations:
        both = run(implementation, x, weight, products)
        wanted = exact_gate(both[:, : n // 2], gate) * both[:, n // 2 :]
        call = compiled_gated(implementation, gate, products)
        got = np.asarray(call(jnp.asarray(x), jax.tree.map(jnp.asarray, weight)), np.float64)
        # the gate's derivative stays below 1.13, so that a few ulp of its input are as many of the result
        np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=1e-6 * np.abs(both).max() ** 2, err_msg=implementation)


@pytest.mark.parametrize("gate", ["silu", "gelu"])
def test_gates_of_very_large_and_very_small_numbers(fast_implementations, gate):
    x = np.array([[-1e4], [-100.0], [-1.0], [0.0], [1.0], [100.0], [1e4]], np.float32)
    weight = Int8Weight(np.array([[[1, 2]]], np.int8), np.ones((1, 2), np.float32), np.int32(0))
    exact = x[:, 0].astype(np.float64)
    with np.errstate(over="ignore"):
        wanted = exact_gate(exact, gate) * 2 * exact
    for implementation in fast_implementations:
        call = compiled_gated(implementation, gate, "blocks32")
        got = np.asarray(call(jnp.asarray(x), jax.tree.map(jnp.asarray, weight)))[:, 0]
        np.testing.assert_allclose(got, wanted, rtol=1e-2, atol=1e-6, err_msg=implementation)


def test_a_gated_weight_has_two_halves():
    with pytest.raises(ContractError, match="5 columns are odd"):
        inspect.unwrap(op.gated_linear)(zeros(2, 4), zeros(4, 5), gate="silu", implementation="xla")


def test_float_weights(implementation):
    rng = np.random.default_rng(5)
    x, matrix = rng.standard_normal((7, 90), dtype=np.float32), rng.standard_normal((90, 40), dtype=np.float32)
    got = run(implementation, x, matrix)
    assert (np.abs(got - x.astype(np.float64) @ matrix) <= rounding(x, matrix)).all()
    half = jnp.asarray(matrix, jnp.bfloat16)
    stored = np.asarray(half, np.float64)
    got = run(implementation, x, half)
    allowed = rounding(x, stored) + (0 if implementation == "reference" else 2.0**-9) * (np.abs(x) @ np.abs(stored))
    assert (np.abs(got - x.astype(np.float64) @ stored) <= 1.01 * allowed).all()


def zeros(*shape, dtype=np.float32):
    return jnp.zeros(shape, dtype)


LAYER_0, CODES = jnp.int32(0), zeros(1, 4, 5, dtype=np.int8)


@pytest.mark.parametrize(
    ("x", "weight", "message"),
    [
        (zeros(2, 3), zeros(4, 5), r"x \(2, 3\) must be \[rows, 4\]"),
        (zeros(4), zeros(4, 5), r"x \(4,\) must be \[rows, 4\]"),
        (zeros(2, 4), Int8Weight(zeros(1, 4, 5), zeros(1, 5), LAYER_0), "codes are float32; they must be int8"),
        (zeros(2, 4), Int8Weight(CODES, zeros(1, 4), LAYER_0), r"scale \(1, 4\) must be \[1, 5\]"),
        (zeros(2, 3), Int8Weight(CODES, zeros(1, 5), LAYER_0), r"x \(2, 3\) must be \[rows, 4\]"),
    ],
)  # fmt: skip
def test_contract(x, weight, message):
    with pytest.raises(ContractError, match=message):
        unchecked(x, weight, implementation="xla")
