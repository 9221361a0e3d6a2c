"""paged_prefill: the plain meaning, every token against its row's whole table and against all tokens of the launch."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.pages import Pages, history
from pallas_kernels.rows import Rows, places


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
    """See ``op.paged_prefill``; exact products, whatever is asked for."""
    del products
    tokens, q_heads, head_dim = q.shape
    kv_heads = k.shape[1]
    at = places(Rows(page_table, slots, starts, lengths, offsets), tokens)
    row, position = jnp.where(at.valid, at.row, -1), at.position
    stored = history(pages, head_dim, layer, page_table, slots, starts)
    keys, values, history_position, history_valid = (part[at.row] for part in stored)
    chunk_valid = (row[:, None] == row) & (position <= position[:, None])
    floor = jnp.where(window > 0, position - window, -1)[:, None]
    valid = jnp.concatenate([history_valid & (history_position > floor), chunk_valid & (position > floor)], axis=1)[
        :, None, None
    ]
    grouped = q.reshape(tokens, kv_heads, q_heads // kv_heads, head_dim).astype(jnp.float32) * scale
    scores = jnp.concatenate(
        [
            jnp.einsum("tkgd,tkpd->tkgp", grouped, keys),
            jnp.einsum("tkgd,ukd->tkgu", grouped, k.astype(jnp.float32)),
        ],
        axis=-1,
    )
    if softcap:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(valid, scores, -jnp.inf)
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    split = history_position.shape[1]
    out = jnp.einsum("tkgp,tkpd->tkgd", weights[..., :split], values)
    out += jnp.einsum("tkgu,ukd->tkgd", weights[..., split:], v.astype(jnp.float32))
    return out.reshape(tokens, q_heads, head_dim).astype(q.dtype)
