"""Rounding: the codes, scales and marks of a block, before they are packed; the arithmetic of the bitmask formats.

Owns every choice that decides how well a block is held. Shared by the implementations that pack through XLA.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.bits import bf16_nearest
from pallas_kernels.kv_bitmask.rotation import rotation
from pallas_kernels.kv_layout import HIGH_BITS, BitmaskLayout

SHARE_OF_RANGE = {2: 0.75, 4: 0.98, 6: 1.0}
"""Share of a key channel's range that its codes span, about the middle, by their bits: a few keys are cut, the others
lie closer to a code."""

MIDDLE = 7.5
"""Of the codes of a value."""

_VALUE_SPAN = 8.0  # scales that a value vector's largest channel is long: half a code is cut

_LEAST_SCALE = 1e-30  # a channel may be constant


class KeyCodes(NamedTuple):
    """``channels`` are the marked ones, ascending; codes of the others are below ``2**base_bits``."""

    codes: Int32[Array, "*blocks 128 head_dim"]
    channels: Int32[Array, "*blocks lanes"]
    marked: Bool[Array, "*blocks head_dim"]
    scale: Float[Array, "*blocks head_dim"]
    least: Float[Array, "*blocks head_dim"]


class ValueCodes(NamedTuple):
    """Codes 0..15 of rotated values, and a scale a position."""

    codes: Int32[Array, "*blocks 128 head_dim"]
    scale: Float[Array, "*blocks 128"]


def round_keys(
    k: Float[Array, "*blocks 128 head_dim"],
    energy: Float[Array, "*#blocks head_dim"],
    counted: Bool[Array, "*#blocks 128"],
    layout: BitmaskLayout,
) -> KeyCodes:
    """See ``op.quantize``."""
    counts = counted[..., None]
    lowest = jnp.min(jnp.where(counts, k, jnp.inf), axis=-2)
    highest = jnp.max(jnp.where(counts, k, -jnp.inf), axis=-2)
    disturbance = energy * (highest - lowest) ** 2
    channels = jnp.sort(jax.lax.top_k(disturbance, layout.lanes)[1], axis=-1)
    marked = jnp.any(channels[..., None] == jnp.arange(layout.head_dim), axis=-2)
    bits = jnp.where(marked, layout.base_bits + HIGH_BITS, layout.base_bits)
    share = jnp.where(marked, SHARE_OF_RANGE[layout.base_bits + HIGH_BITS], SHARE_OF_RANGE[layout.base_bits])
    most = (2**bits - 1).astype(jnp.float32)
    middle, half = (highest + lowest) * 0.5, (highest - lowest) * 0.5 * share
    least = bf16_nearest(middle - half)
    scale = bf16_nearest(jnp.maximum((middle + half - least) / most, _LEAST_SCALE))
    codes = jnp.floor((k - least[..., None, :]) / scale[..., None, :] + 0.5)
    codes = jnp.clip(codes, 0.0, most[..., None, :]).astype(jnp.int32)
    return KeyCodes(codes, channels, marked, scale, least)


def round_values(v: Float[Array, "*blocks 128 head_dim"]) -> ValueCodes:
    """See ``op.quantize``."""
    turned = jnp.einsum("...td,de->...te", v, jnp.asarray(rotation(v.shape[-1])), precision="highest")
    scale = bf16_nearest(jnp.maximum(jnp.max(jnp.abs(turned), axis=-1) / _VALUE_SPAN, _LEAST_SCALE))
    codes = jnp.floor(turned / scale[..., None] + (MIDDLE + 0.5))
    return ValueCodes(jnp.clip(codes, 0.0, 2 * MIDDLE).astype(jnp.int32), scale)
