"""linear with int8 codes in planes by AVX512-VNNI code (``native.cc``); everything else as in ``xla``."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.linear import xla


def linear(
    x: Float[Array, "rows k"], weight: tuple[Array, Array, Array] | Array, *, products: str
) -> Float[Array, "rows n"]:
    """See ``op.linear``."""
    if not isinstance(weight, tuple) or products == "bf16":
        return xla.linear(x, weight, products=products)
    codes, scale, layer = weight
    result = jax.ShapeDtypeStruct((x.shape[0], codes.shape[2]), jnp.float32)
    return jax.ffi.ffi_call("zccp_linear_int8", result)(x.astype(jnp.float32), codes, scale, layer)
