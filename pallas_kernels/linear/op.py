"""linear: contracts and choice of implementation for products with float and int8 weights, plain and gated."""

from typing import Literal, NamedTuple

import jax
from jaxtyping import Array, Float, Int8, Int32

from pallas_kernels.errors import require
from pallas_kernels.linear import native, reference, xla

Implementation = Literal["reference", "xla", "native"]
Products = Literal["planes", "blocks16", "blocks32", "bf16"]
Gate = Literal["silu", "gelu"]


class Int8Weight(NamedTuple):
    """One matrix of a stack of int8 weights: ``value[k, n] = codes[layer, k, n] * scale[layer, n]``.

    The stack stays whole, so that an implementation can read its layer in place.
    """

    codes: Int8[Array, "layers k n"]
    scale: Float[Array, "layers n"]
    layer: Int32[Array, ""]


Weight = Float[Array, "k n"] | Int8Weight


def linear(
    x: Float[Array, "rows k"], weight: Weight, *, products: Products = "planes", implementation: Implementation
) -> Float[Array, "rows n"]:
    """``x @ weight`` with float32 sums.

    Args:
        x: activations.
        weight: a float32 or bf16 matrix, or int8 codes with one scale an output channel.
        products: how finely activations are held where they meet int8 codes. ``planes``: a row as two int8 planes, an
            element off by at most ``1 / 64516`` of the row's largest; the faster form while reading the codes is the
            bound. For many rows, where the products are: ``bf16``, off by at most ``1 / 512`` of itself, in which codes
            are exact; and ``blocks16`` and ``blocks32``, int8 with a step for every 16 or 32 neighbours of a row, off
            by at most ``1 / 254`` of the largest of them. An implementation may hold them more finely. A row's result
            depends on this choice and not on how many rows there are.
        implementation: which code runs; there is no fall-back.

    Returns:
        float32.

    Raises:
        ContractError: shapes or dtypes disagree.
    """
    _require_agreement(x, weight)
    run = {"reference": reference.linear, "xla": xla.linear, "native": native.linear}[implementation]
    with jax.named_scope("linear"):
        return run(x, weight, products=products)


def gated_linear(
    x: Float[Array, "rows k"],
    weight: Weight,
    *,
    gate: Gate,
    products: Products = "planes",
    implementation: Implementation,
) -> Float[Array, "rows half"]:
    """``gate(y[:, :half]) * y[:, half:]`` of ``y = linear(x, weight)``, whose n columns are two halves.

    Args:
        x: activations.
        weight: as for ``linear``; n is even.
        gate: SiLU, or GELU by its tanh form. Source: GLU variants, arXiv 2002.05202.
        products: as for ``linear``.
        implementation: which code runs; there is no fall-back.

    Returns:
        float32.

    Raises:
        ContractError: shapes or dtypes disagree.
    """
    _require_agreement(x, weight)
    n = (weight.codes if isinstance(weight, Int8Weight) else weight).shape[-1]
    require(n % 2 == 0, f"a gated weight has two halves of columns; {n} columns are odd")
    run = {"reference": reference.gated_linear, "xla": xla.gated_linear, "native": native.gated_linear}[implementation]
    with jax.named_scope("gated_linear"):
        return run(x, weight, gate=gate, products=products)


def _require_agreement(x: Array, weight: Weight) -> None:
    if isinstance(weight, Int8Weight):
        layers, k, n = weight.codes.shape
        require(weight.codes.dtype == "int8", f"codes are {weight.codes.dtype}; they must be int8")
        require(weight.scale.shape == (layers, n), f"scale {weight.scale.shape} must be [{layers}, {n}]")
    else:
        k = weight.shape[0]
    require(x.ndim == 2 and x.shape[1] == k, f"x {x.shape} must be [rows, {k}]")
