"""Everything that needs several devices: a process of its own each, in which the CPU counts as eight."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

DEVICES = "--xla_force_host_platform_device_count=8"
QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
"""For what takes longer to compile than to run."""
HERE = Path(__file__).parent / "eight_devices"


@pytest.mark.parametrize("name", sorted(file.stem for file in HERE.glob("*.py")))
def test_on_eight_devices(name):
    flags = DEVICES if name == "long_context" else f"{DEVICES} {QUICK}"
    environment = {**os.environ, "XLA_FLAGS": flags}  # noqa: TID251 - of a process that is a test
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", str(HERE / f"{name}.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
