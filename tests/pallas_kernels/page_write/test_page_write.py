import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.errors import ContractError
from pallas_kernels.page_write import op
from pallas_kernels.page_write.cases import CASES, WriteCase
from tests.support import exact

SMALL = [case for case in CASES if case.small]
LAYERS, PAGES, KV_HEADS, PAGE, DIM, TOKENS = 2, 5, 2, 4, 8, 6

unchecked = inspect.unwrap(op.page_write)


@functools.cache
def compiled(implementation: str):
    return jax.jit(functools.partial(one_token_rows, implementation=implementation), donate_argnums=0)


def one_token_rows(pages, k, v, page_ids, offsets, *, implementation):
    """Each token is a row of its own with a table of one page."""
    index = jnp.arange(page_ids.shape[0], dtype=jnp.int32)
    rows = (page_ids[:, None], index, offsets, jnp.ones_like(index), index)
    return op.page_write(pages, k, v, *rows, implementation=implementation)


def run(implementation, *arrays):
    return np.asarray(compiled(implementation)(*map(jnp.asarray, arrays)))


def of_case(case: WriteCase):
    rng = np.random.default_rng(0)
    heads = case.heads
    shape = (case.layers, case.num_pages, heads.kv_heads, 2, case.page_size, heads.head_dim)
    pages = rng.standard_normal(shape, dtype=np.float32)
    k, v = rng.standard_normal((2, case.layers, case.tokens, heads.kv_heads, heads.head_dim), dtype=np.float32)
    places = rng.choice(case.num_pages * case.page_size, case.tokens, replace=False).astype(np.int32)
    return pages, k, v, places // case.page_size, places % case.page_size


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_it_is_the_statement(implementation, case):
    arrays = of_case(case)
    np.testing.assert_array_equal(run(implementation, *arrays), exact.page_write(*arrays))


@settings(max_examples=60)
@given(
    places=st.lists(
        st.tuples(
            st.one_of(st.integers(0, PAGES - 1), st.sampled_from([-(2**31), -PAGES, -1, PAGES, PAGES + 3, 2**31 - 1])),
            st.integers(0, PAGE - 1),
        ),
        min_size=TOKENS,
        max_size=TOKENS,
        unique=True,
    ),
    seed=st.integers(0, 2**32 - 1),
)
def test_ids_outside_the_pool_are_dropped_and_never_clamped(fast_implementations, places, seed):
    rng = np.random.default_rng(seed)
    pages = rng.standard_normal((LAYERS, PAGES, KV_HEADS, 2, PAGE, DIM), dtype=np.float32)
    k, v = rng.standard_normal((2, LAYERS, TOKENS, KV_HEADS, DIM), dtype=np.float32)
    page_ids, offsets = (np.array(column, np.int32) for column in zip(*places, strict=True))
    wanted = exact.page_write(pages, k, v, page_ids, offsets)
    for implementation in fast_implementations:
        got = run(implementation, pages, k, v, page_ids, offsets)
        np.testing.assert_array_equal(got, wanted, implementation)


def test_values_are_rounded_to_the_dtype_of_the_pool():
    pages, k, v, page_ids, offsets = of_case(SMALL[2])
    got = compiled("xla")(jnp.asarray(pages, jnp.bfloat16), *map(jnp.asarray, (k, v, page_ids, offsets)))
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got[:, page_ids[0], :, 0, offsets[0]], jnp.asarray(k[:, 0], jnp.bfloat16))


def test_a_donated_pool_is_written_in_place(fast_implementations):
    shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in of_case(SMALL[0])]
    pool = int(np.prod(shapes[0].shape)) * 4
    for implementation in fast_implementations:
        analysis = compiled(implementation).lower(*shapes).compile().memory_analysis()
        assert analysis.alias_size_in_bytes == pool, implementation
        assert analysis.temp_size_in_bytes < pool / 4, implementation


def test_a_pool_that_was_not_given_away_stays_as_it_is(fast_implementations):
    arrays = of_case(SMALL[0])
    pages = jnp.asarray(arrays[0])
    for implementation in fast_implementations:
        written = jax.jit(functools.partial(one_token_rows, implementation=implementation))(pages, *arrays[1:])
        np.testing.assert_array_equal(written, exact.page_write(*arrays), implementation)
        np.testing.assert_array_equal(pages, arrays[0], implementation)


def zeros(*shape, dtype=np.float32):
    return jnp.zeros(shape, dtype)


GOOD = {
    "pages": zeros(2, 3, 2, 2, 4, 8), "k": zeros(2, 5, 2, 8), "v": zeros(2, 5, 2, 8),
    "page_table": zeros(3, 4, dtype=np.int32), "slots": zeros(3, dtype=np.int32), "starts": zeros(3, dtype=np.int32),
    "lengths": zeros(3, dtype=np.int32), "offsets": zeros(3, dtype=np.int32),
}  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"k": zeros(1, 5, 2, 8)}, r"k \(1, 5, 2, 8\) and v \(2, 5, 2, 8\) must be \(2, 5, 2, 8\)"),
        ({"v": zeros(2, 4, 2, 8)}, r"v \(2, 4, 2, 8\) must be \(2, 5, 2, 8\)"),
        ({"offsets": zeros(4, dtype=np.int32)}, r"offsets \(4,\) need one entry a row, 3"),
        ({"pages": zeros(2, 3, 2, 2, 4, 16)}, r"pages \(2, 3, 2, 2, 4, 16\) do not hold keys and values of head_dim 8"),
    ],
)
def test_contract(wrong, message):
    with pytest.raises(ContractError, match=message):
        unchecked(**{**GOOD, **wrong}, implementation="xla")
