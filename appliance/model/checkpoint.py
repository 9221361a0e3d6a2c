"""Checkpoint: the small interface that every model file format presents, and the errors it may raise.

Owns the seam between file formats and the model store. Knows no file format; never imports jax.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import numpy as np

from appliance.model.tokenizer import TextAssets
from planner.architecture import ModelArchitecture

Progress = Callable[[str, int, int], None]
"""Called as (what is going on, units done, units in all); a caller draws bars with it."""


class CheckpointError(ValueError):
    """A model file cannot be served; the message names the file, what is wrong and what to do."""


def no_progress(what: str, done: int, total: int) -> None:
    """A ``Progress`` that shows nothing."""
    del what, done, total


class Checkpoint(Protocol):
    """An opened model: everything about it has been checked, no weight has been read."""

    @property
    def architecture(self) -> ModelArchitecture:
        """What the model computes."""
        ...

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that hold its weights."""
        ...

    def narrowed(self, vocab: int) -> "Checkpoint":
        """The same model with the first ``vocab`` rows of its embedding and head; those beyond have no id."""
        ...

    def text_assets(self) -> TextAssets:
        """Tokenizer and chat templates.

        Raises:
            TokenizerError: the tokenizer is of a kind that cannot be rebuilt exactly.
        """
        ...

    def weights(self, progress: Progress = no_progress) -> Iterator[tuple[str, np.ndarray]]:
        """The float32 weight tree of ``planner.weights``, one stacked array at a time, in the order of its specs."""
        ...
