"""Everything that needs several devices: a process of its own each, in which the CPU counts as eight."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FLAGS = (
    "--xla_force_host_platform_device_count=8 "
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"  # compiling is all that takes time
)
HERE = Path(__file__).parent / "eight_devices"


@pytest.mark.parametrize("name", sorted(file.stem for file in HERE.glob("*.py")))
def test_on_eight_devices(name):
    environment = {**os.environ, "XLA_FLAGS": FLAGS}  # noqa: TID251 - of a process that is a test
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", str(HERE / f"{name}.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
