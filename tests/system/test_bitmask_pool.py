"""Keys and values in bmq4: the real model through a quantised pool answers in English, and nothing is left held."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.running_appliance import RunningAppliance, write_config, zccp

pytestmark = pytest.mark.system

MODEL, ENERGY = "smollm2-135m", "query-energy"
FEW = {"kv_format": "bmq4", "context": 512, "slots": 2, "prefill_chunk": 128}
PASSAGE = "The ferry leaves at nine. " * 25
"""Longer than a block and the first positions, so that its beginning is read from codes."""


@pytest.fixture(scope="module")
def own_home(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state directory with models of the shared one and programs of its own."""
    own = tmp_path_factory.mktemp("bitmask")
    (own / "models").symlink_to(home / "models")
    built = zccp("build", "--config", str(write_config(own, own, {"engine": FEW})))
    assert built.returncode == 0, built.stderr
    return own


@pytest.fixture(scope="module")
def bitmask(own_home: Path) -> Iterator[RunningAppliance]:
    """An appliance that holds keys and values in bmq4."""
    with RunningAppliance(own_home / "config.yaml") as appliance:
        yield appliance


@pytest.fixture
def other_home(own_home: Path, tmp_path: Path) -> Path:
    """The same with a copy of the query energies, to be damaged."""
    for name in ("programs", "signing-key.pem"):
        (tmp_path / name).symlink_to(own_home / name)
    for part in (own_home / "models" / MODEL).iterdir():
        place = tmp_path / "models" / MODEL / part.name
        place.parent.mkdir(parents=True, exist_ok=True)
        if part.name == ENERGY:
            shutil.copytree(part, place)
        else:
            place.symlink_to(part)
    return tmp_path


@pytest.mark.parametrize("damage", ["none", "missing", "changed"])
def test_damaged_query_energies_are_told_with_the_remedy(other_home: Path, damage: str) -> None:
    config, folder = str(write_config(other_home, other_home, {"engine": FEW})), other_home / "models" / MODEL / ENERGY
    if damage == "missing":
        shutil.rmtree(folder)
    if damage == "changed":
        file = folder / "query_energy.npy"
        file.write_bytes(file.read_bytes()[:-1] + b"\0")
    doctor = zccp("doctor", "--config", config)
    if damage == "none":
        assert doctor.returncode == 0, doctor.stdout
        return
    assert doctor.returncode == 1
    said = [doctor.stdout]
    if damage == "missing":
        served = zccp("serve", "--config", config)
        assert served.returncode == 1
        said.append(served.stderr)
    for text in said:
        assert str(folder) in text
        assert "run zccp build" in text


def completion(appliance: RunningAppliance, prompt: str, **fields: object) -> list[str]:
    body = {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 4, **fields}
    reply = appliance.client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    return [choice["text"] for choice in reply.json()["choices"]]


def test_it_knows_the_capital_of_france(bitmask: RunningAppliance) -> None:
    assert completion(bitmask, "The capital of France is")[0].startswith(" Paris")
    assert bitmask.settled()["zccp_compilations_total"] == 0


def test_it_goes_on_from_what_it_read_in_codes(bitmask: RunningAppliance) -> None:
    (text,) = completion(bitmask, PASSAGE + "The ferry leaves at", max_tokens=12)
    assert text.startswith(" nine.")
    assert bitmask.settled()["zccp_compilations_total"] == 0


def test_choices_of_a_long_prompt_each_read_its_first_positions(bitmask: RunningAppliance) -> None:
    """Their slots keep these, so that pages alone would not do."""
    alone = completion(bitmask, PASSAGE, max_tokens=8)
    assert completion(bitmask, PASSAGE, max_tokens=8, n=2) == alone * 2
    assert bitmask.settled()["zccp_compilations_total"] == 0
