"""A release: programs built with an operator's key on one host, served by another that trusts it."""

import json
from pathlib import Path

import pytest

from tests.support.running_appliance import RunningAppliance, write_config, zccp

pytestmark = pytest.mark.system

FEW = ("--max-context", "512", "--slots", "2", "--kv-format", "float32")


@pytest.fixture(scope="module")
def release(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Programs of one format for the small model, from a state directory that is not the one that serves."""
    folder = tmp_path_factory.mktemp("release")
    (folder / "models").symlink_to(home / "models")
    config, out = str(write_config(folder, folder)), folder / "out"
    built = zccp(
        "build", *FEW, "--config", config, "--out", str(out), "--signing-key", str(folder / "operator.pem"), "--json"
    )
    assert built.returncode == 0, built.stderr
    document = json.loads(built.stdout)
    assert [store["kv_format"] for store in document["stores"]] == ["float32"]
    assert document["public_key"] == str(out / "public-key.pem")
    return out


def config_of(folder: Path, home: Path, release: Path, **programs: str) -> Path:
    (folder / "models").symlink_to(home / "models")
    return write_config(folder, folder, {"programs": {"directory": str(release), **programs}})


def test_a_node_serves_it_as_it_was_built_and_compiles_nothing(home: Path, release: Path, tmp_path: Path) -> None:
    config = config_of(tmp_path, home, release, public_key=str(release / "public-key.pem"))
    doctor = zccp("doctor", "--config", str(config))
    assert f"programs for cpu_native in {release / 'float32'}" in doctor.stdout
    with RunningAppliance(config) as appliance:
        body = {"model": "smollm2-135m", "prompt": "The capital of France is", "temperature": 0, "max_tokens": 4}
        reply = appliance.client.post("/v1/completions", json=body)
        assert reply.json()["choices"][0]["text"].startswith(" Paris")
        too_long = appliance.client.post("/v1/completions", json={**body, "prompt": "one " * 600})
        assert too_long.status_code == 400
        assert "512" in too_long.text
        assert appliance.settled()["zccp_compilations_total"] == 0
    assert not (tmp_path / "signing-key.pem").exists(), "the operator's key is the only one that counts"


def test_a_node_that_trusts_another_key_refuses_it(home: Path, release: Path, tmp_path: Path) -> None:
    config = str(config_of(tmp_path, home, release))
    served = zccp("serve", "--config", config)
    assert served.returncode == 1
    assert "is not signed by the key that is trusted here" in served.stderr


def test_a_setting_that_it_was_not_built_with_is_told_at_once(home: Path, release: Path, tmp_path: Path) -> None:
    config = config_of(tmp_path, home, release)
    config.write_text(config.read_text() + "engine: {slots: 3}\n")
    served = zccp("serve", "--config", str(config))
    assert served.returncode == 2
    assert "engine.slots is 3" in served.stderr
    assert "were built with 2" in served.stderr
