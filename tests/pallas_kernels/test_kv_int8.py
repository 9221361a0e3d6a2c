"""Codes of eight bits: words, round trip, and what becomes of vectors that are hard to round."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import kv_int8
from tests.support import quantised
from tests.support.quick import quick_jit

ULP = 2.0**-8
"""Largest relative error of rounding to bf16."""


def page(k, v):
    """The words of pages [..., page_size, d] as a write makes them, and what a reader gives back."""
    (k_words, k_scale), (v_words, v_scale) = kv_int8.quantize(k), kv_int8.quantize(v)
    parts = k_words, v_words, kv_int8.scale_words(k_scale, v_scale)
    words = jnp.concatenate([part.reshape(k.shape[0], -1) for part in parts], axis=-1)
    return words, kv_int8.dequantize(words, k.shape[-1])


compiled = functools.cache(lambda: quick_jit(page))


def run(k, v):
    return tuple(np.asarray(part) for part in compiled()(np.asarray(k, np.float32), np.asarray(v, np.float32)))


def assert_bounds(x, read) -> None:
    """Within half a step of the vector's own scale, which is its largest number over 127 but for its rounding."""
    step = np.abs(x).max(-1, keepdims=True) / 127 * (1 + ULP)
    assert np.all(np.abs(x - read) <= step / 2 * (1 + 1e-5) + 1e-28)


@pytest.mark.parametrize(("page_size", "head_dim"), [(16, 64), (128, 80), (32, 4), (16, 256)])
def test_words_are_those_of_the_layout(page_size, head_dim):
    rng = np.random.default_rng(head_dim)
    k, v = rng.standard_normal((2, 3, page_size, head_dim)) * np.exp(rng.standard_normal((2, 3, page_size, 1)))
    words, read = run(k, v)
    k, v = k.astype(np.float32), v.astype(np.float32)
    rounded = (*quantised.int8_rounded(k), *quantised.int8_rounded(v))
    np.testing.assert_array_equal(words, quantised.int8_page(*rounded))
    np.testing.assert_allclose(read, quantised.int8_read(words, page_size, head_dim), rtol=1e-6)
    assert_bounds(k, read[:, 0])
    assert_bounds(v, read[:, 1])


@settings(max_examples=50)
@given(seed=st.integers(0, 2**32 - 1), power=st.integers(-90, 100), tail=st.sampled_from([1, 3, 30]))
def test_any_vector_keeps_the_bound(seed, power, tail):
    rng = np.random.default_rng(seed)
    k, v = (rng.standard_t(tail, (2, 3, 16, 64)) * 2.0**power).astype(np.float32)
    words, read = run(k, v)
    np.testing.assert_array_equal(words, quantised.int8_page(*quantised.int8_rounded(k), *quantised.int8_rounded(v)))
    assert_bounds(k.astype(np.float64), read[:, 0])
    assert_bounds(v.astype(np.float64), read[:, 1])


def test_codes_use_all_of_their_range_and_never_the_least_one():
    """-128 would need a scale of its own; the largest number, of either sign, is within half a step all the same."""
    top = np.linspace(1, 2, 3 * 16 * 64).reshape(3, 16, 64)
    words, _ = run(top, -top)
    codes = words[:, : 2 * 16 * 16].view(np.int8)
    assert codes.max() == 127
    assert codes.min() == -127


@pytest.mark.parametrize("value", [0.0, 1e-38, 1e-42, -3e38])
def test_extremes(value):
    x = np.zeros((3, 16, 64), np.float32)
    x[:, ::2, 5] = value
    words, read = run(x, x)
    assert np.all(np.isfinite(read))
    assert_bounds(x.astype(np.float64), read[:, 0].astype(np.float64))
    if value == 0:
        assert not words[:, : 2 * 16 * 16].any()
        assert not read.any()


def test_bf16_vectors_are_rounded_as_they_are():
    x = np.random.default_rng(0).standard_normal((3, 16, 64)).astype(jnp.bfloat16)
    words, scale = jax.jit(kv_int8.quantize)(x)
    np.testing.assert_array_equal(words, quantised.int8_code_words(quantised.int8_rounded(x.astype(np.float32))[0]))
    np.testing.assert_array_equal(scale, quantised.int8_rounded(x.astype(np.float32))[1])
