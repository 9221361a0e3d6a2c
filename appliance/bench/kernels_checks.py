"""Checks of the kernel bench on a GPU: how far an answer is from what it should be, for each kind of kernel.

Loads jax. Owns the bounds, which leave room for the roundings of a GPU and for no more. Times nothing.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.bits import unpair
from pallas_kernels.kv_layout import BLOCK
from pallas_kernels.pages import BitmaskPages, Int8Pages, Pages, fetch, layout_of, pool_shape
from pallas_kernels.sample.op import Sampled

TOLERANCE = 0.01
"""Of attention's worst row: the length of its error over its own. bf16 weights and results err by about 0.003."""
STEPS = 1.5
"""Of a stored number: one, as its code may be the next one, and less than a half where a scale's last bit differs."""
SHARE_OF_NUMBERS = 1e-3
"""Of stored numbers that differ at all."""
SHARE_OF_ROWS = 0.01
"""Of rows that draw another id, where sums or noise round to the other side; one row may, however few there are."""
LOGPROB = 1e-3


@dataclass(frozen=True, slots=True)
class Checked:
    """Whether an answer is right, and how far off it is, for people; ``error`` is attention's."""

    right: bool
    text: str
    error: float | None = None


def check_attention(got: Array, wanted: Array, against: str) -> Checked:
    """Results of attention against those of another implementation."""
    got, wanted = got.astype(jnp.float32), wanted.astype(jnp.float32)
    worst = (jnp.linalg.norm(got - wanted, axis=-1) / jnp.linalg.norm(wanted, axis=-1)).max()
    error = float(jnp.where(jnp.isnan(worst), jnp.inf, worst))
    return Checked(error <= TOLERANCE, f"error {error:.4f} against {against}", error)


def check_pools(got: Pages, wanted: Pages, head_dim: int) -> Checked:
    """A pool after a write against the same pool after another implementation's.

    Numbers in bf16 must be the same. Of codes it is what they mean that counts, in steps of their own scale: of two
    codes that share words the bits say little.
    """
    steps, differing, plain = 0.0, 0, (got, wanted)
    if isinstance(got, (Int8Pages, BitmaskPages)):
        apart = jax.jit(_apart, static_argnums=2)(got, wanted, head_dim)
        steps, differing, plain = float(apart[0]), int(apart[1]), None
    if isinstance(got, BitmaskPages) and isinstance(wanted, BitmaskPages):
        plain = got.recent, wanted.recent
    others = int(jax.jit(_unequal)(*plain)) if plain else 0
    right = not others and steps <= STEPS and differing <= SHARE_OF_NUMBERS * 2 * math.prod(pool_shape(got, head_dim))
    return Checked(
        right, f"{differing} codes differ, by {steps:.2f} steps at most, and {others} bf16 numbers, against xla"
    )


def _apart(got: Int8Pages | BitmaskPages, wanted: Any, head_dim: int) -> tuple[Array, Array]:
    """The largest difference in steps, and how many numbers differ."""

    def one_layer(layer: Array) -> tuple[Array, Array]:
        ids = jnp.arange(got.words.shape[1], dtype=jnp.int32)
        ours, theirs = (fetch(pool, head_dim, layer, ids) for pool in (got, wanted))
        step = jnp.maximum(_steps(got, head_dim, layer), _steps(wanted, head_dim, layer))
        apart = jnp.abs(ours - theirs)
        return jnp.where(jnp.isnan(apart), jnp.inf, jnp.where(apart > 0, apart / step, 0)).max(), jnp.sum(apart != 0)

    steps, differing = jax.lax.map(one_layer, jnp.arange(got.words.shape[0], dtype=jnp.int32))
    return steps.max(), differing.sum()


def _unequal(left: Array, right: Array) -> Array:
    return jnp.sum(_bits(left) != _bits(right))


def _bits(numbers: Array) -> Array:
    return jax.lax.bitcast_convert_type(numbers, jnp.uint16)


def _steps(pool: Int8Pages | BitmaskPages, head_dim: int, layer: Array) -> Array:
    """From a code to the next, for every number of a layer as ``fetch`` gives them."""
    words, shape = pool.words[layer], pool_shape(pool, head_dim)
    if isinstance(pool, Int8Pages):
        key, value = unpair(words[..., shape.page_size * (head_dim // 2) :])
        return jnp.stack([key, value], axis=-2)[..., None]
    starts = layout_of(pool, head_dim).starts
    key, _ = unpair(words[..., starts[3] : starts[4]])
    value = jnp.concatenate(unpair(words[..., starts[4] : starts[5]]), axis=-1)
    each = (*words.shape[:-1], BLOCK, head_dim)  # pages kv_heads blocks 128 d
    both = (jnp.broadcast_to(key[..., None, :], each), jnp.broadcast_to(value[..., None], each))
    return jnp.stack([part.reshape(*words.shape[:2], shape.page_size, head_dim) for part in both], axis=-3)


def check_samples(draws: Sequence[tuple[Sampled, Sampled]]) -> Checked:
    """What rows got in several launches against what the reference gives them: ids and log-probabilities."""
    rows = sum(got.ids.size for got, _ in draws)
    other = sum(int(jnp.sum(got.ids != wanted.ids)) for got, wanted in draws)
    apart = max(_logprobs_apart(got, wanted) for got, wanted in draws)
    right = other <= max(1, int(rows * SHARE_OF_ROWS)) and apart <= LOGPROB
    return Checked(right, f"{other} of {rows} rows drew another id, log-probabilities within {apart:.1e}, of reference")


def _logprobs_apart(got: Sampled, wanted: Sampled) -> float:
    chosen = jnp.where(got.ids == wanted.ids, jnp.abs(got.logprob - wanted.logprob), 0.0)
    worst = jnp.maximum(chosen.max(), jnp.abs(got.top_logprobs - wanted.top_logprobs).max())
    return float(jnp.where(jnp.isnan(worst), jnp.inf, worst))


Check = Callable[[], Checked]
"""Runs a case once, or a few times, and says what came of it."""
