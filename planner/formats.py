"""Number formats that a plan chooses between: how keys and values, and how weights, are held.

Owns the two enumerations that appear in every program key. Reads nothing; never imports jax.
"""

from enum import StrEnum


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
