"""Search: the largest threshold that keeps enough, found on whole numbers that sort like floats.

Owns the images and the search; what counts as enough, and how it is summed, is the caller's. Runs inside kernels.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

LOWEST = -0x7F80_0001
"""The image of minus infinity."""
ZERO = 0
"""The image of 0."""

Thresholds = tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""]]
Enough = tuple[Bool[Array, ""], Bool[Array, ""], Bool[Array, ""]]


def image(number: Float[Array, ""]) -> Int32[Array, ""]:
    """A whole number that sorts like ``number``, which is not NaN; the image of 0 is 0."""
    return _flipped(jax.lax.bitcast_convert_type(number, jnp.int32))


def number_of(image: Int32[Array, ""]) -> Float[Array, ""]:
    """The number with that image."""
    return jax.lax.bitcast_convert_type(_flipped(image), jnp.float32)


def _flipped(bits: Array) -> Array:
    """Bits of a float as an image and back: those of negative numbers sort the other way."""
    return bits ^ ((bits >> 31) & 0x7FFF_FFFF)


def largest_threshold(most: Int32[Array, ""], enough: Callable[[Thresholds], Enough]) -> Float[Array, ""]:
    """The largest number up to that of image ``most`` that keeps enough; minus infinity if none does.

    Args:
        most: image of the largest number that is tried.
        enough: for three ascending thresholds, whether each keeps enough. What a threshold keeps a lower one keeps.
    """

    def quarter(bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = _between(low, high)
        lower, upper = _between(low, middle - 1), _between(middle, high)
        in_lower, in_middle, in_upper = enough((number_of(lower), number_of(middle), number_of(upper)))
        below = (jnp.where(in_lower, lower, low), jnp.where(in_lower, middle - 1, lower - 1))
        above = (jnp.where(in_upper, upper, middle), jnp.where(in_upper, high, upper - 1))
        return jnp.where(in_middle, above[0], below[0]), jnp.where(in_middle, above[1], below[1])

    start = (jnp.int32(LOWEST), most)
    return number_of(jax.lax.while_loop(lambda bounds: bounds[0] < bounds[1], quarter, start)[0])


def _between(low: Array, high: Array) -> Array:
    """The middle of two whole numbers, rounded up, whose difference may not fit into 32 bits."""
    return (low | high) - ((low ^ high) >> 1)
