"""LengthModel: a trained LSTM as plain arrays, and its forward pass for one request.

Owns the arrays and their shapes. NumPy only, so asking it compiles nothing and waits for no device: one request costs
some 17 small products. ``planner.predict`` trains it; both compute the same function.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np
from jaxtyping import Float32

from planner.history import (
    NUM_FEATURES,
    Column,
    Features,
    Records,
    Requests,
    baseline,
    features,
    from_log_length,
    log_length,
)

HIDDEN = 16
"""Width of the LSTM's state."""

MIN_HISTORY = 400
"""Finished requests below which no model is trained."""

SHAPES: Mapping[str, tuple[int, ...]] = {
    "inputs": (NUM_FEATURES, 4 * HIDDEN),
    "recurrent": (HIDDEN, 4 * HIDDEN),
    "bias": (4 * HIDDEN,),
    "head": (HIDDEN,),
    "head_bias": (),
}
"""Arrays of a model, all float32; gates stand in the order input, forget, cell, output."""


@dataclass(frozen=True, slots=True)
class LengthModel:
    """The arrays of SHAPES.

    Raises:
        ValueError: an array has another shape or number format, or holds what is not finite.
    """

    inputs: np.ndarray
    recurrent: np.ndarray
    bias: np.ndarray
    head: np.ndarray
    head_bias: np.ndarray

    def __post_init__(self) -> None:
        for field in fields(self):
            array, shape = getattr(self, field.name), SHAPES[field.name]
            if array.shape != shape or array.dtype != np.float32 or not np.isfinite(array).all():
                raise ValueError(f"{field.name} is {array.dtype} {array.shape}; finite float32 {shape} needed")


@dataclass(frozen=True, slots=True)
class Scores:
    """Mean pinball losses on ``held_out`` requests, in ids a request, and the gate's answer."""

    lstm: float
    baseline: float
    held_out: int
    use_lstm: bool


@dataclass(frozen=True, slots=True)
class Trained:
    """A model with its scores."""

    model: LengthModel
    scores: Scores


def correction(model: LengthModel, inputs: Features) -> Float32[np.ndarray, " requests"]:
    """What the model adds to the baseline of each request, in ``log_length``."""
    # a sigmoid is a tanh of half its argument, so one tanh serves all four gates
    half = np.repeat(np.array([0.5, 0.5, 1.0, 0.5], np.float32), HIDDEN)
    driven, recurrent = (inputs @ model.inputs + model.bias) * half, model.recurrent * half
    state = carry = np.zeros((len(inputs), HIDDEN), np.float32)
    for step in range(inputs.shape[1]):
        gates = np.tanh(driven[:, step] + state @ recurrent)
        opened = 0.5 * gates + 0.5
        entry, keep, leave = opened[:, :HIDDEN], opened[:, HIDDEN : 2 * HIDDEN], opened[:, 3 * HIDDEN :]
        carry = keep * carry + entry * gates[:, 2 * HIDDEN : 3 * HIDDEN]
        state = leave * np.tanh(carry)
    return state @ model.head + model.head_bias


def predict(model: LengthModel, records: Records, first: int, asked: Requests) -> np.ndarray:
    """The model's prediction for each request asked about, in ids; NaN where there is no baseline.

    Args:
        model: a trained model.
        records: the remembered requests, oldest first.
        first: how many finished before the oldest of them.
        asked: requests, each with what it knew.
    """
    base = baseline(records, first, asked)
    logs = log_length(base) + correction(model, features(records, first, asked, np.nan_to_num(base)))
    return np.clip(from_log_length(np.clip(logs, -8.0, 8.0)), 1.0, np.maximum(asked[:, Column.MAX_TOKENS], 1.0))
