"""linear: the plain meaning, a float32 product with the weight written out."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def linear(
    x: Float[Array, "rows k"], weight: tuple[Array, Array, Array] | Array, *, products: str
) -> Float[Array, "rows n"]:
    """See ``op.linear``; exact activations, whatever the products."""
    del products
    if isinstance(weight, tuple):
        codes, scale, layer = weight
        full = codes[layer].astype(jnp.float32) * scale[layer]
    else:
        full = weight.astype(jnp.float32)
    return jnp.dot(x.astype(jnp.float32), full, precision=jax.lax.Precision.HIGHEST)
