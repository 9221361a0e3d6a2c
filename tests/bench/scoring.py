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

from pallas_kernels.pages import Pages
from pallas_kernels.rows import Rows
from planner.decoder import DecodeContext, Decoder, PrefillContext, logits_of, parameters, write
from planner.plan import Plan
from planner.program import empty_pool, numerics_of

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
    arch, numerics = plan.architecture, numerics_of(plan)

    @jax.jit
    def logits(weights: Weights, ids: jax.Array) -> jax.Array:
        one = functools.partial(jnp.full, (1,), dtype=jnp.int32)
        rows = Rows(jnp.zeros((1, 1), jnp.int32), one(0), one(0), one(ids.shape[0]), one(0))
        context = PrefillContext(empty_pool(plan, 1, 1), rows)
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
    pages = empty_pool(plan, rows * width, rows)
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
    pages: Pages,
    table: jax.Array,
    ids: jax.Array,
    following: jax.Array,
    position: jax.Array,
) -> tuple[Pages, jax.Array, jax.Array]:
    """One id a row at one position: the pages with it, the loss of the id that follows, the likeliest id."""
    arch, numerics = plan.architecture, numerics_of(plan)
    positions = jnp.full(ids.shape, position, jnp.int32)
    context = DecodeContext(pages, table, positions)
    hidden, new = Decoder(arch, numerics).apply(parameters(weights), ids, positions, context)
    slots = jnp.arange(ids.shape[0], dtype=jnp.int32)
    pages = write(pages, new, Rows(table, slots, positions, jnp.ones_like(slots), slots), weights, numerics)
    logits = logits_of(arch, numerics, weights, hidden)
    losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), following[:, None], axis=1)[:, 0]
    return pages, losses, jnp.argmax(logits, axis=1)
