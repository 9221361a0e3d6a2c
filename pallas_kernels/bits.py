"""Bits: bf16 numbers and small codes inside int32 words.

Owns the packing arithmetic that every format shares. Two bf16 numbers share a word as their bit patterns.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float, Int32, UInt16, UInt32

UPPER = 0xFFFF0000


def patterns(x: Float[Array, "*n"]) -> UInt32[Array, "*n"]:
    """The bits of float32 numbers."""
    return jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)


def floats(bits: UInt32[Array, "*n"]) -> Float[Array, "*n"]:
    """The float32 numbers of bits."""
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def bf16_nearest(x: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """The bf16 number next to each finite number, ties to even, as float32.

    By bits, since a compiler may drop a conversion to bf16 and back.
    """
    bits = patterns(x)
    return floats((bits + jnp.uint32(0x7FFF) + ((bits >> 16) & jnp.uint32(1))) & jnp.uint32(UPPER))


def bf16_bits(x: Float[Array, "*n"]) -> UInt16[Array, "*n"]:
    """The bits of numbers rounded to bf16."""
    return jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)


def bf16_numbers(bits: UInt16[Array, "*n"]) -> BFloat16[Array, "*n"]:
    """The bf16 numbers of bits."""
    return jax.lax.bitcast_convert_type(bits, jnp.bfloat16)


def pair(lower: Float[Array, "*n"], upper: Float[Array, "*n"]) -> Int32[Array, "*n"]:
    """Words of two numbers each, which must be bf16 numbers already."""
    return as_words((patterns(lower) >> 16) | (patterns(upper) & jnp.uint32(UPPER)))


def unpair(words: Int32[Array, "*n"]) -> tuple[Float[Array, "*n"], Float[Array, "*n"]]:
    """The lower and the upper number of each word, as float32."""
    bits = jax.lax.bitcast_convert_type(words, jnp.uint32)
    return floats(bits << 16), floats(bits & jnp.uint32(UPPER))


def pack(codes: Int32[Array, "*n codes"], width: int) -> Int32[Array, "*n"]:
    """Words of ``32 / width`` codes each, the first in the lowest bits; bits above ``width`` are dropped."""
    unsigned = jax.lax.bitcast_convert_type(codes, jnp.uint32) & jnp.uint32((1 << width) - 1)
    shifts = jnp.arange(codes.shape[-1], dtype=jnp.uint32) * jnp.uint32(width)
    return as_words(jnp.sum(unsigned << shifts, axis=-1, dtype=jnp.uint32))


def unpack(words: Int32[Array, "*n"], width: int) -> Int32[Array, "*n codes"]:
    """The unsigned codes of words, the lowest bits first."""
    bits = jax.lax.bitcast_convert_type(words, jnp.uint32)
    shifts = jnp.arange(32 // width, dtype=jnp.uint32) * jnp.uint32(width)
    return ((bits[..., None] >> shifts) & jnp.uint32((1 << width) - 1)).astype(jnp.int32)


def as_words(bits: UInt32[Array, "*n"]) -> Int32[Array, "*n"]:
    """The same bits as int32."""
    return jax.lax.bitcast_convert_type(bits, jnp.int32)
