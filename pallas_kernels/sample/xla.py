"""sample through XLA: no full sort, and work only for what some row of the batch asks.

Penalties, random draws and log-probabilities are conditional on data, so that one program serves every request. A draw
looks at the ``CANDIDATES`` likeliest ids first, which is exact whenever top-k, top-p or min-p keep no others; a row
without such a bound takes the way over the whole vocabulary, where thresholds are found by bisection on float bits.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.sample.reference import adjust, gumbel, min_p_floor, scaled, suppress

CANDIDATES = 256
_FLOAT_BITS = 31


def sample(logits: Array, rows: tuple, counts: Array, bias: Array, *, num_top: int) -> tuple[Array, ...]:
    """See ``op.sample``."""
    adjusted = jax.lax.cond(
        jnp.any((rows.penalised > 0) | (rows.biased > 0)),
        lambda: adjust(logits, rows, counts, bias),
        lambda: suppress(logits, rows.suppressed),
    )
    greedy = jnp.argmax(adjusted, axis=-1).astype(jnp.int32)
    drawn = jax.lax.cond(jnp.any(rows.temperature > 0), lambda: _draw(adjusted, rows), lambda: greedy)
    ids = jnp.where(rows.temperature > 0, drawn, greedy)
    return ids, *jax.lax.cond(
        jnp.any(rows.top_logprobs >= 0),
        lambda: _logprobs(logits, ids, num_top),
        lambda: _no_logprobs(logits.shape[0], num_top),
    )


def _logprobs(logits: Array, ids: Array, num_top: int) -> tuple[Array, Array, Array]:
    normaliser = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    top, top_ids = jax.lax.top_k(logits, num_top)
    chosen = jnp.take_along_axis(logits, ids[:, None], axis=1) - normaliser
    return chosen[:, 0], top_ids.astype(jnp.int32), top - normaliser


def _no_logprobs(rows: int, num_top: int) -> tuple[Array, Array, Array]:
    return jnp.zeros(rows), jnp.zeros((rows, num_top), jnp.int32), jnp.zeros((rows, num_top))


class _Limits(NamedTuple):
    """Smallest scaled logit that each rule keeps."""

    kept: Float[Array, " rows"]
    exact: Bool[Array, " rows"]
    """Whether every id at or above ``kept`` is among the candidates."""


def _draw(adjusted: Float[Array, "rows vocab"], rows: tuple) -> Int32[Array, " rows"]:
    z = scaled(adjusted, rows.temperature)
    # without the barriers XLA reads the last candidate straight from a full sort: 8 ms instead of 0.1 ms a row; one
    # around both makes it fail where a program is for several devices
    values, ids = (jax.lax.optimization_barrier(part) for part in jax.lax.top_k(z, min(CANDIDATES, z.shape[1])))
    limits = _candidate_limits(z, values, rows)

    def among_candidates() -> Int32[Array, " rows"]:
        best = jnp.argmax(jnp.where(values >= limits.kept[:, None], values + gumbel(rows, ids), -jnp.inf), axis=-1)
        return jnp.take_along_axis(ids, best[:, None], axis=1)[:, 0].astype(jnp.int32)

    def among_all() -> Int32[Array, " rows"]:
        # a row whose candidates tell everything keeps their limits: its choice never depends on who takes this way
        kept = jnp.where(limits.exact, limits.kept, _full_limits(z, rows, ~limits.exact))
        noise = gumbel(rows, jnp.broadcast_to(jnp.arange(z.shape[1], dtype=jnp.int32), z.shape))
        return jnp.argmax(jnp.where(z >= kept[:, None], z + noise, -jnp.inf), axis=-1).astype(jnp.int32)

    return jax.lax.cond(jnp.all(limits.exact | (rows.temperature <= 0)), among_candidates, among_all)


def _candidate_limits(z: Array, values: Float[Array, "rows candidates"], rows: tuple) -> _Limits:
    vocab, candidates = z.shape[1], values.shape[1]
    bounded = (rows.top_k > 0) & (rows.top_k <= candidates)
    last = jnp.where(bounded, rows.top_k, candidates) - 1
    kth = jnp.where(bounded, jnp.take_along_axis(values, last[:, None], axis=1)[:, 0], -jnp.inf)
    weights = jnp.exp(values)
    mass = jnp.where(values >= kth[:, None], weights, 0.0)
    total = jnp.where(bounded, mass.sum(1), jnp.exp(z).sum(1))
    before = jnp.cumsum(mass, axis=1) - mass
    wanted = rows.top_p * total
    inside = (before < wanted[:, None]) | (jnp.arange(candidates) == 0)
    reached = before[:, -1] + mass[:, -1] >= wanted
    nucleus = jnp.min(jnp.where(inside, values, jnp.inf), axis=1)
    nucleus = jnp.where(reached & (rows.top_p < 1), nucleus, -jnp.inf)
    kept = jnp.maximum(jnp.maximum(kth, nucleus), min_p_floor(rows.min_p))
    # a top-k beyond the candidates bounds top-p's total, so that only the whole vocabulary tells
    told = bounded | (rows.top_k == 0) | (rows.top_k >= vocab)
    return _Limits(kept, (told & (values[:, -1] < kept)) | (candidates == vocab))


def _full_limits(z: Float[Array, "rows vocab"], rows: tuple, asked: Bool[Array, " rows"]) -> Float[Array, " rows"]:
    """Limits of the rows that ask; each threshold is searched only if one of them sets its rule."""
    vocab = z.shape[1]
    off = jnp.full(z.shape[:1], -jnp.inf)
    wanted = jnp.where(rows.top_k > 0, jnp.minimum(rows.top_k, vocab), vocab)
    any_top_k = jnp.any(asked & (wanted < vocab))
    kth = jax.lax.cond(any_top_k, lambda: _largest_threshold(z, lambda keep: keep.sum(1) >= wanted), lambda: off)

    def nucleus() -> Float[Array, " rows"]:
        weights = jnp.where(z >= kth[:, None], jnp.exp(z), 0.0)
        enough = rows.top_p * weights.sum(1)
        found = _largest_threshold(z, lambda keep: jnp.where(keep, weights, 0.0).sum(1) >= enough)
        return jnp.where(rows.top_p < 1, found, -jnp.inf)

    inside = jax.lax.cond(jnp.any(asked & (rows.top_p < 1)), nucleus, lambda: off)
    return jnp.maximum(jnp.maximum(kth, inside), min_p_floor(rows.min_p))


def _largest_threshold(z: Float[Array, "rows vocab"], enough: object) -> Float[Array, " rows"]:
    """The largest value t of z such that ``enough(z >= t)``; z is at most 0, so -z sorts like its own bits."""
    bits = jax.lax.bitcast_convert_type(jnp.abs(z), jnp.int32)

    def halve(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        ok = enough(bits <= middle[:, None])
        return jnp.where(ok, low, middle + 1), jnp.where(ok, middle, high)

    infinity = jnp.full(z.shape[:1], 0x7F800000, jnp.int32)
    _, high = jax.lax.fori_loop(0, _FLOAT_BITS, halve, (jnp.zeros_like(infinity), infinity))
    return -jax.lax.bitcast_convert_type(high, jnp.float32)
