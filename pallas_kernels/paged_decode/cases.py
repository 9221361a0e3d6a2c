"""paged_decode: named shapes from real models, shared by tests and benchmarks."""

from dataclasses import dataclass

from pallas_kernels import model_shapes as models
from pallas_kernels.model_shapes import HeadShape

STARCODER = HeadShape("starcoder", 48, 1, 128)
WIDE = (HeadShape("group-20", 20, 1, 64), HeadShape("group-20", 20, 1, 80), HeadShape("group-20", 20, 1, 256))
"""Shapes of no known model, between those of known ones."""


@dataclass(frozen=True, slots=True)
class DecodeCase:
    """One launch: ``lengths`` positions behind each slot; ``small`` marks what a CPU test may run.

    ``kv_format`` is bf16 (or what a test makes of it), int8, bmq4 or bmq2.
    """

    name: str
    heads: HeadShape
    lengths: tuple[int, ...]
    page_size: int
    window: int = 0
    softcap: float = 0.0
    small: bool = True
    kv_format: str = "bf16"

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

FORMATS = ("int8", "bmq4", "bmq2")
GROUP_16 = (HeadShape("group-16", 32, 2, 64), HeadShape("group-16", 64, 4, 128))
_LONG = (models.SMOLLM2_135M, models.D80, models.LLAMA31_8B, models.GEMMA3_270M, GROUP_16[1])
_RAGGED = (models.TINY, models.D96, GROUP_16[0], *WIDE[:2])  # group-20 of 256 channels is the code of gemma3-270m


def _quantised(kv_format: str) -> tuple[DecodeCase, ...]:
    def case(
        heads: HeadShape, name: str, lengths: tuple[int, ...], page_size: int = 128, window: int = 0
    ) -> DecodeCase:
        name = f"{kv_format}-{heads.name}-{name}"
        return DecodeCase(name, heads, lengths, page_size, window=window, small=False, kv_format=kv_format)

    sizes = (16, 512) if kv_format == "int8" else (512,)
    return (
        *(case(heads, "8k", (8_192,) * 8) for heads in _LONG),
        case(models.SMOLLM2_135M, "window", (3, 511, 512, 640, 5_000), window=512),
        *(case(heads, "ragged", RAGGED) for heads in _RAGGED),
        *(case(models.LLAMA31_8B, f"page-{size}", RAGGED, size) for size in sizes),
    )


QUANTISED_CASES = tuple(case for kv_format in FORMATS for case in _quantised(kv_format))
"""Launches over quantised pools. Groups of more than 16 query heads, or 8 of 256 channels, read a history twice."""

PAIR_64K = tuple(
    DecodeCase(name, models.LLAMA31_8B, (65_536,) * 4, 128, small=False, kv_format=kv_format)
    for name, kv_format in (("llama-3.1-8b-64k", "bf16"), ("bmq4-llama-3.1-8b-64k", "bmq4"))
)
"""One launch over a long context in bf16 and in bmq4, to be timed beside each other."""
