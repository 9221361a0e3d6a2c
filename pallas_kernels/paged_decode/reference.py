"""paged_decode: the plain meaning, all of the history in one gather and one softmax."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.pages import Pages, history


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
    slots, q_heads, head_dim = q.shape
    kv_heads = k.shape[1]
    stored = history(pages, head_dim, layer, page_table, jnp.arange(slots, dtype=jnp.int32), lengths)
    keys, values = (
        jnp.concatenate([old, new.astype(jnp.float32)[:, :, None]], axis=2)
        for old, new in ((stored.k, k), (stored.v, v))
    )
    position = jnp.concatenate([stored.position, lengths[:, None]], axis=1)
    valid = jnp.concatenate([stored.valid, jnp.ones((slots, 1), bool)], axis=1)
    valid &= (window <= 0) | (position > lengths[:, None] - window)
    grouped = q.reshape(slots, kv_heads, q_heads // kv_heads, head_dim).astype(jnp.float32)
    scores = jnp.einsum("skgd,sktd->skgt", grouped, keys) * scale
    if softcap:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(valid[:, None, None], scores, -jnp.inf)
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    out = jnp.einsum("skgt,sktd->skgd", weights / weights.sum(-1, keepdims=True), values)
    return out.reshape(slots, q_heads, head_dim).astype(q.dtype)
