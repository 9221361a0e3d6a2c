"""paged_decode through XLA: a loop over as many pages as the longest history has, one page of every slot a turn."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.paged_decode.beside import finished, in_window
from pallas_kernels.pages import Pages, fetch, in_pages, pool_shape
from pallas_kernels.softmax import Partial, capped, empty, merge, weigh


def paged_decode(
    q: Float[Array, "slots q_heads head_dim"],
    k: Float[Array, "slots kv_heads head_dim"],
    v: Float[Array, "slots kv_heads head_dim"],
    pages: Pages,
    layer: Int32[Array, ""],
    page_table: Int32[Array, "slots width"],
    lengths: Int32[Array, " slots"],
    window: Int32[Array, ""],
    begins: Bool[Array, " slots"] | None = None,
    *,
    scale: float,
    softcap: float = 0.0,
) -> Float[Array, "slots q_heads head_dim"] | Partial:
    """See ``op.paged_decode``."""
    slots, q_heads, head_dim = q.shape
    shape = pool_shape(pages, head_dim)
    kv_heads, page_size = shape.kv_heads, shape.page_size
    grouped = (q.astype(jnp.float32) * scale).reshape(slots, kv_heads, q_heads // kv_heads, head_dim)
    first_stored, end_stored = in_pages(pages, lengths, begins)
    first_valid = jnp.maximum(in_window(lengths, window), first_stored)
    num_pages = (jnp.max(end_stored) + page_size - 1) // page_size
    first_page = jnp.min(jnp.where(end_stored > 0, first_valid, jnp.iinfo(jnp.int32).max)) // page_size

    def turn(state: tuple[Array, Partial]) -> tuple[Array, Partial]:
        page, partial = state
        ids = jax.lax.dynamic_index_in_dim(page_table, page, axis=1, keepdims=False)
        tile = fetch(pages, head_dim, layer, ids).astype(jnp.float32)  # [slots kv_heads 2 page_size head_dim]
        positions = page * page_size + jnp.arange(page_size)
        valid = (positions < end_stored[:, None]) & (positions >= first_valid[:, None])
        scores = capped(jnp.einsum("skgd,skpd->skgp", grouped, tile[:, :, 0]), softcap)
        peak, total, weights = weigh(scores, valid[:, None, None])
        # garbage in a page that is not ours may be NaN: zero times NaN would reach the sum
        values = jnp.where(valid[:, None, :, None], tile[:, :, 1], 0.0)
        return page + 1, merge(partial, Partial(peak, total, jnp.einsum("skgp,skpd->skgd", weights, values)))

    start = (jnp.minimum(first_page, num_pages), empty(grouped.shape[:3], head_dim))
    _, paged = jax.lax.while_loop(lambda state: state[0] < num_pages, turn, start)
    return finished(paged, q, k, v, pages, layer, lengths, window, begins, scale=scale, softcap=softcap)
