"""Baselines of kv-quality: other ways of holding keys and values in four bits, as rounding to what they give back.

Owns the three roundings. Each leaves exact what the bitmask formats leave exact: the first positions, and a block of
128 until it is full. They show what the parts of a format are for; nothing serves with them.
"""

import math
from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.bits import bf16_nearest
from pallas_kernels.kv_bitmask.rotation import rotation

Blocks = Float[Array, "*heads 128 head_dim"]
"""Whole blocks: positions and channels last."""

Rounding = Callable[[Blocks, Blocks], tuple[Blocks, Blocks]]
"""Keys and values to what their codes would give back."""

GROUP = 64
"""Channels that share a scale and a zero point of 16 bits each: 4.5 bits a number."""

_MOST = 15
_LEAST = 1e-7


def token4(k: Blocks, v: Blocks) -> tuple[Blocks, Blocks]:
    """Four bits a channel, one scale and zero point for 64 channels of a position (4.5 bits)."""
    return _by_group(k), _by_group(v)


def rotation4(k: Blocks, v: Blocks) -> tuple[Blocks, Blocks]:
    """The same after a sign-randomised Hadamard rotation of keys and values (4.5 bits)."""
    turn = jnp.asarray(rotation(k.shape[-1]))

    def rounded(x: Blocks) -> Blocks:
        return _turned(_by_group(_turned(x, turn)), turn.T)

    return rounded(k), rounded(v)


def channel4(k: Blocks, v: Blocks) -> tuple[Blocks, Blocks]:
    """Keys in four bits with a scale and zero point for a channel of a block (4.25 bits), values as ``token4``."""
    return _codes(k, -2), _by_group(v)


BASELINES: dict[str, Rounding] = {"token4": token4, "rotation4": rotation4, "channel4": channel4}


def _turned(x: Blocks, turn: Array) -> Blocks:
    return jnp.einsum("...d,de->...e", x, turn, precision="highest")


def _by_group(x: Blocks) -> Blocks:
    group = math.gcd(GROUP, x.shape[-1])
    parts = x.reshape(*x.shape[:-1], x.shape[-1] // group, group)
    return _codes(parts, -1).reshape(x.shape)


def _codes(x: Array, axis: int) -> Array:
    least = bf16_nearest(x.min(axis, keepdims=True))
    scale = bf16_nearest(jnp.maximum((x.max(axis, keepdims=True) - least) / _MOST, _LEAST))
    return jnp.clip(jnp.floor((x - least) / scale + 0.5), 0, _MOST) * scale + least
