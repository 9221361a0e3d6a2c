"""paged_prefill: named shapes from real models, shared by tests and benchmarks."""

from dataclasses import dataclass

from pallas_kernels import model_shapes as models
from pallas_kernels.model_shapes import HeadShape


@dataclass(frozen=True, slots=True)
class PrefillCase:
    """One launch: ``chunks`` are (positions in pages, tokens in this launch), a row; ``tokens`` is the padded number.

    ``small`` marks what a CPU test may run; ``kv_format`` is bf16 (or what a test makes of it), int8, bmq4 or bmq2.
    """

    name: str
    heads: HeadShape
    chunks: tuple[tuple[int, int], ...]
    tokens: int
    page_size: int
    window: int = 0
    softcap: float = 0.0
    small: bool = True
    kv_format: str = "bf16"

    @property
    def width(self) -> int:
        """Pages of the longest row, and one that stays unused."""
        return -(-max(start + length for start, length in self.chunks) // self.page_size) + 1


MIXED = ((0, 5), (37, 20), (16, 1), (0, 0))
"""Fresh and continued prompts, one of a single token, and an empty row."""

LATE = ((6_144, 2_048),)
"""The fourth chunk of a long prompt."""

CASES = (
    *(PrefillCase(f"{heads.name}-mixed", heads, MIXED, 32, 16) for heads in models.ALL),
    PrefillCase("smollm2-135m-tiles", models.SMOLLM2_135M, ((600, 150), (0, 140), (513, 7)), 300, 64),
    PrefillCase("smollm2-135m-fresh", models.SMOLLM2_135M, ((0, 256),), 256, 64),
    PrefillCase("gemma3-270m-window", models.GEMMA3_270M, ((700, 40), (0, 90)), 136, 64, window=64),
    PrefillCase("gemma-2b-softcap", models.GEMMA_2B, ((30, 20), (0, 12)), 32, 16, softcap=50.0),
    PrefillCase("llama-3.1-8b-2k", models.LLAMA31_8B, ((0, 2_048),), 2_048, 64, small=False),
    PrefillCase("llama-3.1-8b-late", models.LLAMA31_8B, ((30_720, 2_048),), 2_048, 64, small=False),
    PrefillCase("llama-3.1-8b-page-16", models.LLAMA31_8B, LATE, 2_048, 16, small=False),
    PrefillCase("llama-3.1-8b-page-512", models.LLAMA31_8B, LATE, 2_048, 512, small=False),
    PrefillCase("llama-3.1-8b-16-rows", models.LLAMA31_8B, ((1_000, 120),) * 16, 2_048, 64, small=False),
    PrefillCase("llama-3.1-70b-2k", models.LLAMA31_70B, LATE, 2_048, 64, small=False),
    PrefillCase("smollm2-135m-2k", models.SMOLLM2_135M, LATE, 2_048, 64, small=False),
    PrefillCase("gemma3-270m-2k", models.GEMMA3_270M, LATE, 2_048, 64, window=512, small=False),
    PrefillCase("gemma-2b-2k", models.GEMMA_2B, LATE, 2_048, 64, softcap=50.0, small=False),
    PrefillCase("gemma-2b-page-16", models.GEMMA_2B, LATE, 2_048, 16, small=False),
    PrefillCase("d80-2k", models.D80, LATE, 2_048, 64, small=False),
    PrefillCase("d96-2k", models.D96, LATE, 2_048, 64, small=False),
    PrefillCase("falcon-7b-2k", models.MANY_TO_ONE, LATE, 2_048, 64, small=False),
    PrefillCase("group-20-d192", HeadShape("group-20", 20, 1, 192), LATE, 2_048, 64, small=False),
)

FORMATS = ("int8", "bmq4", "bmq2")
_ANY = (models.TINY, models.SMOLLM2_135M, models.D80, models.D96, models.LLAMA31_8B, models.GEMMA3_270M)


def _case(
    kv_format: str, heads: HeadShape, name: str = "2k", *, page_size: int = 128, window: int = 0, softcap: float = 0.0
) -> PrefillCase:
    named = f"{kv_format}-{heads.name}-{name}"
    return PrefillCase(named, heads, LATE, 2_048, page_size, window, softcap, small=False, kv_format=kv_format)


QUANTISED_CASES = (
    *(_case("int8", heads) for heads in _ANY),
    _case("int8", models.SMOLLM2_135M, "softcap", window=512, softcap=50.0),
    _case("int8", models.SMOLLM2_135M, "page-16", page_size=16),
    _case("int8", models.SMOLLM2_135M, "page-512", page_size=512),
    *(_case("bmq4", heads) for heads in (models.SMOLLM2_135M, models.LLAMA31_8B, models.GEMMA3_270M)),
    _case("bmq4", models.SMOLLM2_135M, "softcap", window=512, softcap=50.0),
    _case("bmq2", models.LLAMA31_8B),
)
"""Launches over quantised pools."""

BLOCK_CASES = (
    *(_case(kv_format, heads) for kv_format in ("bmq4", "bmq2") for heads in _ANY),
    _case("bmq4", models.LLAMA31_8B, "page-512", page_size=512),
)
"""Launches whose unpacking of blocks is examined by itself: what attends after it is the kernel of float pages."""
