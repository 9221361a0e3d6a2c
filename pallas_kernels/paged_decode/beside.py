"""Beside pages: what a step attends to that is in no page, and how it joins what is.

Owns the part of decoding that no kernel does: the new token's own key and value, and what a bitmask pool keeps in bf16
for each slot. Shared by every implementation that goes through pages in parts.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.pages import Pages, recent, turned_back
from pallas_kernels.softmax import Partial, capped, finish, merge, weigh


def in_window(lengths: Int32[Array, "*slots"], window: Int32[Array, ""]) -> Int32[Array, "*slots"]:
    """The first position that the new token, behind ``lengths`` others, attends to."""
    return jnp.where(window > 0, jnp.maximum(lengths - window + 1, 0), 0)


def finished(
    paged: Partial,
    q: Float[Array, "slots q_heads head_dim"],
    k: Float[Array, "slots kv_heads head_dim"],
    v: Float[Array, "slots kv_heads head_dim"],
    pages: Pages,
    layer: Int32[Array, ""],
    lengths: Int32[Array, " slots"],
    window: Int32[Array, ""],
    *,
    scale: float,
    softcap: float,
) -> Float[Array, "slots q_heads head_dim"]:
    """The attention output; ``paged`` has a sum of values as they lie in pages for each [slot, kv_head, query head]."""
    slots, kv_heads, group, head_dim = paged.weighted.shape
    grouped = (q.astype(jnp.float32) * scale).reshape(slots, kv_heads, group, head_dim)
    scores = capped(jnp.einsum("skgd,skd->skg", grouped, k.astype(jnp.float32)), softcap)
    values = jnp.broadcast_to(v.astype(jnp.float32)[:, :, None], grouped.shape)
    merged = merge(turned_back(pages, paged), Partial(scores, jnp.ones_like(scores), values))
    rows = recent(pages, layer, jnp.arange(slots, dtype=jnp.int32), lengths)
    if rows is not None:
        valid = rows.valid & (rows.position >= in_window(lengths, window)[:, None])
        scores = capped(jnp.einsum("skgd,skpd->skgp", grouped, rows.k), softcap)
        peak, total, weights = weigh(scores, valid[:, None, None])
        merged = merge(merged, Partial(peak, total, jnp.einsum("skgp,skpd->skgd", weights, rows.v)))
    return finish(merged).reshape(q.shape).astype(q.dtype)
