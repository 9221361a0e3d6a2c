"""paged_decode by AVX-512 code (``native.cc``), which reads pages where they lie. All pools but bf16 ones."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from pallas_kernels.errors import require
from pallas_kernels.kv_bitmask.rotation import rotation
from pallas_kernels.native import pool_operands
from pallas_kernels.pages import BitmaskPages, Pages


def paged_decode(
    q: Float[Array, "slots q_heads head_dim"],
    k: Float[Array, "slots kv_heads head_dim"],
    v: Float[Array, "slots kv_heads head_dim"],
    pages: Pages,
    layer: Int32[Array, ""],
    page_table: Int32[Array, "slots width"],
    lengths: Int32[Array, " slots"],
    window: Int32[Array, ""],
    *,
    scale: float,
    softcap: float = 0.0,
) -> Float[Array, "slots q_heads head_dim"]:
    """See ``op.paged_decode``."""
    slots, _, head_dim = q.shape
    require(head_dim % 16 == 0, f"head_dim {head_dim} is no multiple of 16, which the native path needs")
    name, operands = pool_operands(pages)
    if isinstance(pages, BitmaskPages):
        kept = pages.recent.shape[1]
        require(slots <= kept, f"{slots} slots need as many rows beside pages, the pool has {kept}")
        operands = (*operands, jnp.asarray(rotation(head_dim).T))
    wide = [part.astype(jnp.float32) for part in (q, k, v)]
    out = jax.ffi.ffi_call(f"zccp_paged_decode{name}", jax.ShapeDtypeStruct(q.shape, jnp.float32))(
        *wide, layer, page_table, lengths, window, *operands, scale=np.float32(scale), softcap=np.float32(softcap)
    )
    return out.astype(q.dtype)
