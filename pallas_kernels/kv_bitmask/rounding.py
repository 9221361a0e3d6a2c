"""Rounding: the codes, scales and marks of a block, before they are packed; the arithmetic of the bitmask formats.

Owns every choice that decides how well a block is held. Shared by the implementations that pack through XLA.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.bits import bf16_above, bf16_below
from pallas_kernels.kv_bitmask.rotation import rotation
from pallas_kernels.kv_layout import HIGH_BITS, BitmaskLayout

CLIPS = (1.0, 0.9, 0.8, 0.7, 0.6)
"""Shares of a value vector's largest channel that its range may end at; the one with the least error is taken."""

MIDDLE = 7.5
"""Of the codes of a value."""

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
    most = (1 << layout.base_bits) - 1
    most_wide = (1 << layout.base_bits + HIGH_BITS) - 1
    counts = counted[..., None]
    least = bf16_below(jnp.min(jnp.where(counts, k, jnp.inf), axis=-2))
    extent = jnp.max(jnp.where(counts, k, -jnp.inf), axis=-2) - least
    narrow = bf16_above(jnp.maximum(extent / most, _LEAST_SCALE))
    wide = bf16_above(jnp.maximum(extent / most_wide, _LEAST_SCALE))
    from_least = k - least[..., None, :]
    coarse = jnp.clip(jnp.floor(from_least / narrow[..., None, :] + 0.5), 0, most)
    fine = jnp.clip(jnp.floor(from_least / wide[..., None, :] + 0.5), 0, most_wide)
    error = jnp.where(counts, from_least - coarse * narrow[..., None, :], 0.0)
    disturbance = energy * jnp.sum(error * error, axis=-2)
    channels = jnp.sort(jax.lax.top_k(disturbance, layout.lanes)[1], axis=-1)
    marked = jnp.any(channels[..., None] == jnp.arange(layout.head_dim), axis=-2)
    codes = jnp.where(marked[..., None, :], fine, coarse).astype(jnp.int32)
    return KeyCodes(codes, channels, marked, jnp.where(marked, wide, narrow), least)


def round_values(v: Float[Array, "*blocks 128 head_dim"]) -> ValueCodes:
    """See ``op.quantize``."""
    turned = jnp.einsum("...td,de->...te", v, jnp.asarray(rotation(v.shape[-1])), precision="highest")
    largest = jnp.max(jnp.abs(turned), axis=-1)

    def rounded(clip: float) -> tuple[Array, Array, Array]:
        scale = bf16_above(jnp.maximum(largest * (clip / MIDDLE), _LEAST_SCALE))
        codes = jnp.clip(jnp.floor(turned / scale[..., None] + (MIDDLE + 0.5)), 0, 2 * MIDDLE)
        error = turned - (codes - MIDDLE) * scale[..., None]
        return codes, scale, jnp.sum(error * error, axis=-1)

    codes, scale, error = rounded(CLIPS[0])
    for clip in CLIPS[1:]:
        other_codes, other_scale, other_error = rounded(clip)
        better = other_error < error
        codes = jnp.where(better[..., None], other_codes, codes)
        scale, error = jnp.where(better, other_scale, scale), jnp.where(better, other_error, error)
    return ValueCodes(codes.astype(jnp.int32), scale)
