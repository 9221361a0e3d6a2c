"""page_write by parallel copies (``native.cc``) into the pool that the caller gave away. float32 pages only."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.errors import require


def page_write(
    pages: Float[Array, "layers num_pages kv_heads 2 page_size head_dim"],
    k: Float[Array, "layers tokens kv_heads head_dim"],
    v: Float[Array, "layers tokens kv_heads head_dim"],
    page_ids: Int32[Array, " tokens"],
    offsets: Int32[Array, " tokens"],
) -> Float[Array, "layers num_pages kv_heads 2 page_size head_dim"]:
    """See ``op.page_write``."""
    require(pages.dtype == jnp.float32, f"pages are {pages.dtype}; the native path holds float32 pages")
    result = jax.ShapeDtypeStruct(pages.shape, pages.dtype)
    call = jax.ffi.ffi_call("zccp_page_write", result, input_output_aliases={0: 0})
    return call(pages, k.astype(jnp.float32), v.astype(jnp.float32), page_ids, offsets)
