"""A model on four CPU devices, two by two: the real appliance answers as on one, and compiles nothing."""

from pathlib import Path

import pytest

from tests.support.running_appliance import RunningAppliance, write_config, zccp
from tests.support.tiny_models import save_hf

pytestmark = pytest.mark.system

FEW = {"weight_form": "float32", "context": 512, "slots": 2, "prefill_chunk": 64}
SPREAD = {**FEW, "devices": 4, "context_devices": 2}
PROMPT = "The appliance serves open models. It keeps pages of keys and values, and it counts every token."


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    save_hf(folder, "llama", num_attention_heads=8, hidden_size=64)
    return folder


def answer(folder: Path, model: Path, engine: dict[str, object]) -> str:
    """What an appliance with these settings says, whose programs are built first."""
    folder.mkdir()
    config = write_config(folder, folder.parent / "home", {"model": {"reference": str(model)}, "engine": engine})
    built = zccp("build", "--config", str(config))
    assert built.returncode == 0, built.stderr
    with RunningAppliance(config) as appliance:
        body = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "max_tokens": 24}
        reply = appliance.client.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        assert appliance.settled()["zccp_compilations_total"] == 0
    return reply.json()["choices"][0]["text"]


def test_four_devices_answer_as_one(model: Path, tmp_path: Path) -> None:
    assert answer(tmp_path / "four", model, SPREAD) == answer(tmp_path / "one", model, FEW)
