"""paged_prefill by AVX-512 code (``native.cc``): no scores and no copies of pages in memory. float32 pages only."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from pallas_kernels.errors import require
from pallas_kernels.pages import Pages, kind


def paged_prefill(
    q: Float[Array, "tokens q_heads head_dim"],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    pages: Pages,
    layer: Int32[Array, ""],
    page_table: Int32[Array, "rows width"],
    slots: Int32[Array, " rows"],
    starts: Int32[Array, " rows"],
    lengths: Int32[Array, " rows"],
    offsets: Int32[Array, " rows"],
    window: Int32[Array, ""],
    *,
    scale: float,
    softcap: float = 0.0,
    products: str,
) -> Float[Array, "tokens q_heads head_dim"]:
    """See ``op.paged_prefill``; bf16 products become float32 ones on a CPU without them."""
    del slots
    require(
        isinstance(pages, jax.Array) and pages.dtype == jnp.float32,
        f"pages are {kind(pages)}; the native path holds float32 pages",
    )
    require(q.shape[2] % 16 == 0, f"head_dim {q.shape[2]} is no multiple of 16, which the native path needs")
    wide = [part.astype(jnp.float32) for part in (q, k, v)]
    out = jax.ffi.ffi_call("zccp_paged_prefill", jax.ShapeDtypeStruct(q.shape, jnp.float32))(
        *wide, pages, layer, page_table, starts, lengths, offsets, window,
        scale=np.float32(scale), softcap=np.float32(softcap), bf16=products == "bf16" or q.dtype == jnp.bfloat16,
    )  # fmt: skip
    return out.astype(q.dtype)
