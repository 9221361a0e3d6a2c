"""paged_prefill by AVX-512 code (``native.cc``): no scores and no copies of pages in memory. All pools but
bf16 ones.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from pallas_kernels.errors import require
from pallas_kernels.kv_bitmask.rotation import rotation
from pallas_kernels.native import pool_operands
from pallas_kernels.pages import BitmaskPages, Pages


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
    require(q.shape[2] % 16 == 0, f"head_dim {q.shape[2]} is no multiple of 16, which the native path needs")
    name, operands = pool_operands(pages)
    wide = [part.astype(jnp.float32) for part in (q, k, v)]
    matrix = jnp.asarray(rotation(q.shape[2])) if isinstance(pages, BitmaskPages) else None
    if matrix is not None:  # sums over pages are of turned values: the others are turned too, and the sums turned back
        wide[2] = jnp.einsum("...d,de->...e", wide[2], matrix, precision="highest")
        operands = (*operands, slots, matrix)
    out = jax.ffi.ffi_call(f"zccp_paged_prefill{name}", jax.ShapeDtypeStruct(q.shape, jnp.float32))(
        *wide, layer, page_table, starts, lengths, offsets, window, *operands,
        scale=np.float32(scale), softcap=np.float32(softcap), bf16=products == "bf16" or q.dtype == jnp.bfloat16,
    )  # fmt: skip
    if matrix is not None:
        out = jnp.einsum("...d,ed->...e", out, matrix, precision="highest")
    return out.astype(q.dtype)
