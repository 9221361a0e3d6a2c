"""Lengths are learned while the real appliance serves: in a process beside it, without a compilation in the engine."""

from pathlib import Path

import pytest

from tests.support.running_appliance import RunningAppliance, eventually, write_config

pytestmark = pytest.mark.system

CHOICES, REQUESTS = 8, 52
"""Together a few more finished sequences than the first training waits for."""


@pytest.fixture(scope="module")
def own(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state directory that knows no lengths, with the models and programs of the shared one."""
    folder = tmp_path_factory.mktemp("prediction")
    for name in ("models", "programs", "signing-key.pem"):
        (folder / name).symlink_to(home / name)
    return folder


def counted(appliance: RunningAppliance, name: str) -> float:
    """A metric by its name with labels, 0 if it has not been counted."""
    return appliance.metrics().get(name, 0.0)


def predictions(appliance: RunningAppliance) -> float:
    return sum(counted(appliance, f'zccp_predictions_total{{source="{source}"}}') for source in ("baseline", "lstm"))


def ask(appliance: RunningAppliance, max_tokens: int) -> None:
    body = {"model": "smollm2-135m", "prompt": "One", "max_tokens": max_tokens, "n": CHOICES, "ignore_eos": True}
    reply = appliance.client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text


def test_a_training_beside_the_engine_and_its_scores_after_a_restart(
    own: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    config = write_config(tmp_path_factory.mktemp("first"), own)
    with RunningAppliance(config) as appliance:
        for number in range(REQUESTS):
            ask(appliance, 1 + number % 3)
        done = 'zccp_prediction_trainings_total{outcome="done"}'
        eventually(lambda: counted(appliance, done) == 1, lambda: "no training was finished", within_s=300)
        ask(appliance, 3)
        assert appliance.settled()["zccp_compilations_total"] == 0
        assert predictions(appliance) > REQUESTS // 2
        loss = counted(appliance, "zccp_prediction_baseline_loss_tokens")
    with RunningAppliance(write_config(tmp_path_factory.mktemp("second"), own)) as appliance:
        assert counted(appliance, "zccp_prediction_baseline_loss_tokens") == loss
        ask(appliance, 3)
        assert predictions(appliance) == 1
        assert appliance.settled()["zccp_compilations_total"] == 0
