"""When a host takes its model for stored, and what it does otherwise."""

import json
from pathlib import Path

import pytest

from images.host import model
from images.host.commands import CommandError
from images.host.model import bring_in, is_stored


def store(models: Path, name: str, reference: str, *, weights: bool = True) -> None:
    (models / name / "weights-int8").mkdir(parents=True)
    (models / name / "model.json").write_text(json.dumps({"name": name, "reference": reference}))
    if weights:
        (models / name / "weights-int8/checksums.json").write_text("{}")


def test_a_model_is_stored_by_its_name_or_reference_and_with_weights_only(tmp_path: Path) -> None:
    store(tmp_path, "tiny", "hf:somebody/tiny")
    store(tmp_path, "half", "half", weights=False)
    store(tmp_path, ".removed", "removed")
    assert is_stored(tmp_path, "tiny")
    assert is_stored(tmp_path, "hf:somebody/tiny")
    assert not is_stored(tmp_path, "half")
    assert not is_stored(tmp_path, "removed")
    assert not is_stored(tmp_path / "none", "tiny")


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, ...]]:
    commands: list[tuple[str, ...]] = []
    monkeypatch.setattr(model, "_zccp", lambda *arguments: commands.append(arguments))
    monkeypatch.setattr(model, "MEDIUM", tmp_path / "no disk")
    (tmp_path / "config.yaml").write_text("model: {reference: tiny}\n")
    return commands


def test_a_stored_model_costs_nothing(tmp_path: Path, done: list[tuple[str, ...]]) -> None:
    store(tmp_path / "models", "tiny", "tiny")
    bring_in(tmp_path / "config.yaml", tmp_path / "models")
    assert done == []


def test_without_a_disk_it_is_fetched_and_converted(tmp_path: Path, done: list[tuple[str, ...]]) -> None:
    bring_in(tmp_path / "config.yaml", tmp_path / "models")
    assert done == [("convert",)]


def test_archives_of_a_disk_come_first(
    tmp_path: Path, done: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "no disk").mkdir()
    (tmp_path / "no disk/b.tar").touch()
    (tmp_path / "no disk/a.tar").touch()

    class Mounted:
        def __init__(self, device: Path, *_: object) -> None:
            self.device = device

        def __enter__(self) -> Path:
            return self.device

        def __exit__(self, *_: object) -> None:
            if done:
                store(tmp_path / "models", "tiny", "tiny")

    monkeypatch.setattr(model, "mounted", Mounted)
    bring_in(tmp_path / "config.yaml", tmp_path / "models")
    assert done == [("models", "import", str(tmp_path / "no disk" / name)) for name in ("a.tar", "b.tar")]


def test_a_disk_that_cannot_be_read_is_told(
    tmp_path: Path, done: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "MEDIUM", tmp_path / "config.yaml")
    monkeypatch.setattr(model, "RUN", tmp_path)
    with pytest.raises(CommandError, match=r"^mount -o ro,nosuid,nodev,noexec .* failed with exit code"):
        bring_in(tmp_path / "config.yaml", tmp_path / "models")
    assert done == []
