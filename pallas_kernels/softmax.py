"""Partial: a softmax-weighted sum that is not finished, and how two of them merge.

Owns the online-softmax arithmetic that attention over pages, over the current chunk and over shards share.
Source: online softmax, arXiv 1805.02867; merging by log-sum-exp as in FlashDecoding.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

MASKED = -1e30
"""Score of a masked position: finite, so that a row without any valid position yields no NaN."""


class Partial(NamedTuple):
    """Softmax-weighted sum over some positions: ``peak`` the largest score, ``total`` the sum of exponentials."""

    peak: Float[Array, "*rows"]
    total: Float[Array, "*rows"]
    weighted: Float[Array, "*rows head_dim"]


def empty(rows: tuple[int, ...], head_dim: int) -> Partial:
    """The sum over no position, neutral in ``merge``."""
    return Partial(jnp.full(rows, MASKED), jnp.zeros(rows), jnp.zeros((*rows, head_dim)))


def capped(scores: Float[Array, "*s"], softcap: float) -> Float[Array, "*s"]:
    """Scores after the soft cap (0 = none)."""
    return softcap * jnp.tanh(scores / softcap) if softcap else scores


def weigh(scores: Float[Array, "*rows keys"], valid: Bool[Array, "*#rows keys"]) -> tuple[Array, Array, Array]:
    """Peak, total and unnormalised weights of masked scores."""
    scores = jnp.where(valid, scores, MASKED)
    peak = scores.max(-1)
    weights = jnp.where(valid, jnp.exp(scores - peak[..., None]), 0.0)
    return peak, weights.sum(-1), weights


def merge(a: Partial, b: Partial) -> Partial:
    """The sum over the positions of both."""
    peak = jnp.maximum(a.peak, b.peak)
    factor_a, factor_b = jnp.exp(a.peak - peak), jnp.exp(b.peak - peak)
    return Partial(
        peak,
        a.total * factor_a + b.total * factor_b,
        a.weighted * factor_a[..., None] + b.weighted * factor_b[..., None],
    )


def where(condition: Bool[Array, "*#rows"], a: Partial, b: Partial) -> Partial:
    """``a`` in the rows where it is so, else ``b``."""
    return Partial(
        jnp.where(condition, a.peak, b.peak),
        jnp.where(condition, a.total, b.total),
        jnp.where(condition[..., None], a.weighted, b.weighted),
    )


def finish(partial: Partial) -> Float[Array, "*rows head_dim"]:
    """The attention output; zeros for a row that saw no position."""
    return partial.weighted / jnp.maximum(partial.total, 1e-30)[..., None]
