"""page_write by parallel copies (``native.cc``) into the pool that the caller gave away. float32 pages only."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.errors import require
from pallas_kernels.pages import Pages, kind, pool_shape
from pallas_kernels.rows import Rows, pages_of, places


def page_write(
    pages: Pages,
    k: Float[Array, "layers tokens kv_heads head_dim"],
    v: Float[Array, "layers tokens kv_heads head_dim"],
    rows: Rows,
    energy: Float[Array, "layers kv_heads head_dim"] | None,
) -> Pages:
    """See ``op.page_write``."""
    del energy
    require(
        isinstance(pages, jax.Array) and pages.dtype == jnp.float32,
        f"pages are {kind(pages)}; the native path holds float32 pages",
    )
    shape = pool_shape(pages, k.shape[3])
    ids, offsets = pages_of(rows, places(rows, k.shape[1]), shape.page_size, shape.num_pages)
    result = jax.ShapeDtypeStruct(pages.shape, pages.dtype)
    call = jax.ffi.ffi_call("zccp_page_write", result, input_output_aliases={0: 0})
    return call(pages, k.astype(jnp.float32), v.astype(jnp.float32), ids, offsets)
