"""page_write: named shapes from real models, shared by tests and benchmarks."""

from dataclasses import dataclass

from pallas_kernels import model_shapes as models
from pallas_kernels.model_shapes import HeadShape


@dataclass(frozen=True, slots=True)
class WriteCase:
    """One write of ``tokens`` new positions of all layers; ``small`` marks what a CPU test may run."""

    name: str
    heads: HeadShape
    layers: int
    num_pages: int
    page_size: int
    tokens: int
    small: bool = True


CASES = (
    WriteCase("smollm2-135m-decode", models.SMOLLM2_135M, 30, 9, 16, 8),
    WriteCase("smollm2-135m-prefill", models.SMOLLM2_135M, 30, 9, 16, 128),
    WriteCase("gemma3-270m-decode", models.GEMMA3_270M, 18, 6, 32, 3),
    WriteCase("d80-prefill", models.D80, 4, 7, 16, 33),
    WriteCase("llama-3.1-8b-prefill", models.LLAMA31_8B, 32, 4_096, 64, 2_048, small=False),
    WriteCase("llama-3.1-8b-decode", models.LLAMA31_8B, 32, 4_096, 64, 64, small=False),
)
