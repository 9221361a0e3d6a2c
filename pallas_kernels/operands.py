"""Operands: what tensor products inside kernels take, small codes of int32 words among it, and the products.

Owns that arithmetic. A bf16 number of 128..255 has its whole part in its lowest seven bits: the bits ``0x4300 | code``
are ``128 + code``, so that an unsigned code becomes an operand without any conversion, which a GPU does slowly. What
the product is too large by, ``excess`` times the sum of the other operand, is subtracted once. float32 operands are for
interpreted tests and have no excess.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int32

from pallas_kernels.access import Access

_LEAST_CHANNELS = 16  # of an operand of the tensor cores
_ONE_AND_ONE = 0x43004300  # the number 128 in bf16, twice
_BYTE = 0x4B000080  # 2**23 + 128 in float32, whose numbers from 2**23 on have their whole part in their lowest 23 bits

CONSTANTS = (_ONE_AND_ONE, _BYTE)
"""What kernels load: one instruction then cuts a code out and puts it in, where two would be needed with numbers that
the compiler knows."""


@dataclass(frozen=True, slots=True)
class Unpack:
    """Codes of words as operands of ``dtype``; the constants are [1, 1]."""

    dtype: jnp.dtype
    ones: Array
    byte_base: Array

    @property
    def excess(self) -> float:
        """What operands are more than unsigned codes."""
        return 128.0 if self.dtype == jnp.bfloat16 else 0.0

    def one(self, words: Int32[Array, "*n"], width: int) -> Float[Array, "*n"]:
        """The unsigned codes in the lowest ``width`` bits, and ``excess``."""
        bits = words & ((1 << width) - 1)
        return bits.astype(self.dtype) if self.dtype != jnp.bfloat16 else _lower_bf16(bits | self.ones)

    def pair(self, words: Int32[Array, "*n"], shift: int, width: int) -> tuple[Float[Array, "*n"], Float[Array, "*n"]]:
        """``one`` from bit ``shift`` on and from bit ``shift + 16`` on."""
        if self.dtype != jnp.bfloat16:
            return self.one(words >> shift, width), self.one(words >> (shift + 16), width)
        mask = (1 << width) - 1
        bits = ((words >> shift) & (mask << 16 | mask)) | self.ones
        return _lower_bf16(bits), _lower_bf16(bits >> 16)

    def signed_byte(self, words: Int32[Array, "*n"], index: int) -> Float[Array, "*n"]:
        """Byte ``index`` of words, the lowest first, as a number of -128..127; no excess."""
        bits = ((words >> 8 * index) & 0xFF) ^ self.byte_base
        number = jax.lax.bitcast_convert_type(bits, jnp.float32) - (2.0**23 + 128)
        if self.dtype != jnp.bfloat16:
            return number.astype(self.dtype)
        return _lower_bf16(jax.lax.bitcast_convert_type(number, jnp.int32) >> 16)


def unpacker(constants_ref: jax.Ref, dtype: jnp.dtype, access: Access) -> Unpack:
    """What unpacks codes inside a kernel that has ``CONSTANTS`` in an argument."""
    # tiles and not scalars: past a tile that was loaded the compiler goes back to the load of the words that it meets,
    # and has the words themselves brought to where the tensor cores want their codes
    place = jnp.zeros((1, 1), jnp.int32)
    return Unpack(dtype, *(access.load(constants_ref, (place + index,)) for index in range(len(CONSTANTS))))


def rounded(x: Float[Array, "*n"], dtype: jnp.dtype) -> tuple[Float[Array, "*n"], Float[Array, "*n"]]:
    """Finite float32 numbers as operands, halves rounded away from zero, and the operands in float32.

    By bits, since a GPU converts to bf16 one number at a time at a fraction of the speed of its other arithmetic.
    """
    if dtype != jnp.bfloat16:
        return x.astype(dtype), x
    bits = jax.lax.bitcast_convert_type(x, jnp.int32) + 0x8000
    return _lower_bf16(bits >> 16), jax.lax.bitcast_convert_type(bits & ~0xFFFF, jnp.float32)


def _lower_bf16(bits: Int32[Array, "*n"]) -> Float[Array, "*n"]:
    """The lower halves of words as bf16 numbers."""
    return jax.lax.bitcast_convert_type(bits.astype(jnp.int16), jnp.bfloat16)


def product(a: Array, b: Array) -> Array:
    """The matrix product with float32 sums; float32 operands are not cut to TF32."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot(a, b, precision=precision, preferred_element_type=jnp.float32)


def sum_of(parts: Sequence[Array]) -> Array:
    """The sum of arrays."""
    return functools.reduce(jnp.add, parts)


def chunks(count: int, widest: int) -> tuple[int, ...]:
    """``count`` channels as powers of two from 16 to ``widest``, the largest first; the last may be too large."""
    found: list[int] = []
    while (left := count - sum(found)) > 0:
        power = pl.next_power_of_2(left)
        fits = power if power - left < max(_LEAST_CHANNELS, power // 4) else power // 2
        found.append(max(_LEAST_CHANNELS, min(widest, fits)))
    return tuple(found)
