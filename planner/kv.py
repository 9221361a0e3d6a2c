"""What a format of keys and values takes: bytes of pages and slots, and which models it can hold. Never imports jax.

Owns the formulas, which tests check against the arrays. Bytes a token of one layer and key/value head, D the head dim:
float32 ``8 D``, bf16 ``4 D``, int8 ``2 D + 4`` (codes, and a word with two bf16 scales). A block of 128 tokens takes
``4 (35 D + 72)`` bytes in bmq4 and ``4 (29 D + 72)`` in bmq2.
"""

import math

from pallas_kernels.kv_layout import (
    BASE_BITS,
    BITMASK_HEAD_DIMS,
    BLOCK,
    SINKS,
    BitmaskLayout,
    bitmask_page_bytes,
    int8_page_bytes,
    recent_bytes,
)
from planner.architecture import ModelArchitecture
from planner.formats import KvFormat

_ELEMENT_BYTES = {KvFormat.FLOAT32: 4, KvFormat.BF16: 2}


def page_bytes(kv_format: KvFormat, architecture: ModelArchitecture, page_size: int) -> int:
    """Bytes of one page over all layers and key/value heads."""
    head_dim = architecture.head_dim
    if kv_format in BASE_BITS:
        one = bitmask_page_bytes(page_size, head_dim, BASE_BITS[kv_format])
    elif kv_format is KvFormat.INT8:
        one = int8_page_bytes(page_size, head_dim)
    else:
        one = 2 * page_size * head_dim * _ELEMENT_BYTES[kv_format]
    return architecture.layers * architecture.kv_heads * one


def slot_bytes(kv_format: KvFormat, architecture: ModelArchitecture) -> int:
    """Bytes that every slot keeps beside its pages: in bitmask formats the first positions and a block, in bf16."""
    if kv_format not in BASE_BITS:
        return 0
    return architecture.layers * architecture.kv_heads * recent_bytes(architecture.head_dim)


def lead_of(kv_format: KvFormat) -> int:
    """First positions of a sequence that its slot keeps beside pages, and needs computed even if pages are shared."""
    return SINKS if kv_format in BASE_BITS else 0


def energy_shape(architecture: ModelArchitecture) -> tuple[int, int, int]:
    """Shape of the query energies, float32."""
    return architecture.layers, architecture.kv_heads, architecture.head_dim


def energy_bytes(kv_format: KvFormat, architecture: ModelArchitecture) -> int:
    """Bytes of the query energies beside the weights, which bitmask formats need."""
    return 4 * math.prod(energy_shape(architecture)) if kv_format in BASE_BITS else 0


def bits_per_element(kv_format: KvFormat, head_dim: int) -> float:
    """Bits of a number in a full page, scales and masks counted."""
    if kv_format in BASE_BITS:
        return BitmaskLayout(head_dim, BASE_BITS[kv_format]).bits_per_element
    if kv_format is KvFormat.INT8:
        return 8 * int8_page_bytes(1, head_dim) / (2 * head_dim)
    return 8.0 * _ELEMENT_BYTES[kv_format]


def fault(kv_format: KvFormat, architecture: ModelArchitecture, page_size: int) -> str:
    """Why a model cannot be held in a format, with the remedy; empty if it can."""
    head_dim = architecture.head_dim
    if kv_format in BASE_BITS and page_size % BLOCK:
        return f"page_size {page_size} must be a multiple of {BLOCK} for kv_format {kv_format}"
    if kv_format in BASE_BITS and head_dim not in BITMASK_HEAD_DIMS:
        return f"kv_format {kv_format} takes the head dims {BITMASK_HEAD_DIMS}, this model has {head_dim}: use int8"
    if kv_format is KvFormat.INT8 and head_dim % 4:
        return f"kv_format int8 takes head dims that 4 divides, this model has {head_dim}: use bf16 or float32"
    return ""
