"""linear with int8 codes by AVX512-VNNI and AVX512-BF16 code (``native.cc``); everything else as in ``xla``."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.linear import xla
from pallas_kernels.platform import cpu_features


def linear(
    x: Float[Array, "rows k"], weight: tuple[Array, Array, Array] | Array, *, products: str
) -> Float[Array, "rows n"]:
    """See ``op.linear``."""
    if not isinstance(weight, tuple) or (products == "bf16" and not _bf16_is_native()):
        return xla.linear(x, weight, products=products)
    codes, scale, layer = weight
    result = jax.ShapeDtypeStruct((x.shape[0], codes.shape[2]), jnp.float32)
    call = "zccp_linear_bf16" if products == "bf16" else "zccp_linear_int8"
    return jax.ffi.ffi_call(call, result)(x.astype(jnp.float32), codes, scale, layer)


def _bf16_is_native() -> bool:
    """Whether this CPU multiplies bf16 in AVX-512; with AMX, XLA's own products are faster."""
    features = cpu_features()
    return "avx512_bf16" in features and "amx_bf16" not in features
