"""The noise of ``sample``: the kernel's own arithmetic against jax.random, and that no number gives an infinity."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.sample.noise import UNIFORM_BITS, gumbel_of, noise, row_key
from pallas_kernels.sample.reference import gumbel
from tests.support.sampling_rows import sample_rows

WORDS = st.integers(-(2**31), 2**31 - 1)
IDS = np.array([0, 1, 2, 255, 256, 49_151, 128_255, 262_143, 2**31 - 1], np.int32)


@jax.jit
def by_words(low, high, position, ids):
    return noise(row_key(low, high, position), ids)


@given(low=WORDS, high=WORDS, position=st.integers(0, 2**31 - 1))
def test_the_kernels_noise_is_that_of_jax_random(low, high, position):
    rows = sample_rows(1, seed_low=low, seed_high=high, position=position)
    wanted = gumbel(rows, jnp.asarray(IDS[None]))[0]
    got = by_words(jnp.int32(low), jnp.int32(high), jnp.int32(position), jnp.asarray(IDS))
    np.testing.assert_array_max_ulp(np.asarray(got), np.asarray(wanted), 1)


def test_the_outermost_numbers_give_finite_noise():
    """An infinity would let an id of any probability win a draw, once in 2**24 ids: every 340th draw of 49,152."""
    outermost = np.asarray(gumbel_of(jnp.array([0, 2**UNIFORM_BITS - 1], jnp.int32)))
    half = 0.5 * 2.0**-UNIFORM_BITS
    np.testing.assert_allclose(outermost, -np.log(-np.log([half, 1 - half])), rtol=1e-6)
