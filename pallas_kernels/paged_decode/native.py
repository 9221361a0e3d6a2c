"""paged_decode by AVX-512 code (``native.cc``), which reads pages where they lie. float32 pages only."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from pallas_kernels.errors import require
from pallas_kernels.pages import Pages, kind


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
    require(
        isinstance(pages, jax.Array) and pages.dtype == jnp.float32,
        f"pages are {kind(pages)}; the native path holds float32 pages",
    )
    require(q.shape[2] % 16 == 0, f"head_dim {q.shape[2]} is no multiple of 16, which the native path needs")
    wide = [part.astype(jnp.float32) for part in (q, k, v)]
    out = jax.ffi.ffi_call("zccp_paged_decode", jax.ShapeDtypeStruct(q.shape, jnp.float32))(
        *wide, pages, layer, page_table, lengths, window, scale=np.float32(scale), softcap=np.float32(softcap)
    )
    return out.astype(q.dtype)
