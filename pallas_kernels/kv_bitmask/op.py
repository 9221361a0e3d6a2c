"""kv_bitmask: contract of the bitmask formats, from keys and values of a block to its words and back.

The rounding, for a block of 128 positions of one key/value head. Words are laid out as ``kv_layout`` says.

- A key channel has codes ``(k - minimum) / scale`` of ``base_bits`` bits. The channels whose rounding would disturb the
  scores most, ``energy * range**2``, get two bits more: a bitmask marks them, and the upper bits of all marked channels
  lie together, in lanes. There are always equally many, so that a block has one size. Codes span a part of the range
  (``rounding.SHARE_OF_RANGE``); scale and minimum are bf16 numbers, and codes are made from them as they are.
- A value vector is rotated, and its channels are ``scale * (code - 7.5)`` with codes of four bits, the scale an eighth
  of the largest channel.

A score is ``sum_d (q_d scale_d) (low + 2^base_bits high)_d + sum_d q_d minimum_d``, and a weighted sum of values
``sum_t (p_t scale_t) code_t - 7.5 sum_t p_t scale_t``: an implementation folds scales into queries and weights and
multiplies codes, whole numbers that bf16 holds exactly.

Source: keys by channel and values by position, KIVI, arXiv 2402.02750; more bits for some channels in a plane of their
own, Kitty, arXiv 2511.18643; the choice of channels by what an error does to the scores, and the mask, are ours.
"""

from typing import Literal

import jax
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.errors import require
from pallas_kernels.kv_bitmask import reference, xla
from pallas_kernels.kv_layout import BITMASK_HEAD_DIMS, BLOCK, BitmaskLayout

Implementation = Literal["reference", "xla"]


def quantize(
    k: Float[Array, "*blocks 128 head_dim"],
    v: Float[Array, "*blocks 128 head_dim"],
    energy: Float[Array, "*#blocks head_dim"],
    counted: Bool[Array, "*#blocks 128"],
    *,
    base_bits: int,
    implementation: Implementation,
) -> Int32[Array, "*blocks words"]:
    """The words of whole blocks.

    Args:
        k: keys after rotary embedding.
        v: values, not rotated.
        energy: mean square of the queries that meet a channel, E[q_d^2]; any common factor does the same.
        counted: positions whose keys must fit the range; codes of others are cut to it and are not for use.
        base_bits: 4 or 2.
        implementation: which code runs.

    Raises:
        ContractError: shapes disagree, or no layout takes them.
    """
    layout = layout_of(k.shape[-1], base_bits)
    require(k.shape == v.shape and k.shape[-2] == BLOCK, f"k {k.shape} and v {v.shape} must be blocks of {BLOCK}")
    run = {"reference": reference.quantize, "xla": xla.quantize}[implementation]
    with jax.named_scope("kv_bitmask_quantize"):
        return run(k, v, energy, counted, layout)


def dequantize(
    words: Int32[Array, "*blocks words"], *, head_dim: int, base_bits: int, implementation: Implementation
) -> tuple[Float[Array, "*blocks 128 head_dim"], Float[Array, "*blocks 128 head_dim"]]:
    """Keys and *rotated* values of blocks, float32. The rotation is undone once on a sum, never on its terms.

    Raises:
        ContractError: no layout takes these words.
    """
    layout = layout_of(head_dim, base_bits)
    require(words.shape[-1] == layout.words, f"words {words.shape} are no blocks of {layout.words} words")
    run = {"reference": reference.dequantize, "xla": xla.dequantize}[implementation]
    with jax.named_scope("kv_bitmask_dequantize"):
        return run(words, layout)


def layout_of(head_dim: int, base_bits: int) -> BitmaskLayout:
    """The layout of a format.

    Raises:
        ContractError: the head dim or the number of bits is none that the formats take.
    """
    require(
        head_dim in BITMASK_HEAD_DIMS, f"head_dim {head_dim} is none that bitmask formats take: {BITMASK_HEAD_DIMS}"
    )
    require(base_bits in (2, 4), f"base_bits {base_bits} is neither 2 nor 4")
    return BitmaskLayout(head_dim, base_bits)
