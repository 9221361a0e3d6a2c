"""linear: the plain meaning, a float32 product with the weight written out, and the gate after it."""

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


def gated_linear(
    x: Float[Array, "rows k"], weight: tuple[Array, Array, Array] | Array, *, gate: str, products: str
) -> Float[Array, "rows half"]:
    """See ``op.gated_linear``."""
    return gated(linear(x, weight, products=products), gate)


def gated(both: Float[Array, "rows n"], gate: str) -> Float[Array, "rows half"]:
    """The first half of the columns, through the gate, times the second."""
    first, second = jnp.split(both, 2, axis=-1)
    return (jax.nn.silu(first) if gate == "silu" else jax.nn.gelu(first, approximate=True)) * second
