"""The search for thresholds: images sort like floats, and the threshold is the one that a sort would find."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from pallas_kernels.sample.search import LOWEST, image, largest_threshold, number_of

NUMBERS = st.floats(width=32, allow_nan=False, allow_subnormal=False)


@given(NUMBERS, NUMBERS)
@example(0.0, -np.inf)
@example(np.inf, np.float32(3.4028235e38))
def test_images_sort_like_floats(a, b):
    images = [int(image(jnp.float32(number))) for number in (a, b)]
    assert [float(number_of(jnp.int32(number))) for number in images] == [a, b]
    if a != b:
        assert (images[0] < images[1]) == (a < b)
    assert images[0] >= LOWEST


@jax.jit
def by_search(numbers, wanted):
    def enough(thresholds):
        low, middle, high = (jnp.sum(numbers >= threshold) >= wanted for threshold in thresholds)
        return low, middle, high

    return largest_threshold(image(numbers.max()), enough)


@given(st.lists(NUMBERS, min_size=5, max_size=5), st.integers(1, 6))
@example([0.0, 0.0, -1.0, -1.0, np.float32(-3.4028235e38)], 3)
@example([1.0, 1.0, 1.0, 1.0, 1.0], 5)
@example([np.inf, -np.inf, 0.0, 1.0, -1.0], 4)
def test_the_threshold_is_that_of_a_sort(numbers, wanted):
    found = float(by_search(jnp.asarray(numbers, jnp.float32), jnp.int32(wanted)))
    # a CPU compares subnormal numbers as 0, so that one of them may stand for it
    by_sort = sorted(numbers)[-wanted] if wanted <= 5 else -np.inf
    np.testing.assert_allclose(found, by_sort, rtol=0, atol=np.finfo(np.float32).tiny)
