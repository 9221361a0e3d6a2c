"""Attention head shapes of real models, for the cases of every attention op.

Owns the list. Read by tests, benchmarks and tuning, never by an op.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Heads of one model: query head h reads key/value head ``h // (q_heads // kv_heads)``."""

    model: str
    q_heads: int
    kv_heads: int
    head_dim: int

    @property
    def name(self) -> str:
        """The shape as it appears in test and benchmark names."""
        return f"{self.model}-{self.q_heads}:{self.kv_heads}-d{self.head_dim}"


SMOLLM2_135M = HeadShape("smollm2-135m", 9, 3, 64)
SMOLLM2_360M = HeadShape("smollm2-360m", 15, 5, 64)
QWEN2_500M = HeadShape("qwen2-0.5b", 14, 2, 64)
QWEN2_7B = HeadShape("qwen2-7b", 28, 4, 128)
LLAMA31_8B = HeadShape("llama-3.1-8b", 32, 8, 128)
LLAMA31_70B = HeadShape("llama-3.1-70b", 64, 8, 128)
GEMMA3_270M = HeadShape("gemma3-270m", 4, 1, 256)
GEMMA_2B = HeadShape("gemma-2b", 8, 1, 256)
D80 = HeadShape("d80", 12, 12, 80)
D96 = HeadShape("d96", 32, 32, 96)
MANY_TO_ONE = HeadShape("falcon-7b", 71, 1, 64)
TINY = HeadShape("tiny", 5, 5, 8)

ALL = (
    SMOLLM2_135M,
    SMOLLM2_360M,
    QWEN2_500M,
    QWEN2_7B,
    LLAMA31_8B,
    LLAMA31_70B,
    GEMMA3_270M,
    GEMMA_2B,
    D80,
    D96,
    MANY_TO_ONE,
    TINY,
)
