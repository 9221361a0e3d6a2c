"""paged_decode: named shapes from real models, shared by tests and benchmarks."""

from dataclasses import dataclass

from pallas_kernels import model_shapes as models
from pallas_kernels.model_shapes import HeadShape

STARCODER = HeadShape("starcoder", 48, 1, 128)
WIDE = (HeadShape("group-20", 20, 1, 64), HeadShape("group-20", 20, 1, 80), HeadShape("group-20", 20, 1, 256))
"""Shapes of no known model, between those of known ones."""


@dataclass(frozen=True, slots=True)
class DecodeCase:
    """One launch: ``lengths`` positions in pages, a slot; ``small`` marks what a CPU test may run."""

    name: str
    heads: HeadShape
    lengths: tuple[int, ...]
    page_size: int
    window: int = 0
    softcap: float = 0.0
    small: bool = True

    @property
    def width(self) -> int:
        """Pages of the longest slot, and one that stays unused."""
        return -(-max(self.lengths) // self.page_size) + 1


RAGGED = (1, 2, 15, 16, 17, 127, 128, 129, 0, 1000)
"""Histories around the edges of pages and tiles, one empty slot among them."""

CASES = (
    *(DecodeCase(f"{heads.name}-ragged", heads, RAGGED, 16) for heads in models.ALL),
    DecodeCase("gemma3-270m-window", models.GEMMA3_270M, (3, 511, 512, 513, 700), 64, window=512),
    DecodeCase("gemma-2b-softcap", models.GEMMA_2B, (1, 40, 300), 32, softcap=50.0),
    DecodeCase("mistral-window", models.LLAMA31_8B, (100, 4095, 4096, 5000), 64, window=4096, small=False),
    DecodeCase("llama-3.1-8b-32k", models.LLAMA31_8B, (32_768,) * 16, 64, small=False),
    DecodeCase("llama-3.1-70b-8k", models.LLAMA31_70B, (8_192,) * 64, 64, small=False),
    DecodeCase("smollm2-135m-8-streams", models.SMOLLM2_135M, (512,) * 8, 64, small=False),
    *(DecodeCase(f"{heads.name}-8k", heads, (8_192,) * 8, 64, small=False) for heads in (*models.ALL, STARCODER)),
    *(DecodeCase(f"{heads.name}-ragged", heads, RAGGED, 16, small=False) for heads in (STARCODER, *WIDE)),
    DecodeCase("llama-3.1-8b-page-16", models.LLAMA31_8B, (8_192,) * 8, 16, small=False),
    DecodeCase("llama-3.1-8b-page-512", models.LLAMA31_8B, (8_192,) * 8, 512, small=False),
    DecodeCase("gemma3-270m-page-16", models.GEMMA3_270M, (8_192,) * 8, 16, small=False),
    DecodeCase("llama-3.1-8b-128k", models.LLAMA31_8B, (131_072,), 64, small=False),
)
