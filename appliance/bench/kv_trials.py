"""Trials of kv-quality: text run through the engine's own pool in one format, a block of 128 positions a step.

Owns the two measurements: the loss of every id given the text before it, and the error of each layer's attention
output. A step's own block is exact and all blocks before it lie in the pool, which is what a decode finds at every
position.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from appliance.bench.kv_baselines import BASELINES, Rounding
from pallas_kernels.kv_bitmask.rotation import turned, turned_back
from pallas_kernels.kv_layout import BLOCK, SINKS
from pallas_kernels.page_write.op import page_write
from pallas_kernels.paged_prefill.op import paged_prefill
from pallas_kernels.pages import Int8Pages, Pages
from pallas_kernels.rows import Rows, places
from planner.decoder import (
    QUERIES,
    QUERY_ENERGY,
    Decoder,
    NewKeyValues,
    PrefillContext,
    Weights,
    layer_data,
    logits_of,
    parameters,
    write,
)
from planner.plan import Plan
from planner.program import empty_pool, numerics_of

LANES_OF_TEXT = 2
"""Windows that run side by side."""

FIRST_MEASURED = 256
"""Position from which on attention errors count: before, most of the history is exact in every format."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One way of holding keys and values: a plan of a format, or a float plan whose writes a baseline rounds."""

    name: str
    plan: Plan
    rounding: Rounding | None = None


def trials_of(plans: dict[str, Plan]) -> tuple[Trial, ...]:
    """The plans of formats, ``float32`` among them, and every baseline over float32 pages."""
    served = (Trial(name, plan) for name, plan in plans.items())
    return (*served, *(Trial(name, plans["float32"], rounding) for name, rounding in BASELINES.items()))


@dataclass(frozen=True, slots=True)
class _Step:
    """Rows of one step: ``LANES_OF_TEXT`` windows, one block each."""

    tokens: np.ndarray
    following: np.ndarray
    start: int


