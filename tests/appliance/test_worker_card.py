"""What a worker tells clients of the model that it serves: its names and its bounds."""

from pathlib import Path

from structlog.testing import capture_logs

from appliance.assignment import Assignment
from appliance.config import build
from appliance.model.library import ModelLibrary
from appliance.worker import load_text
from tests.support.tiny_models import VOCAB, save_gguf


def assignment(folder: Path, aliases: dict[str, str], context: int | None = None) -> Assignment:
    sections = {"model": {"aliases": aliases}, "engine": {"context": context}, "paths": {"home": "/h", "run": "/r"}}
    return Assignment(
        role="worker", index=0, parent_pid=1, notify_fd=0, epoch=1, port=1, segments_file="", socket="", metrics="",
        model=str(folder), config=build(sections, {}),
    )  # fmt: skip


def test_aliases_of_the_served_model_are_taken_and_others_are_warned_of(tmp_path: Path) -> None:
    save_gguf(tmp_path / "Tiny.gguf", "llama")
    folder = ModelLibrary(tmp_path / "home").ensure(str(tmp_path / "Tiny.gguf"))
    with capture_logs() as logs:
        _, card = load_text(assignment(folder, {"gpt": "tiny", "other": "elsewhere"}, context=128))
    assert (card.name, card.aliases, card.context, card.vocab) == ("tiny", ("gpt",), 128, VOCAB)
    assert logs == [
        {
            "event": "alias of a model that is not served",
            "log_level": "warning",
            "alias": "other",
            "of": "elsewhere",
            "served": "tiny",
        }
    ]
