"""Noise: the random numbers of ``sample`` in the operations that a kernel has: 32-bit integers, no keys of jax.random.

Owns the kernel's form of the noise and the step from bits to Gumbel noise, which every implementation shares.
Source: Threefry-2x32 with 20 rounds, Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011); the order of
words is that of ``jax.random.fold_in``.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

UNIFORM_BITS = 23
"""Of a uniform number: with one more, the largest plus a half rounds up to 1 in float32, whose noise is infinite."""

_PARITY = 0x1BD11BDA
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_ROUNDS_BY_FOUR = 5

Key = tuple[Int32[Array, ""], Int32[Array, ""]]
"""64 bits as two words."""


def row_key(low: Int32[Array, ""], high: Int32[Array, ""], position: Int32[Array, ""]) -> Key:
    """The key of a row: its seed with its position folded in."""
    return _fold((high, low), position)


def noise(key: Key, ids: Int32[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Gumbel noise of ids under the key of their row."""
    first, second = _fold(key, ids)
    return gumbel_of(jax.lax.shift_right_logical(first ^ second, jnp.int32(32 - UNIFORM_BITS)))


def gumbel_of(number: Int32[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Gumbel noise from whole numbers of ``UNIFORM_BITS`` random bits."""
    # inside the open interval (0, 1): no infinities on either side
    uniform = (number.astype(jnp.float32) + 0.5) * (2.0**-UNIFORM_BITS)
    return -jnp.log(-jnp.log(uniform))


def _fold(key: Key, data: Int32[Array, "*shape"]) -> tuple[Int32[Array, "*shape"], Int32[Array, "*shape"]]:
    """The words of the cipher under ``key`` at the counter ``data``."""
    schedule = (*key, key[0] ^ key[1] ^ _PARITY)
    first, second = jnp.zeros_like(data) + schedule[0], data + schedule[1]
    for four in range(_ROUNDS_BY_FOUR):
        for rotation in _ROTATIONS[four % 2]:
            first = first + second
            second = _rotated(second, rotation) ^ first
        first = first + schedule[(four + 1) % 3]
        second = second + schedule[(four + 2) % 3] + (four + 1)
    return first, second


def _rotated(word: Array, by: int) -> Array:
    return (word << by) | jax.lax.shift_right_logical(word, jnp.int32(32 - by))
