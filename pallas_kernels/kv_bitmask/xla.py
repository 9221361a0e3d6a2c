"""kv_bitmask through XLA: whole arrays of codes, packed by shifts and sums."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.bits import pack, pair, unpack, unpair
from pallas_kernels.kv_bitmask.rounding import MIDDLE, round_keys, round_values
from pallas_kernels.kv_layout import BLOCK, HIGH_BITS, MASK_WORDS, VALUE_BITS, BitmaskLayout

_QUARTERS = 4  # of a block, side by side in a word


def quantize(
    k: Float[Array, "*blocks 128 head_dim"],
    v: Float[Array, "*blocks 128 head_dim"],
    energy: Float[Array, "*#blocks head_dim"],
    counted: Bool[Array, "*#blocks 128"],
    layout: BitmaskLayout,
) -> Int32[Array, "*blocks words"]:
    """See ``op.quantize``."""
    keys = round_keys(k.astype(jnp.float32), energy, counted, layout)
    values = round_values(v.astype(jnp.float32))
    high = jnp.take_along_axis(keys.codes >> layout.base_bits, keys.channels[..., None, :], axis=-1)
    high = jnp.swapaxes(high, -1, -2)  # lane, position
    bits = jnp.pad(keys.marked, [(0, 0)] * (keys.marked.ndim - 1) + [(0, 32 * MASK_WORDS - layout.head_dim)])
    sections = (
        _key_words(keys.codes & ((1 << layout.base_bits) - 1), layout),
        pack(high.reshape(*high.shape[:-1], 8, BLOCK // 8), HIGH_BITS),
        _value_words(values.codes),
        pair(keys.scale, keys.least),
        pair(values.scale[..., : BLOCK // 2], values.scale[..., BLOCK // 2 :]),
        pack(bits.reshape(*bits.shape[:-1], MASK_WORDS, 32).astype(jnp.int32), 1),
    )
    return jnp.concatenate([part.reshape(*k.shape[:-2], -1) for part in sections], axis=-1)


def _key_words(low: Int32[Array, "*blocks 128 head_dim"], layout: BitmaskLayout) -> Array:
    by_part = low.reshape(*low.shape[:-2], _QUARTERS, 32, layout.parts, layout.head_dim // layout.parts)
    ordered = jnp.moveaxis(by_part, (-1, -3, -2, -4), (-4, -3, -2, -1))  # channel, position, part, quarter
    return pack(ordered.reshape(*ordered.shape[:-2], layout.parts * _QUARTERS), layout.base_bits)


def _value_words(codes: Int32[Array, "*blocks 128 head_dim"]) -> Array:
    halves = codes.reshape(*codes.shape[:-2], _QUARTERS, 32, 2, codes.shape[-1] // 2)
    ordered = jnp.moveaxis(halves, (-3, -1, -2, -4), (-4, -3, -2, -1))  # position, channel, half, quarter
    return pack(ordered.reshape(*ordered.shape[:-2], 2 * _QUARTERS), VALUE_BITS)


def dequantize(
    words: Int32[Array, "*blocks words"], layout: BitmaskLayout
) -> tuple[Float[Array, "*blocks 128 head_dim"], Float[Array, "*blocks 128 head_dim"]]:
    """See ``op.dequantize``."""
    low, high, values, affine, value_scale, mask = _sections(words, layout)
    codes = unpack(low, layout.base_bits).reshape(*low.shape, layout.parts, _QUARTERS)
    codes = jnp.moveaxis(codes, (-1, -3, -2, -4), (-4, -3, -2, -1))  # quarter, position, part, channel
    codes = codes.reshape(*words.shape[:-1], BLOCK, layout.head_dim)
    marked = unpack(mask, 1).reshape(*mask.shape[:-1], -1)[..., : layout.head_dim]
    lane = jnp.maximum(jnp.cumsum(marked, axis=-1) - 1, 0)
    upper = unpack(high, HIGH_BITS).reshape(*high.shape[:-1], BLOCK)  # lane, position
    upper = jnp.swapaxes(jnp.take_along_axis(upper, lane[..., None], axis=-2, mode="clip"), -1, -2)
    scale, least = unpair(affine)
    codes += (upper * marked[..., None, :]) << layout.base_bits
    keys = codes.astype(jnp.float32) * scale[..., None, :] + least[..., None, :]
    nibbles = unpack(values, VALUE_BITS).reshape(*values.shape, 2, _QUARTERS)
    nibbles = jnp.moveaxis(nibbles, (-1, -4, -2, -3), (-4, -3, -2, -1))  # quarter, position, half, channel
    nibbles = nibbles.reshape(*words.shape[:-1], BLOCK, layout.head_dim).astype(jnp.float32)
    both = jnp.concatenate(unpair(value_scale), axis=-1)
    return keys, (nibbles - MIDDLE) * both[..., None]


def _sections(words: Int32[Array, "*blocks words"], layout: BitmaskLayout) -> tuple[Array, ...]:
    shapes = (
        (layout.head_dim // layout.parts, 32),
        (layout.lanes, 8),
        (32, layout.head_dim // 2),
        (layout.head_dim,),
        (BLOCK // 2,),
        (MASK_WORDS,),
    )
    ends = (*layout.starts[1:], layout.words)
    return tuple(
        words[..., start:end].reshape(*words.shape[:-1], *shape)
        for start, end, shape in zip(layout.starts, ends, shapes, strict=True)
    )
