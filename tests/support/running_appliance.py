"""A whole appliance for system tests: ``zccp serve`` as a child process, its port, its metrics, its log and its end.

Owns the child. Reads its standard output for the moment it is ready and its log for the ids of its processes.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import httpx
import yaml

from tests.support.logs import entries

ZCCP = (sys.executable, "-m", "appliance.cli")
START_S = 120.0
END_S = 60.0
_OWN = ("JAX_", "ZCCP_", "XDG_")


def clean_environment() -> dict[str, str]:
    """The environment without what tests set for themselves and without the user's own settings."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_OWN)}  # noqa: TID251


def write_config(folder: Path, home: Path, sections: Mapping[str, Mapping[str, object]] | None = None) -> Path:
    """A configuration file: the given home, a run directory of its own, any free port, and what ``sections`` say."""
    document: dict[str, dict[str, object]] = {
        "server": {"port": 0},
        "paths": {"home": str(home), "run": str(folder / "run")},
    }
    for name, values in (sections or {}).items():
        document.setdefault(name, {}).update(values)
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def zccp(*arguments: str, stdin: str = "", timeout_s: float = 900.0) -> "subprocess.CompletedProcess[str]":
    """Run one verb to its end."""
    return subprocess.run(
        [*ZCCP, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=clean_environment(),
        check=False,
    )


class RunningAppliance:
    """``zccp serve`` with a configuration file; use as a context, which waits for ready and stops it at the end."""

    def __init__(self, config: Path) -> None:
        self._log = config.parent / "serve.log"
        self._config = config
        self.url = ""

    def __enter__(self) -> Self:
        self._stderr = self._log.open("wb")
        self.process = subprocess.Popen(
            [*ZCCP, "serve", "--json", "--config", str(self._config)],
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=clean_environment(),
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.__exit__()
            raise RuntimeError(f"the appliance ended before it was ready:\n{self._log.read_text()}")
        self.url = json.loads(line)["url"]
        self.client = httpx.Client(base_url=self.url, timeout=120)
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(END_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if self.url:
            self.client.close()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._stderr.close()

    def log(self) -> list[dict[str, Any]]:
        """The log's lines so far."""
        return entries(self._log)

    def process_id(self, name: str) -> int:
        """The id of the newest child process of that name in the log."""
        return [int(line["pid"]) for line in self.log() if line["process"] == name][-1]

    def events(self, event: str) -> list[dict[str, Any]]:
        """The log's lines that say ``event``."""
        return [line for line in self.log() if line["event"] == event]

    def metrics(self) -> dict[str, float]:
        """Every sample of ``/metrics``, by its name with labels."""
        reply = self.client.get("/metrics")
        assert reply.status_code == 200, reply.text
        samples = (line.rsplit(" ", 1) for line in reply.text.splitlines() if line and not line.startswith("#"))
        return {name: float(value) for name, value in samples}

    def settled(self) -> dict[str, float]:
        """The metrics once nothing runs, waits or holds a page or a segment.

        Raises:
            AssertionError: something is still held after a generous while.
        """
        held = (
            "zccp_requests_running",
            "zccp_requests_waiting",
            "zccp_waiting_tokens",
            "zccp_kv_pages_used",
            "zccp_segments_used",
        )
        found: dict[str, float] = {}

        def is_idle() -> bool:
            found.update(self.metrics())
            return not any(found[name] for name in held)

        eventually(is_idle, lambda: f"still held: {[(name, found[name]) for name in held if found[name]]}")

        def is_told() -> bool:
            health = self.client.get("/health").json()
            return health["free_pages"] == health["total_pages"]

        eventually(is_told, lambda: "the workers are not told that all pages are free")
        return found


def eventually(condition: Callable[[], bool], otherwise: Callable[[], str], within_s: float = 30.0) -> None:
    """Wait for a condition.

    Raises:
        AssertionError: it does not come true; the message is ``otherwise``.
    """
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, otherwise()
        time.sleep(0.05)
