"""The built home and the running appliance that all system tests share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.real_model import HOME
from tests.support.running_appliance import RunningAppliance, write_config, zccp


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state directory with the small model, converted to int8, and its programs; kept from run to run."""
    config = write_config(tmp_path_factory.mktemp("build"), HOME)
    done = zccp("build", "--json", "--config", str(config), timeout_s=1800)
    assert done.returncode == 0, done.stderr
    return HOME


@pytest.fixture(scope="session")
def shared(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAppliance]:
    """One appliance with two workers for all tests that leave it as they found it."""
    sections = {
        "server": {"workers": 2, "max_body_mb": 1.0},
        "model": {"aliases": {"gpt-4o": "smollm2-135m"}},
        "engine": {"max_waiting": 32},
    }
    config = write_config(tmp_path_factory.mktemp("shared"), home, sections)
    with RunningAppliance(config) as appliance:
        yield appliance


@pytest.fixture
def appliance(shared: RunningAppliance) -> Iterator[RunningAppliance]:
    """The shared appliance; after the test nothing is held and nothing was compiled."""
    yield shared
    assert shared.settled()["zccp_compilations_total"] == 0
