"""Commands of the host: run so that a failure is told, and devices that are mounted for a while."""

import os
import subprocess
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path


class CommandError(RuntimeError):
    """A command of the host failed; the message names it, what it said itself stands above."""


def run(command: Sequence[str]) -> str:
    """Standard output of a command; one of zccp is told this host's configuration.

    Raises:
        CommandError: it failed.
    """
    environment = {**os.environ, "ZCCP_CONFIG": "/etc/zccp/config.yaml"}  # noqa: TID251 - of the appliance's command
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=False)
    if done.returncode:
        told = f"{' '.join(command)[:100]} failed with exit code {done.returncode}; its reason is above"
        raise CommandError(told)
    return done.stdout


@contextmanager
def mounted(device: Path, place: Path, *options: str) -> Generator[Path]:
    """Mount a device's file system for the block; nothing on it is run or is a device.

    Raises:
        CommandError: it has none that can be mounted.
    """
    place.mkdir(parents=True, exist_ok=True)
    run(["mount", "-o", ",".join((*options, "nosuid", "nodev", "noexec")), str(device), str(place)])
    try:
        yield place
    finally:
        run(["umount", str(place)])
