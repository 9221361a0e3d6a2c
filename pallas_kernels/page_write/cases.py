"""page_write: named shapes from real models, shared by tests and benchmarks."""

from dataclasses import dataclass

from pallas_kernels import model_shapes as models
from pallas_kernels.model_shapes import HeadShape


@dataclass(frozen=True, slots=True)
class WriteCase:
    """One write of ``tokens`` new positions of all layers; ``small`` marks what a CPU test may run.

    ``kv_format`` is the pool's, bf16 standing for any plain one; ``rows`` share the tokens (0: each is its own row).
    """

    name: str
    heads: HeadShape
    layers: int
    num_pages: int
    page_size: int
    tokens: int
    small: bool = True
    kv_format: str = "bf16"
    rows: int = 0


CASES = (
    WriteCase("smollm2-135m-decode", models.SMOLLM2_135M, 30, 9, 16, 8),
    WriteCase("smollm2-135m-prefill", models.SMOLLM2_135M, 30, 9, 16, 128),
    WriteCase("gemma3-270m-decode", models.GEMMA3_270M, 18, 6, 32, 3),
    WriteCase("d80-prefill", models.D80, 4, 7, 16, 33),
    WriteCase("llama-3.1-8b-prefill", models.LLAMA31_8B, 32, 4_096, 64, 2_048, small=False),
    WriteCase("llama-3.1-8b-decode", models.LLAMA31_8B, 32, 4_096, 64, 64, small=False),
)

_HEADS = (models.TINY, models.SMOLLM2_135M, models.D80, models.D96, models.LLAMA31_8B, models.GEMMA3_270M)
_FORMATS = {"bf16": 64, "int8": 64, "bmq4": 128, "bmq2": 256}

GPU_CASES = (
    *(
        WriteCase(f"{heads.model}-{kv_format}-decode", heads, 4, 256, page, 64, small=False, kv_format=kv_format)
        for kv_format, page in _FORMATS.items()
        for heads in _HEADS
    ),
    *(
        WriteCase(
            f"llama-3.1-8b-{kv_format}-prefill",
            models.LLAMA31_8B,
            32,
            1_024,
            page,
            2_048,
            small=False,
            kv_format=kv_format,
            rows=8,
        )
        for kv_format, page in _FORMATS.items()
    ),
)
"""Every format at every head dim for a decode step, and chunks of prompts into pools that take 64-bit addresses."""
