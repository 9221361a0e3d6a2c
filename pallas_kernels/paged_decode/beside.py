"""Beside pages: what a step attends to that is in no page, and how it joins what is.

Owns the part of decoding that no kernel does: the new token's own key and value, and what a bitmask pool keeps in bf16
for each slot. Shared by every implementation that goes through pages in parts.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.pages import Pages, recent, turned_back
from pallas_kernels.softmax import Partial, capped, empty, finish, merge, weigh, where


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
    begins: Bool[Array, " slots"] | None,
    *,
    scale: float,
    softcap: float,
) -> Float[Array, "slots q_heads head_dim"] | Partial:
    """The attention output, or the part of it that ``begins`` asks for.

    ``paged`` has a sum of values as they lie in pages for each [slot, kv_head, query head].
    """
    slots, kv_heads, group, head_dim = paged.weighted.shape
    grouped = (q.astype(jnp.float32) * scale).reshape(slots, kv_heads, group, head_dim)
    scores = capped(jnp.einsum("skgd,skd->skg", grouped, k.astype(jnp.float32)), softcap)
    values = jnp.broadcast_to(v.astype(jnp.float32)[:, :, None], grouped.shape)
    own = Partial(scores, jnp.ones_like(scores), values)
    if begins is not None:
        own = where(begins[:, None, None], own, empty(scores.shape, head_dim))
    merged = merge(turned_back(pages, paged), own)
    rows = recent(pages, layer, jnp.arange(slots, dtype=jnp.int32), lengths, begins)
    if rows is not None:
        valid = rows.valid & (rows.position >= in_window(lengths, window)[:, None])
        scores = capped(jnp.einsum("skgd,skpd->skgp", grouped, rows.k), softcap)
        peak, total, weights = weigh(scores, valid[:, None, None])
        merged = merge(merged, Partial(peak, total, jnp.einsum("skgp,skpd->skgd", weights, rows.v)))
    if begins is None:
        return finish(merged).reshape(q.shape).astype(q.dtype)
    return Partial(*(part.reshape(q.shape[: part.ndim - 1]) for part in merged[:2]), merged.weighted.reshape(q.shape))
