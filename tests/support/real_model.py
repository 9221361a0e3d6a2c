"""The small real model, fetched once into the build folder of the checkout and shared by all tests that need it."""

from functools import cache
from pathlib import Path

from appliance.model.library import ModelLibrary

HOME = Path(__file__).parents[2] / "build" / "test-home"


@cache
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct in a model store."""
    return ModelLibrary(HOME).ensure("smollm2-135m")


def smollm2_gguf() -> Path:
    """Its GGUF file."""
    return smollm2() / "source" / "SmolLM2-135M-Instruct.Q4_1.gguf"
