"""What a plan chooses between: formats of keys and values, forms of weights, code paths of ops.

Owns the two enumerations that appear in every program key and the names of the code paths. Never imports jax.
"""

from enum import StrEnum
from typing import Literal

Implementation = Literal["reference", "xla", "native", "pallas"]
"""Code path of the ops; a plan takes one of the last three."""


class KvFormat(StrEnum):
    """How the page pool holds keys and values."""

    FLOAT32 = "float32"
    BF16 = "bf16"
    INT8 = "int8"
    BMQ4 = "bmq4"
    BMQ2 = "bmq2"


class WeightForm(StrEnum):
    """How linear layers hold their weights."""

    FLOAT32 = "float32"
    BF16 = "bf16"
    INT8 = "int8"
