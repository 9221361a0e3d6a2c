"""paged_decode: the plain meaning, one gather and one softmax over the full page-table width."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32


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
    history = pages[layer].at[page_table].get(mode="clip")  # slots width kv_heads 2 page_size head_dim
    history = jnp.moveaxis(history, 1, 3).reshape(slots, kv_heads, 2, -1, head_dim)
    history, k, v = (part.astype(jnp.float32) for part in (history, k, v))
    keys = jnp.concatenate([history[:, :, 0], k[:, :, None]], axis=2)
    values = jnp.concatenate([history[:, :, 1], v[:, :, None]], axis=2)
    positions = jnp.concatenate([jnp.arange(page_table.shape[1] * page_size), jnp.zeros(1, jnp.int32)])
    positions = jnp.tile(positions, (slots, 1)).at[:, -1].set(lengths)
    is_new = jnp.arange(positions.shape[1]) == positions.shape[1] - 1
    valid = (positions < lengths[:, None]) | is_new
    valid &= (window <= 0) | (positions > lengths[:, None] - window)
    grouped = q.reshape(slots, kv_heads, q_heads // kv_heads, head_dim).astype(jnp.float32)
    scores = jnp.einsum("skgd,sktd->skgt", grouped, keys) * scale
    if softcap:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(valid[:, None, None], scores, -jnp.inf)
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    values = jnp.where(valid[:, None, :, None], values, 0.0)
    out = jnp.einsum("skgt,sktd->skgd", weights / weights.sum(-1, keepdims=True), values)
    return out.reshape(slots, q_heads, head_dim).astype(q.dtype)
