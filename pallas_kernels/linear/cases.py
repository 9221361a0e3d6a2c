"""linear: named shapes from real models, shared by tests and benchmarks."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinearCase:
    """A product of [rows, k] with [k, n]; ``small`` marks what a CPU test may run."""

    name: str
    rows: int
    k: int
    n: int
    small: bool = True


CASES = (
    LinearCase("smollm2-135m-qkv-1", 1, 576, 960),
    LinearCase("smollm2-135m-o-8", 8, 576, 576),
    LinearCase("smollm2-135m-gate-up-16", 16, 576, 3_072),
    LinearCase("smollm2-135m-down-47", 47, 1_536, 576),
    LinearCase("smollm2-135m-down-48", 48, 1_536, 576),
    LinearCase("smollm2-135m-qkv-512", 512, 576, 960),
    LinearCase("odd-3", 3, 37, 75),
    LinearCase("odd-273", 273, 131, 107),
    LinearCase("one-input", 2, 1, 5),
    LinearCase("smollm2-135m-head-8", 8, 576, 49_152, small=False),
    LinearCase("llama-3.1-8b-qkv-16", 16, 4_096, 6_144, small=False),
    LinearCase("llama-3.1-8b-gate-up-2048", 2_048, 4_096, 28_672, small=False),
    LinearCase("llama-3.1-70b-down-64", 64, 28_672, 8_192, small=False),
)
