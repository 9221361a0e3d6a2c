"""page_write by parallel copies and codes (``native.cc``) into the pool that the caller gave away; no bf16 pools.

Bitmask pools are written as ``xla`` does it: a step puts a row of bf16 numbers beside pages, and only one in 128 tokens
of a sequence rounds a block.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.native import pool_operands
from pallas_kernels.page_write import xla
from pallas_kernels.pages import BitmaskPages, Int8Pages, Pages, pool_shape
from pallas_kernels.rows import Rows, pages_of, places


def page_write(
    pages: Pages,
    k: Float[Array, "layers tokens kv_heads head_dim"],
    v: Float[Array, "layers tokens kv_heads head_dim"],
    rows: Rows,
    energy: Float[Array, "layers kv_heads head_dim"] | None,
) -> Pages:
    """See ``op.page_write``."""
    name, operands = pool_operands(pages)
    if isinstance(pages, BitmaskPages):
        return xla.page_write(pages, k, v, rows, energy)
    shape, (pool,) = pool_shape(pages, k.shape[3]), operands
    ids, offsets = pages_of(rows, places(rows, k.shape[1]), shape.page_size, shape.num_pages)
    result = jax.ShapeDtypeStruct(pool.shape, pool.dtype)
    call = jax.ffi.ffi_call(f"zccp_page_write{name}", result, input_output_aliases={0: 0})
    written = call(pool, k.astype(jnp.float32), v.astype(jnp.float32), ids, offsets)
    return Int8Pages(written) if isinstance(pages, Int8Pages) else written
