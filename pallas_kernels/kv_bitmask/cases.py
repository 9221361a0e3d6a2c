"""kv_bitmask: named shapes, shared by tests and benchmarks."""

from dataclasses import dataclass

from pallas_kernels.kv_layout import BITMASK_HEAD_DIMS


@dataclass(frozen=True, slots=True)
class BlockCase:
    """``blocks`` blocks of 128 positions in the format with ``base_bits`` bits of every key channel."""

    name: str
    head_dim: int
    base_bits: int
    blocks: int


CASES = tuple(
    BlockCase(f"bmq{base_bits}-d{head_dim}", head_dim, base_bits, 3)
    for head_dim in BITMASK_HEAD_DIMS
    for base_bits in (4, 2)
)
