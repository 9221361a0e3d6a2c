"""linear through XLA: float32 and bf16 products as they are, int8 codes by two int8 planes or by bf16 products.

Two planes double the rows of an int8 product, which costs nothing while reading the weights is the bound; with many
rows the product itself is, and bf16 is then the faster form on CPUs with AVX512-BF16 or AMX. It stands in for blocks
too, whose sums XLA would make one by one; it is the finer of the two.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int8

from pallas_kernels.linear.reference import gated

PLANE = 254
"""The second plane holds what rounding the first left, in steps of 1 / 254 of a first-plane step."""


def linear(
    x: Float[Array, "rows k"], weight: tuple[Array, Array, Array] | Array, *, products: str
) -> Float[Array, "rows n"]:
    """See ``op.linear``."""
    if not isinstance(weight, tuple):
        return jnp.dot(x.astype(weight.dtype), weight, preferred_element_type=jnp.float32)
    stack, scales, layer = weight
    codes, scale = stack[layer], scales[layer]
    if products != "planes":
        return jnp.dot(x.astype(jnp.bfloat16), codes.astype(jnp.bfloat16), preferred_element_type=jnp.float32) * scale
    return two_planes(x, codes) * scale


def gated_linear(
    x: Float[Array, "rows k"], weight: tuple[Array, Array, Array] | Array, *, gate: str, products: str
) -> Float[Array, "rows half"]:
    """See ``op.gated_linear``."""
    return gated(linear(x, weight, products=products), gate)


def two_planes(x: Float[Array, "rows k"], codes: Int8[Array, "k n"]) -> Float[Array, "rows n"]:
    """``x @ codes`` with x as ``step * (high + low / PLANE)``, both planes int8 in one int32-exact product."""
    rows = x.shape[0]
    step = jnp.maximum(jnp.max(jnp.abs(x), axis=1, keepdims=True), 1e-30) / 127
    scaled = x / step
    high = jnp.round(scaled)
    low = jnp.round((scaled - high) * PLANE)
    planes = jnp.concatenate([high, low]).astype(jnp.int8)
    sums = jax.lax.dot(planes, codes, preferred_element_type=jnp.int32).astype(jnp.float32)
    return (sums[:rows] + sums[rows:] / PLANE) * step
