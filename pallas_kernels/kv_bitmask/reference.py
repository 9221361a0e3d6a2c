"""kv_bitmask: the plain meaning, each number put to and taken from the place that ``kv_layout`` gives it."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.bits import as_words, pair, unpair
from pallas_kernels.kv_bitmask.rounding import MIDDLE, round_keys, round_values
from pallas_kernels.kv_layout import BLOCK, HIGH_BITS, VALUE_BITS, BitmaskLayout


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
    words = jnp.zeros((*k.shape[:-2], layout.words), jnp.uint32)

    def put(words: Array, place: tuple[np.ndarray, np.ndarray], codes: Array) -> Array:
        index, shift = place
        return words.at[..., index].add(codes.astype(jnp.uint32) << jnp.asarray(shift, jnp.uint32))

    words = put(words, _low_place(layout), keys.codes & ((1 << layout.base_bits) - 1))
    upper = jnp.take_along_axis(keys.codes >> layout.base_bits, keys.channels[..., None, :], axis=-1)
    words = put(words, _high_place(layout), upper)
    words = put(words, _value_place(layout), values.codes)
    words = put(words, _mask_place(layout), keys.marked)
    _, _, _, affine, value_scale, mask = layout.starts
    words = as_words(words).at[..., affine:value_scale].set(pair(keys.scale, keys.least))
    return words.at[..., value_scale:mask].set(pair(*jnp.split(values.scale, 2, axis=-1)))


def dequantize(
    words: Int32[Array, "*blocks words"], layout: BitmaskLayout
) -> tuple[Float[Array, "*blocks 128 head_dim"], Float[Array, "*blocks 128 head_dim"]]:
    """See ``op.dequantize``."""

    def take(place: tuple[np.ndarray, np.ndarray], width: int) -> Array:
        index, shift = place
        bits = jax.lax.bitcast_convert_type(words[..., index], jnp.uint32) >> jnp.asarray(shift, jnp.uint32)
        return (bits & jnp.uint32((1 << width) - 1)).astype(jnp.int32)

    _, _, _, affine, value_scale, mask = layout.starts
    marked = take(_mask_place(layout), 1)
    lane = jnp.maximum(jnp.cumsum(marked, axis=-1) - 1, 0)
    upper = jnp.take_along_axis(take(_high_place(layout), HIGH_BITS), lane[..., None, :], axis=-1, mode="clip")
    codes = take(_low_place(layout), layout.base_bits) + ((upper * marked[..., None, :]) << layout.base_bits)
    scale, least = unpair(words[..., affine:value_scale])
    keys = codes.astype(jnp.float32) * scale[..., None, :] + least[..., None, :]
    value_codes = take(_value_place(layout), VALUE_BITS).astype(jnp.float32)
    scales = jnp.concatenate(unpair(words[..., value_scale:mask]), axis=-1)
    return keys, (value_codes - MIDDLE) * scales[..., None]


def _low_place(layout: BitmaskLayout) -> tuple[np.ndarray, np.ndarray]:
    """Word and shift of the low code of [position, channel]."""
    t, d = np.ogrid[:BLOCK, : layout.head_dim]
    part, channel = np.divmod(d, layout.head_dim // layout.parts)
    return layout.starts[0] + channel * 32 + t % 32, layout.base_bits * (4 * part + t // 32)


def _high_place(layout: BitmaskLayout) -> tuple[np.ndarray, np.ndarray]:
    """Word and shift of the upper bits of [position, lane]."""
    t, lane = np.ogrid[:BLOCK, : layout.lanes]
    return layout.starts[1] + lane * 8 + t // 16, HIGH_BITS * (t % 16 + 0 * lane)


def _value_place(layout: BitmaskLayout) -> tuple[np.ndarray, np.ndarray]:
    """Word and shift of the code of [position, rotated channel]."""
    t, d = np.ogrid[:BLOCK, : layout.head_dim]
    half, channel = np.divmod(d, layout.head_dim // 2)
    return layout.starts[2] + t % 32 * (layout.head_dim // 2) + channel, VALUE_BITS * (4 * half + t // 32)


def _mask_place(layout: BitmaskLayout) -> tuple[np.ndarray, np.ndarray]:
    """Word and shift of the mark of [channel]."""
    d = np.arange(layout.head_dim)
    return layout.starts[5] + d // 32, d % 32
