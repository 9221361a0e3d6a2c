"""linear: contract and choice of implementation for products with float and int8 weights."""

from typing import Literal, NamedTuple

import jax
from jaxtyping import Array, Float, Int8

from pallas_kernels.errors import require
from pallas_kernels.linear import reference, xla

Implementation = Literal["reference", "xla"]


class Int8Weight(NamedTuple):
    """An int8 weight: ``value[k, n] = codes[k, n] * scale[n]``."""

    codes: Int8[Array, "k n"]
    scale: Float[Array, " n"]


Weight = Float[Array, "k n"] | Int8Weight


def linear(x: Float[Array, "rows k"], weight: Weight, *, implementation: Implementation) -> Float[Array, "rows n"]:
    """``x @ weight`` with float32 sums.

    Args:
        x: activations, float32.
        weight: a float32 or bf16 matrix, or int8 codes with one scale an output channel.
        implementation: which code runs; there is no fall-back.

    Returns:
        float32. With int8 codes the activations are rounded: a row to two int8 planes (relative step ``1 / 32258`` of
        its largest element), or, where many rows make bf16 products the faster ones, an element to bf16.

    Raises:
        ContractError: shapes or dtypes disagree.
    """
    k = weight.codes.shape[0] if isinstance(weight, Int8Weight) else weight.shape[0]
    require(x.ndim == 2 and x.shape[1] == k, f"x {x.shape} must be [rows, {k}]")
    run = {"reference": reference.linear, "xla": xla.linear}[implementation]
    with jax.named_scope("linear"):
        return run(x, weight)
