"""paged_decode through XLA: a loop over as many pages as the longest history has, one page of every slot a turn."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.softmax import Partial, capped, empty, finish, merge, weigh


def paged_decode(
    q: Float[Array, "slots q_heads head_dim"],
    k: Float[Array, "slots kv_heads head_dim"],
    v: Float[Array, "slots kv_heads head_dim"],
    pages: Float[Array, "layers num_pages kv_heads 2 page_size head_dim"],
    layer: Int32[Array, ""],
    page_table: Int32[Array, "slots width"],
    lengths: Int32[Array, " slots"],
    window: Int32[Array, ""],
    *,
    scale: float,
    softcap: float = 0.0,
) -> Float[Array, "slots q_heads head_dim"]:
    """See ``op.paged_decode``."""
    slots, q_heads, head_dim = q.shape
    kv_heads, page_size = pages.shape[2], pages.shape[4]
    grouped = (q.astype(jnp.float32) * scale).reshape(slots, kv_heads, q_heads // kv_heads, head_dim)
    first_valid = jnp.where(window > 0, jnp.maximum(lengths - window + 1, 0), 0)
    num_pages = (jnp.max(lengths) + page_size - 1) // page_size
    first_page = jnp.min(jnp.where(lengths > 0, first_valid, jnp.iinfo(jnp.int32).max)) // page_size

    def turn(state: tuple[Array, Partial]) -> tuple[Array, Partial]:
        page, partial = state
        ids = jax.lax.dynamic_index_in_dim(page_table, page, axis=1, keepdims=False)
        tile = pages.at[layer, ids].get(mode="clip").astype(jnp.float32)  # [slots kv_heads 2 page_size head_dim]
        positions = page * page_size + jnp.arange(page_size)
        valid = (positions < lengths[:, None]) & (positions >= first_valid[:, None])
        scores = capped(jnp.einsum("skgd,skpd->skgp", grouped, tile[:, :, 0]), softcap)
        peak, total, weights = weigh(scores, valid[:, None, None])
        # garbage in a page that is not ours may be NaN: zero times NaN would reach the sum
        values = jnp.where(valid[:, None, :, None], tile[:, :, 1], 0.0)
        return page + 1, merge(partial, Partial(peak, total, jnp.einsum("skgp,skpd->skgd", weights, values)))

    new_scores = capped(jnp.einsum("skgd,skd->skg", grouped, k.astype(jnp.float32)), softcap)
    own = Partial(
        new_scores,
        jnp.ones_like(new_scores),
        jnp.broadcast_to(v.astype(jnp.float32)[:, :, None], grouped.shape),
    )
    start = (jnp.minimum(first_page, num_pages), empty(grouped.shape[:3], head_dim))
    _, history = jax.lax.while_loop(lambda state: state[0] < num_pages, turn, start)
    return finish(merge(history, own)).reshape(slots, q_heads, head_dim).astype(q.dtype)
