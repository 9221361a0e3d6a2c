"""What the predictor keeps on disk: its history and its trained model, in one file that is checked when it is read.

Owns the form of the file: the SHA-256 of what follows, then one msgpack document in which arrays are plain bytes of
known shapes. Nothing is unpickled. A file that is damaged, of another version or of another model is refused, and the
caller starts anew. Never imports jax.
"""

import hashlib
import os
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from msgspec import Struct

from planner.history import CAPACITY, Column, History
from planner.length_model import SHAPES, LengthModel, Scores, Trained

SCHEMA = "zccp-prediction-1"
MAX_BYTES = 1 << 20
"""Larger files are none of ours."""

_DIGEST_BYTES = 32


class StateError(ValueError):
    """A file cannot be used; the message says why."""


@dataclass(frozen=True, slots=True)
class PredictionState:
    """Everything that a predictor knows. ``model`` is the served model, whose lengths these are."""

    model: str
    history: History
    trained: Trained | None


class _SavedScores(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    lstm: float
    baseline: float
    held_out: int
    use_lstm: bool


class _Saved(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    schema: str
    model: str
    total: int
    records: bytes
    arrays: dict[str, bytes] | None
    scores: _SavedScores | None


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Saved).decode


def remove_leftovers(path: Path) -> None:
    """Remove what a process that was killed while it saved has left beside the file."""
    for file in path.parent.glob(f".{path.name}.*"):
        with suppress(OSError):
            file.unlink()


def save(path: Path, state: PredictionState) -> None:
    """Replace the file at once, mode 0600.

    Raises:
        OSError: it cannot be written; the old one is untouched.
    """
    payload = _encode(_saved(state))
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(hashlib.sha256(payload).digest() + payload)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def load(path: Path, model: str) -> PredictionState | None:
    """What was saved for a model; None where there is no file.

    Raises:
        StateError: the file cannot be read, is damaged, or is of another version or model.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StateError(f"{path} cannot be read: {error.strerror or error}") from error
    if len(content) > MAX_BYTES:
        raise StateError(f"{path} is larger than {MAX_BYTES} bytes")
    digest, payload = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    if hashlib.sha256(payload).digest() != digest:
        raise StateError(f"{path} is damaged: its checksum is wrong")
    try:
        saved = _decode(payload)
    except msgspec.DecodeError as error:
        raise StateError(f"{path} does not have the form of {SCHEMA}: {error}") from error
    if (saved.schema, saved.model) != (SCHEMA, model):
        raise StateError(f"{path} is {saved.schema} of model {saved.model}; {SCHEMA} of {model} is needed")
    try:
        return _state(saved)
    except ValueError as error:
        raise StateError(f"{path} holds what cannot be: {error}") from error


def _saved(state: PredictionState) -> _Saved:
    trained = state.trained
    return _Saved(
        schema=SCHEMA,
        model=state.model,
        total=state.history.total,
        records=state.history.records.astype("<f8").tobytes(),
        arrays=None
        if trained is None
        else {name: getattr(trained.model, name).astype("<f4").tobytes() for name in SHAPES},
        scores=None
        if trained is None
        else _SavedScores(
            lstm=trained.scores.lstm,
            baseline=trained.scores.baseline,
            held_out=trained.scores.held_out,
            use_lstm=trained.scores.use_lstm,
        ),
    )


def _state(saved: _Saved) -> PredictionState:
    """The values in a file.

    Raises:
        ValueError: bytes and shapes do not go together, or a number cannot be.
    """
    records = np.frombuffer(saved.records, "<f8").astype(np.float64)
    if records.size > CAPACITY * len(Column):
        raise ValueError(f"{records.size} numbers in records; at most {CAPACITY} records are kept")
    history = History(records.reshape(-1, len(Column)), saved.total)
    if saved.arrays is None or saved.scores is None:
        return PredictionState(saved.model, history, None)
    if saved.arrays.keys() != SHAPES.keys():
        raise ValueError(f"arrays {sorted(saved.arrays)}; {sorted(SHAPES)} are needed")
    arrays = {
        name: np.frombuffer(saved.arrays[name], "<f4").astype(np.float32).reshape(shape)
        for name, shape in SHAPES.items()
    }
    scores = saved.scores
    losses = np.array([scores.lstm, scores.baseline])
    if not np.isfinite(losses).all() or (losses < 0).any():
        raise ValueError(f"losses {losses.tolist()}; they must be finite and not negative")
    return PredictionState(
        saved.model,
        history,
        Trained(LengthModel(**arrays), Scores(scores.lstm, scores.baseline, scores.held_out, scores.use_lstm)),
    )
