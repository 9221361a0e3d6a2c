"""The predictor's file: what is written comes back, and everything else is refused with the reason."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from appliance.prediction_state import MAX_BYTES, SCHEMA, PredictionState, StateError, load, remove_leftovers, save
from planner.length_model import SHAPES, LengthModel, Scores, Trained
from tests.support.traces import noise


def a_state() -> PredictionState:
    rng = np.random.default_rng(0)
    model = LengthModel(**{name: np.asarray(rng.normal(size=shape), np.float32) for name, shape in SHAPES.items()})
    return PredictionState("small", noise(0), Trained(model, Scores(1.25, 2.5, 250, use_lstm=True)))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "prediction" / "small.state"
    save(path, a_state())
    return path


def rewritten(path: Path, **changes: object) -> None:
    """Change fields and put the right checksum in front again."""
    document = msgspec.msgpack.decode(path.read_bytes()[32:])
    payload = msgspec.msgpack.encode({**document, **changes})
    path.write_bytes(hashlib.sha256(payload).digest() + payload)


def test_what_is_saved_comes_back(saved: Path) -> None:
    state, expected = load(saved, "small"), a_state()
    assert state is not None
    np.testing.assert_array_equal(state.history.records, expected.history.records)
    assert state.history.total == expected.history.total
    assert state.trained is not None
    assert state.trained.scores == expected.trained.scores
    for name in SHAPES:
        np.testing.assert_array_equal(getattr(state.trained.model, name), getattr(expected.trained.model, name))


def test_a_state_without_a_model_comes_back(tmp_path: Path) -> None:
    save(tmp_path / "s", PredictionState("small", noise(1), None))
    state = load(tmp_path / "s", "small")
    assert state is not None
    assert state.trained is None
    assert state.history.total == 1000


def test_the_file_is_private_and_nothing_else_is_left(saved: Path) -> None:
    save(saved, a_state())
    assert saved.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in saved.parent.iterdir()] == ["small.state"]


def test_what_a_killed_process_left_is_removed_and_nothing_else(saved: Path) -> None:
    left = [saved.parent / f".{saved.name}.{end}" for end in ("k2j4", "x_y1")]
    other = saved.parent / ".other.state.abcd"
    for file in (*left, other):
        file.touch()
    remove_leftovers(saved)
    assert sorted(saved.parent.iterdir()) == sorted([saved, other])
    remove_leftovers(saved.parent / "no folder" / "file")


def test_a_write_that_fails_leaves_the_old_file(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = saved.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        save(saved, PredictionState("small", noise(1), None))
    assert saved.read_bytes() == before
    assert [path.name for path in saved.parent.iterdir()] == ["small.state"]


def test_no_file_is_no_error(tmp_path: Path) -> None:
    assert load(tmp_path / "none", "small") is None


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda path: path.write_bytes(b""), "damaged"),
    "truncated": (lambda path: path.write_bytes(path.read_bytes()[:-100]), "damaged"),
    "one bit": (lambda path: path.write_bytes(path.read_bytes()[:-1] + b"\x00"), "damaged"),
    "huge": (lambda path: path.write_bytes(b"\x00" * (MAX_BYTES + 1)), "larger than"),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), "cannot be read"),
    "other version": (lambda path: rewritten(path, schema="zccp-prediction-0"), "is zccp-prediction-0 of model small"),
    "other model": (lambda path: rewritten(path, model="large"), f"is {SCHEMA} of model large"),
    "unknown field": (lambda path: rewritten(path, more=1), "does not have the form"),
    "wrong type": (lambda path: rewritten(path, total="many"), "does not have the form"),
    "half a record": (lambda path: rewritten(path, records=b"\x00" * 40), "holds what cannot be"),
    "odd bytes": (lambda path: rewritten(path, records=b"\x00" * 41), "holds what cannot be"),
    "too many records": (lambda path: rewritten(path, records=b"\x00" * 48_048), "at most 1000 records"),
    "fewer requests than records": (lambda path: rewritten(path, total=3), "holds what cannot be"),
    "a number that is none": (
        lambda path: rewritten(path, records=np.full((1, 6), np.nan).tobytes()),
        "negative or not finite",
    ),
    "an array is missing": (lambda path: rewritten(path, arrays={}), "holds what cannot be"),
    "an array is short": (
        lambda path: rewritten(path, arrays=dict.fromkeys(SHAPES, b"\x00" * 4)),
        "holds what cannot be",
    ),
    "a loss below 0": (
        lambda path: rewritten(path, scores={"lstm": -1.0, "baseline": 1.0, "held_out": 9, "use_lstm": True}),
        "losses",
    ),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_anything_else_is_refused_with_the_reason(saved: Path, kind: str) -> None:
    damage, reason = DAMAGES[kind]
    damage(saved)
    with pytest.raises(StateError, match=reason):
        load(saved, "small")
