"""Rounding: the codes, scales and marks of a block, before they are packed; the arithmetic of the bitmask formats.

Owns every choice that decides how well a block is held. Shared by all implementations: kernels for a GPU take from here
what is computed number by number.
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


class KeyRange(NamedTuple):
    """Where a channel's codes lie: ``least`` is the key of code 0, ``scale`` the step, ``most`` the largest code."""

    least: Float[Array, "*channels"]
    scale: Float[Array, "*channels"]
    most: Float[Array, "*channels"]


def disturbance(
    lowest: Float[Array, "*channels"], highest: Float[Array, "*channels"], energy: Float[Array, "*#channels"]
) -> Float[Array, "*channels"]:
    """How much rounding a channel would disturb the scores; by this, channels get their bits."""
    extent = highest - lowest
    return energy * (extent * extent)


def key_range(
    lowest: Float[Array, "*channels"],
    highest: Float[Array, "*channels"],
    marked: Bool[Array, "*channels"],
    layout: BitmaskLayout,
) -> KeyRange:
    """The codes' range of channels whose keys lie between ``lowest`` and ``highest``."""
    wide = layout.base_bits + HIGH_BITS
    share = jnp.where(marked, SHARE_OF_RANGE[wide], SHARE_OF_RANGE[layout.base_bits])
    most = jnp.where(marked, float(2**wide - 1), float(2**layout.base_bits - 1))
    middle, half = (highest + lowest) * 0.5, (highest - lowest) * 0.5 * share
    least = bf16_nearest(middle - half)
    return KeyRange(least, bf16_nearest(jnp.maximum((middle + half - least) / most, _LEAST_SCALE)), most)


def key_codes(k: Float[Array, "*n"], within: KeyRange) -> Int32[Array, "*n"]:
    """The codes of keys; ``within`` has a shape that goes with theirs."""
    return jnp.clip(jnp.floor((k - within.least) / within.scale + 0.5), 0.0, within.most).astype(jnp.int32)


def value_scale(largest: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """The scale of rotated vectors whose largest channel has that absolute value."""
    return bf16_nearest(jnp.maximum(largest / _VALUE_SPAN, _LEAST_SCALE))


def value_codes(turned: Float[Array, "*n"], scale: Float[Array, "*#n"]) -> Int32[Array, "*n"]:
    """The codes of channels of rotated vectors."""
    return jnp.clip(jnp.floor(turned / scale + (MIDDLE + 0.5)), 0.0, 2 * MIDDLE).astype(jnp.int32)


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
    channels = jnp.sort(jax.lax.top_k(disturbance(lowest, highest, energy), layout.lanes)[1], axis=-1)
    marked = jnp.any(channels[..., None] == jnp.arange(layout.head_dim), axis=-2)
    within = key_range(lowest, highest, marked, layout)
    codes = key_codes(k, KeyRange(*(part[..., None, :] for part in within)))
    return KeyCodes(codes, channels, marked, within.scale, within.least)


def round_values(v: Float[Array, "*blocks 128 head_dim"]) -> ValueCodes:
    """See ``op.quantize``."""
    turned = jnp.einsum("...td,dn->...tn", v, jnp.asarray(rotation(v.shape[-1])), precision="highest")
    scale = value_scale(jnp.max(jnp.abs(turned), axis=-1))
    return ValueCodes(value_codes(turned, scale[..., None]), scale)
