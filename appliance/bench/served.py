"""Served: a real ``zccp serve`` process for a bench, on a free loopback port, with its programs built before.

Owns the process, its configuration file and its run directory, all of which end with the block. Reads the metrics
through HTTP like anybody else. Never imports jax.
"""

import json
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from appliance.bench.runner import BenchError
from appliance.config import ApplianceConfig
from appliance.config_rules import plain

START_TIMEOUT_S = 120.0
END_TIMEOUT_S = 45.0
SERVE = ("appliance.cli", "serve")
"""The module and the verb that a bench starts; ``--config FILE`` follows."""
_POLL_S = 0.01
_LOG_TAIL = 2000


@dataclass(frozen=True, slots=True)
class Served:
    """A running appliance. ``ready_s`` is the time from the start of its process to the first ready answer."""

    url: str
    model: str
    pid: int
    ready_s: float
    log: Path

    def metrics(self) -> dict[str, float]:
        """Every sample of ``/metrics`` by name, summed over its labels.

        Raises:
            BenchError: the appliance does not answer.
        """
        try:
            answer = httpx.get(f"{self.url}/metrics", timeout=10).raise_for_status()
        except httpx.HTTPError as error:
            raise BenchError(f"{self.url}/metrics: {error}; the log ends: {tail(self.log)}") from error
        return sum_samples(answer.text)

    def log_lines(self) -> list[dict[str, Any]]:
        """The lines of its processes' log so far."""
        whole, _, _ = self.log.read_text(errors="replace").rpartition("\n")
        return [json.loads(line) for line in whole.splitlines() if line.startswith("{")]


def sum_samples(text: str) -> dict[str, float]:
    """Samples of a Prometheus exposition by name, summed over labels."""
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return sums


def bench_document(
    config: ApplianceConfig, scratch: Path, port: int, overrides: Mapping[str, Mapping[str, object]]
) -> dict[str, dict[str, object]]:
    """The configuration of a bench's appliance: the operator's, without keys, on loopback, quiet, in ``scratch``."""
    document: dict[str, dict[str, object]] = json.loads(json.dumps(plain(config)))
    forced: dict[str, dict[str, object]] = {
        "server": {"host": "127.0.0.1", "port": port},
        "auth": {"keys_file": str(scratch / "keys.json")},
        "log": {"level": "warning"},
        "paths": {"run": str(scratch / "run")},
    }
    for section, values in (*forced.items(), *overrides.items()):
        document[section] = {**document[section], **values}
    return document


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def scratch_folder() -> Generator[Path]:
    """A folder with a short path (sockets lie in it) that goes with the block."""
    folder = Path(tempfile.mkdtemp(prefix="zccp-bench-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def build_store(config: ApplianceConfig, overrides: Mapping[str, Mapping[str, object]]) -> None:
    """Run ``zccp build`` for a configuration; does nothing where everything is current.

    Raises:
        BenchError: it failed.
    """
    with scratch_folder() as scratch:
        file = scratch / "config.yaml"
        file.write_text(json.dumps(bench_document(config, scratch, 0, overrides)))
        command = [sys.executable, "-m", "appliance.cli", "build", "--config", str(file)]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)  # noqa: S603 - our own program
        if done.returncode:
            raise BenchError(f"zccp build failed with exit code {done.returncode}; its reason is above")


@contextmanager
def serving(
    config: ApplianceConfig,
    overrides: Mapping[str, Mapping[str, object]] | None = None,
    clock: Callable[[], float] = time.monotonic,
    module: Sequence[str] = SERVE,
) -> Generator[Served]:
    """Start the appliance, wait until it is ready, give it, and end it.

    Args:
        config: the configuration it starts from.
        overrides: section -> key -> value on top of it.
        clock: monotonic seconds.
        module: what is run, where it is not the appliance as it is served.

    Raises:
        BenchError: it ended or was not ready in time; the message has the end of its log.
    """
    with scratch_folder() as scratch:
        port = free_port()
        file, log = scratch / "config.yaml", scratch / "log"
        file.write_text(json.dumps(bench_document(config, scratch, port, overrides or {})))
        command = [sys.executable, "-m", *module, "--config", str(file)]
        with log.open("wb") as sink:
            began_s = clock()
            process = subprocess.Popen(command, stdout=sink, stderr=sink)  # noqa: S603 - our own program
        url = f"http://127.0.0.1:{port}"
        try:
            wait_until_ready(process, f"{url}/health/ready", log, clock)
            ready_s = clock() - began_s
            model = httpx.get(f"{url}/v1/models", timeout=10).json()["data"][0]["id"]
            yield Served(url, model, process.pid, ready_s, log)
        finally:
            end(process)


def wait_until_ready(
    process: "subprocess.Popen[bytes]",
    url: str,
    log: Path,
    clock: Callable[[], float] = time.monotonic,
    timeout_s: float = START_TIMEOUT_S,
) -> None:
    """Ask ``url`` until it answers 200.

    Raises:
        BenchError: the process ended, or the time is over.
    """
    deadline_s = clock() + timeout_s
    with httpx.Client(timeout=5) as client:
        while clock() < deadline_s:
            if process.poll() is not None:
                raise BenchError(f"{url}: the server ended with {process.returncode}; its log ends: {tail(log)}")
            try:
                if client.get(url).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(_POLL_S)
    raise BenchError(f"{url} was not ready after {timeout_s:g} s; its log ends: {tail(log)}")


def end(process: "subprocess.Popen[bytes]") -> None:
    """Ask a process to end, and kill it if it does not within its time."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def tail(log: Path) -> str:
    """The end of a log file."""
    return log.read_text(errors="replace")[-_LOG_TAIL:].strip() if log.exists() else "(no log)"
