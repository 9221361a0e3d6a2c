"""linear with int8 codes by AVX512-VNNI and AVX512-BF16 code (``*.cc``); everything else as in ``xla``."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.linear import xla
from pallas_kernels.linear.reference import gated
from pallas_kernels.platform import cpu_features


def linear(
    x: Float[Array, "rows k"], weight: tuple[Array, Array, Array] | Array, *, products: str
) -> Float[Array, "rows n"]:
    """See ``op.linear``."""
    if not isinstance(weight, tuple) or (products != "planes" and _xla_is_faster()):
        return xla.linear(x, weight, products=products)
    codes, scale, layer = weight
    result = jax.ShapeDtypeStruct((x.shape[0], codes.shape[2]), jnp.float32)
    return jax.ffi.ffi_call(f"zccp_linear_{products}", result)(x.astype(jnp.float32), codes, scale, layer)


def gated_linear(
    x: Float[Array, "rows k"], weight: tuple[Array, Array, Array] | Array, *, gate: str, products: str
) -> Float[Array, "rows half"]:
    """See ``op.gated_linear``; for many rows the gate is part of the product, which spares a pass over its columns."""
    if not isinstance(weight, tuple) or products == "planes" or _xla_is_faster():
        return gated(linear(x, weight, products=products), gate)
    codes, scale, layer = weight
    result = jax.ShapeDtypeStruct((x.shape[0], codes.shape[2] // 2), jnp.float32)
    call = jax.ffi.ffi_call(f"zccp_linear_{products}_{gate}", result)
    return call(x.astype(jnp.float32), codes, scale, layer)


def _xla_is_faster() -> bool:
    """Whether XLA multiplies many rows faster on this CPU: its bf16 products with AMX do."""
    return "amx_bf16" in cpu_features()
