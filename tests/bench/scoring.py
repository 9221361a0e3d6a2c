"""Teacher-forced scores of the planner's decoder: a whole window at once, or id by id through pages.

Owns the two compiled scoring functions. They call the decoder, the ops and the code path of the plan that is served;
what they leave out is sampling.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.page_write.op import page_write
from planner.decoder import DecodeContext, Decoder, Numerics, PrefillContext, logits_of, parameters
from planner.plan import Plan
from planner.program import KV_DTYPES

Weights = Mapping[str, jax.Array]


@dataclass(frozen=True, slots=True)
class Scores:
    """Of one window: the sum of ``-log p`` over its predicted ids, how many those are, the likeliest id everywhere."""

    loss: float
    predicted: int
    top: np.ndarray


def score(logits: np.ndarray, ids: Sequence[int]) -> Scores:
    """Scores from logits [ids, vocab]; sums in float64."""
    targets = np.asarray(ids[1:])
    rows = logits[:-1].astype(np.float64)
    peak = rows.max(axis=1)
    log_sum = peak + np.log(np.exp(rows - peak[:, None]).sum(axis=1))
    loss = log_sum - rows[np.arange(len(targets)), targets]
    return Scores(float(loss.sum()), len(targets), logits.argmax(axis=1))


def prefill_scorer(plan: Plan) -> Callable[[Weights, Sequence[int]], Scores]:
    """A function that scores one window as the single chunk of a prefill."""
    arch, numerics = plan.architecture, Numerics(plan.weight_form, plan.implementation)
    pool = (arch.layers, 1, arch.kv_heads, 2, plan.page_size, arch.head_dim)

    @jax.jit
    def logits(weights: Weights, ids: jax.Array) -> jax.Array:
        one = functools.partial(jnp.full, (1,), dtype=jnp.int32)
        pages = jnp.zeros(pool, KV_DTYPES[plan.kv_format])
        context = PrefillContext(pages, jnp.zeros((1, 1), jnp.int32), one(0), one(ids.shape[0]), one(0))
        positions = jnp.arange(ids.shape[0], dtype=jnp.int32)
        hidden, _ = Decoder(arch, numerics).apply(parameters(weights), ids, positions, context)
        return logits_of(arch, numerics, weights, hidden)

    def run(weights: Weights, ids: Sequence[int]) -> Scores:
        return score(np.asarray(logits(weights, jnp.asarray(ids, jnp.int32))), ids)

    return run


def decode_scores(
    plan: Plan, weights: Weights, windows: Sequence[Sequence[int]], progress: Callable[[int], None]
) -> list[Scores]:
    """Scores of all windows, each a row of a decode batch that is fed its own ids one at a time.

    Args:
        plan: what is served.
        weights: in the plan's form.
        windows: of one length.
        progress: called with the position reached.
    """
    ids = np.asarray(windows, np.int32)
    rows, length = ids.shape
    width = -(-length // plan.page_size)
    arch = plan.architecture
    shape = (arch.layers, rows * width, arch.kv_heads, 2, plan.page_size, arch.head_dim)
    pages = jax.device_put(np.zeros(shape, KV_DTYPES[plan.kv_format]))
    table = jnp.arange(rows * width, dtype=jnp.int32).reshape(rows, width)
    step = jax.jit(functools.partial(_decode, plan), donate_argnums=1)
    loss = np.zeros(rows)
    top = np.zeros((rows, length), np.int64)
    for position in range(length):
        following = ids[:, min(position + 1, length - 1)]
        pages, losses, likeliest = step(weights, pages, table, ids[:, position], following, np.int32(position))
        top[:, position] = likeliest
        if position + 1 < length:
            loss += np.asarray(losses, np.float64)
        progress(position + 1)
    return [Scores(float(loss[row]), length - 1, top[row]) for row in range(rows)]


def _decode(
    plan: Plan,
    weights: Weights,
    pages: jax.Array,
    table: jax.Array,
    ids: jax.Array,
    following: jax.Array,
    position: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One id a row at one position: the pages with it, the loss of the id that follows, the likeliest id."""
    arch, numerics = plan.architecture, Numerics(plan.weight_form, plan.implementation)
    positions = jnp.full(ids.shape, position, jnp.int32)
    context = DecodeContext(pages, table, positions)
    hidden, new = Decoder(arch, numerics).apply(parameters(weights), ids, positions, context)
    places = table[:, position // plan.page_size]
    pages = page_write(pages, new.k, new.v, places, positions % plan.page_size, implementation=numerics.implementation)
    logits = logits_of(arch, numerics, weights, hidden)
    losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), following[:, None], axis=1)[:, 0]
    return pages, losses, jnp.argmax(logits, axis=1)