def losses(
    trial: Trial, longest: int, weights: Weights, windows: Sequence[Sequence[int]], progress: Callable[[int], None]
) -> np.ndarray:
    """``-log p`` of every id but the first of each window, float64 [windows, blocks]: summed over blocks of 128 ids.

    Args:
        trial: how keys and values are held.
        longest: ids that the pool has room for in each window; equal ones share what is compiled.
        weights: in the plan's form, with query energies where the format needs them.
        windows: of one length, a multiple of 128; as many as a multiple of LANES_OF_TEXT.
        progress: called with the number of ids done.
    """
    step = _scorer(trial)
    length = len(windows[0])
    found = np.zeros((len(windows), length // BLOCK))
    done = 0
    for first in range(0, len(windows), LANES_OF_TEXT):
        pages, table = _pool(trial.plan, longest)
        for block, part in enumerate(_steps(windows[first : first + LANES_OF_TEXT])):
            pages, lost = step(weights, pages, table, part.tokens, part.following, np.int32(part.start))
            by_id = np.array(lost, np.float64)
            if part.start + BLOCK == length:
                by_id[:, -1] = 0.0  # nothing follows the last id
            found[first : first + LANES_OF_TEXT, block] = by_id.sum(axis=1)
            done += part.tokens.size
            progress(done)
    return found


def attention_errors(
    trials: Sequence[Trial],
    weights: Weights,
    windows: Sequence[Sequence[int]],
    progress: Callable[[int], None],
) -> dict[str, np.ndarray]:
    """Relative squared error of the attention output, ``|o - o'|^2 / |o|^2``, float64 [layers], by trial.

    Every trial's pool gets the keys and values of the exact model, and attends with its queries.

    Args:
        trials: the first is the exact one, over float32 pages.
        weights: in the plans' form, with query energies.
        windows: LANES_OF_TEXT windows of one length.
        progress: called with the number of ids done.
    """
    exact, *others = trials
    length = len(windows[0])
    forward, attend = _queries(exact), _attender(exact)
    write_one = {trial.name: _writer(trial) for trial in trials}
    pools: dict[str, Pages] = {}
    tables: dict[str, jax.Array] = {}
    for trial in trials:
        pools[trial.name], tables[trial.name] = _pool(trial.plan, length)
    sums = {trial.name: np.zeros((2, exact.plan.architecture.layers)) for trial in others}
    for part in _steps(windows):
        start = np.int32(part.start)
        q, new = forward(weights, pools[exact.name], tables[exact.name], part.tokens, start)
        if start >= FIRST_MEASURED:
            right = attend(q, new, pools[exact.name], tables[exact.name], start)
            for trial in others:
                found = attend(q, new, pools[trial.name], tables[trial.name], start)
                sums[trial.name] += np.asarray(_squares(found, right), np.float64)
        for trial in trials:
            pools[trial.name] = write_one[trial.name](weights, pools[trial.name], tables[trial.name], new, start)
        progress(part.start + BLOCK)
    return {name: found[0] / found[1] for name, found in sums.items()}


def _steps(windows: Sequence[Sequence[int]]) -> Iterator[_Step]:
    ids = np.asarray(windows, np.int32)
    following = np.concatenate([ids[:, 1:], ids[:, :1]], axis=1)
    for start in range(0, ids.shape[1], BLOCK):
        cut = slice(start, start + BLOCK)
        yield _Step(ids[:, cut].reshape(-1), following[:, cut], start)


def _pool(plan: Plan, length: int) -> tuple[Pages, jax.Array]:
    """An empty pool for LANES_OF_TEXT windows, and their page table."""
    width = -(-length // plan.page_size)
    table = jnp.arange(LANES_OF_TEXT * width, dtype=jnp.int32).reshape(LANES_OF_TEXT, width)
    return empty_pool(plan, LANES_OF_TEXT * width, LANES_OF_TEXT), table


def _rows(table: jax.Array, start: jax.Array) -> Rows:
    index = jnp.arange(LANES_OF_TEXT, dtype=jnp.int32)
    return Rows(table, index, jnp.full_like(index, start), jnp.full_like(index, BLOCK), index * BLOCK)


def _forward(trial: Trial, weights: Weights, pages: Pages, rows: Rows, tokens: jax.Array, **options: Any) -> Any:
    module: Any = Decoder(trial.plan.architecture, numerics_of(trial.plan))
    positions = places(rows, tokens.shape[0]).position
    return module.apply(parameters(weights), tokens, positions, PrefillContext(pages, rows), **options)


def _rounded(trial: Trial, new: NewKeyValues, start: jax.Array) -> NewKeyValues:
    """What a baseline would give back of the step's keys and values; all else as it is."""
    if trial.rounding is None:
        return new
    layers, _, kv_heads, head_dim = new.k.shape
    by_window = (layers, LANES_OF_TEXT, BLOCK, kv_heads, head_dim)
    blocks = [jnp.swapaxes(part.astype(jnp.float32).reshape(by_window), 2, 3) for part in new]
    exact = (start + jnp.arange(BLOCK) < SINKS)[:, None]
    kept = [jnp.where(exact, old, made) for old, made in zip(blocks, trial.rounding(*blocks), strict=True)]
    return NewKeyValues(*(jnp.swapaxes(part, 2, 3).reshape(new.k.shape) for part in kept))


@functools.cache
def _scorer(trial: Trial) -> Callable[..., tuple[Pages, jax.Array]]:
    numerics, arch = numerics_of(trial.plan), trial.plan.architecture

    @functools.partial(jax.jit, donate_argnums=1)
    def step(
        weights: Weights, pages: Pages, table: jax.Array, tokens: jax.Array, following: jax.Array, start: jax.Array
    ) -> tuple[Pages, jax.Array]:
        rows = _rows(table, start)
        hidden, new = _forward(trial, weights, pages, rows, tokens)
        pages = write(pages, _rounded(trial, new, start), rows, weights, numerics)
        logits = logits_of(arch, numerics, weights, hidden)
        likely = jax.nn.logsumexp(logits, axis=-1)
        chosen = jnp.take_along_axis(logits, following.reshape(-1, 1), axis=1)[:, 0]
        return pages, (likely - chosen).reshape(following.shape)

    return step


def _queries(trial: Trial) -> Callable[..., tuple[jax.Array, NewKeyValues]]:
    @jax.jit
    def forward(
        weights: Weights, pages: Pages, table: jax.Array, tokens: jax.Array, start: jax.Array
    ) -> tuple[jax.Array, NewKeyValues]:
        (_, new), sown = _forward(trial, weights, pages, _rows(table, start), tokens, mutable=[QUERIES])
        return sown[QUERIES]["layers"]["q"], new

    return forward


def _writer(trial: Trial) -> Callable[..., Pages]:
    @functools.partial(jax.jit, donate_argnums=1)
    def step(weights: Weights, pages: Pages, table: jax.Array, new: NewKeyValues, start: jax.Array) -> Pages:
        rounded = _rounded(trial, new, start)
        if isinstance(pages, Int8Pages):  # which the decoder gives turned vectors
            rounded = NewKeyValues(turned(rounded.k), turned(rounded.v))
        return page_write(
            pages, rounded.k, rounded.v, *_rows(table, start), energy=weights[QUERY_ENERGY], implementation="xla"
        )

    return step


def _attender(exact: Trial) -> Callable[..., jax.Array]:
    """(queries, new keys and values, pool, table, start) -> attention outputs, float32 [layers, rows, heads, dim]."""
    arch = exact.plan.architecture
    one_layer = functools.partial(
        paged_prefill, scale=arch.query_scale, softcap=arch.attn_softcap, products="float32", implementation="xla"
    )

    @jax.jit
    def attend(q: jax.Array, new: NewKeyValues, pages: Pages, table: jax.Array, start: jax.Array) -> jax.Array:
        def layer(one: Any) -> jax.Array:
            data, *parts = one
            queries, k, v = (part.astype(jnp.float32) for part in parts)
            if isinstance(pages, Int8Pages):
                queries, k, v = turned(queries), turned(k), turned(v)
            found = one_layer(queries, k, v, pages, data.layer, *_rows(table, start), data.window)
            return turned_back(found) if isinstance(pages, Int8Pages) else found

        return jax.lax.map(layer, (layer_data(arch), q, new.k, new.v))

    return attend


@jax.jit
def _squares(found: jax.Array, right: jax.Array) -> jax.Array:
    """Sums of squared error and of squared output by layer, [2, layers]."""
    return jnp.stack([jnp.sum((found - right) ** 2, axis=(1, 2, 3)), jnp.sum(right**2, axis=(1, 2, 3))])
