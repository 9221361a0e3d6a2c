"""kv_int8: keys and values as codes of eight bits, one scale a position and head.

Owns the rounding and the words; ``kv_layout`` has their places. A vector's codes are ``x / scale`` in -127..127, with
the bf16 number nearest to ``max |x| / 127`` as scale. Source: per-token, per-head KV quantisation as servers commonly
do it.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.bits import bf16_nearest, pack, pair, unpair
from pallas_kernels.kv_layout import int8_page_size

MOST = 127
_LEAST_SCALE = 1e-30


def quantize(x: Float[Array, "*n head_dim"]) -> tuple[Int32[Array, "*n words"], Float[Array, "*n"]]:
    """The code words and the scales of vectors, four channels a word."""
    wide = x.astype(jnp.float32)
    scale = scale_of(jnp.max(jnp.abs(wide), axis=-1))
    by_byte = jnp.swapaxes(codes_of(wide, scale[..., None]).reshape(*wide.shape[:-1], 4, -1), -1, -2)
    return pack(by_byte, 8), scale


def scale_of(largest: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """The scale of vectors whose largest channel has that absolute value."""
    return bf16_nearest(jnp.maximum(largest / MOST, _LEAST_SCALE))


def codes_of(x: Float[Array, "*n"], scale: Float[Array, "*#n"]) -> Int32[Array, "*n"]:
    """The codes of channels."""
    return jnp.clip(jnp.floor(x / scale + 0.5), -MOST, MOST).astype(jnp.int32)


def scale_words(k_scale: Float[Array, "*n"], v_scale: Float[Array, "*n"]) -> Int32[Array, "*n"]:
    """The scale words of positions."""
    return pair(k_scale, v_scale)


def dequantize(words: Int32[Array, "*n page_words"], head_dim: int) -> Float[Array, "*n 2 page_size head_dim"]:
    """The keys and values of whole pages, float32."""
    page_size, before = int8_page_size(words.shape[-1], head_dim), words.shape[:-1]
    codes = words[..., : page_size * (head_dim // 2)].reshape(*before, 2, page_size, 1, head_dim // 4)
    up = jnp.arange(24, -8, -8, dtype=jnp.int32)[:, None]  # the byte to the top, then down with its sign
    codes = jax.lax.shift_right_arithmetic(codes << up, jnp.full((1,) * codes.ndim, 24, jnp.int32))
    scale = jnp.stack(unpair(words[..., page_size * (head_dim // 2) :]), axis=-2)
    return codes.reshape(*before, 2, page_size, head_dim).astype(jnp.float32) * scale[..., None]
