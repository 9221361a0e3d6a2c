"""sample: named shapes from real models, shared by tests and benchmarks."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SampleCase:
    """One launch over ``rows`` rows of ``vocab`` logits; ``small`` marks what a CPU test may run."""

    name: str
    rows: int
    vocab: int
    small: bool = True


CASES = (
    SampleCase("smaller-than-the-candidates", 4, 37),
    SampleCase("as-many-as-the-candidates", 3, 256),
    SampleCase("tiny-checkpoint", 8, 384),
    SampleCase("odd", 2, 5_003),
    SampleCase("smollm2-8", 8, 49_152, small=False),
    SampleCase("gpt2-8", 8, 50_257, small=False),
    SampleCase("llama-3.1-64", 64, 128_256, small=False),
    SampleCase("gemma3-16", 16, 262_144, small=False),
)
