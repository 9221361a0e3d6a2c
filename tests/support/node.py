"""The whole node for tests: a real main process, real workers with real HTTP, the real loop over the arithmetic model.

Owns the main process. Reads its standard output for the moment it is ready and its log for the ids of its processes.
"""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from planner.sequence import Sampling
from tests.support.arithmetic_model import continuation
from tests.support.logs import entries
from tests.support.serving_children import ByteCodec

ROOT = Path(__file__).resolve().parents[2]
MAIN = """
import json, sys
from pathlib import Path
from appliance.config import build
from appliance.lifecycle import Commands, StartError, serve
from appliance.telemetry import configure_logging
config, given = Path(sys.argv[1]), json.loads(sys.argv[2])
configure_logging("info", "main")
run = (sys.executable, "-m", "tests.support.serving_children")
kernel_log = given.pop("kernel_log")
if kernel_log:
    from tests.support.piped_log import watch_cards
    watch_cards(Path(kernel_log))
commands = Commands(worker=(*run, "worker"), engine=(*run, *given.pop("command")))
try:
    def read():
        return build(json.loads(config.read_text()), {})
    sys.exit(serve(read(), Path("/no-model"), commands, lambda line: print(line, flush=True), read))
except StartError as error:
    print(f"StartError: {error}", file=sys.stderr)
    sys.exit(1)
"""


@dataclass
class Node:
    process: "subprocess.Popen[str]"
    config: Path
    log: Path
    home: Path
    run: Path
    workers: int
    url: str = ""

    def wait_ready(self) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("zccp is ready at http://127.0.0.1:"), self.lines()
        self.url = line.split()[-1]

    def lines(self) -> list[dict]:
        return entries(self.log)

    def children(self) -> dict[str, int]:
        """The process ids of the children that are alive, by name."""
        found: dict[str, int] = {}
        for pid in map(int, Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()):
            command = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            if command[-2:-1] and command[-2].endswith(".json"):
                found[Path(command[-2]).stem] = pid
        return found

    def events(self, event: str) -> list[dict]:
        """The lines of the log that say ``event``."""
        return [line for line in self.lines() if line["event"] == event]

    def ready(self) -> httpx.Response:
        return httpx.get(f"{self.url}/health/ready")

    def wait_healed(self, engines: int = 0, workers: int = 0) -> None:
        """Wait until so many restarts have happened and everything takes requests."""
        wanted = {
            'zccp_restarts_total{process="engine"}': engines,
            'zccp_restarts_total{process="worker"}': workers,
            "zccp_engine_ready": 1,
            "zccp_workers_ready": self.workers,
        }

        def is_so() -> bool:
            try:
                found = self.metrics()
            except httpx.TransportError:
                return False  # the worker that was asked is no more
            return all(found.get(name) == value for name, value in wanted.items())

        wait_for(is_so)

    def metrics(self) -> dict[str, float]:
        """Every sample of ``/metrics``, by its name with labels."""
        text = httpx.get(f"{self.url}/metrics").text
        samples = (line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
        return {name: float(value) for name, value in samples}

    def footprint(self) -> tuple[list[str], list[str], int]:
        """What the node holds of the system: files of its run, segment files, descriptors of the main process."""
        files = sorted(str(path.relative_to(self.run)) for path in self.run.rglob("*"))
        segments = sorted(path.name for path in Path("/dev/shm").glob(f"zccp-{self.process.pid}-*"))
        return files, segments, len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def reload(self, **sections: dict) -> None:
        """Change the configuration and ask for a reload."""
        config = json.loads(self.config.read_text())
        for section, values in sections.items():
            config.setdefault(section, {}).update(values)
        self.config.write_text(json.dumps(config))
        self.process.send_signal(signal.SIGHUP)

    def wait_reloaded(self, times: int) -> None:
        """Wait until so many reloads are over."""
        wait_for(lambda: len(self.events("reloaded")) == times, 90.0)

    def end(self, number: int = signal.SIGTERM, within_s: float = 20.0) -> int:
        self.process.send_signal(number)
        return self.process.wait(within_s)


@contextmanager
def node(
    tmp_path: Path,
    *,
    delay_ms: float = 0.0,
    engine: tuple[str, ...] = (),
    step_timeout_s: float = 60.0,
    kernel_log: str = "",
    **sections: dict,
) -> Iterator[Node]:
    server = {"port": 0, "drain_s": 5, **sections.pop("server", {})}
    given = {"command": engine or ("engine", str(delay_ms)), "kernel_log": kernel_log}
    config = {
        "engine": {"step_timeout_s": step_timeout_s},
        "server": server,
        "shared_memory": {"segment_count": 16},
        "paths": {"home": str(tmp_path / "home"), "run": str(tmp_path / "run")},
        **sections,
    }
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    log = tmp_path / "log.txt"
    with (
        log.open("w") as stderr,
        subprocess.Popen(
            [sys.executable, "-c", MAIN, str(file), json.dumps(given)],
            stdout=subprocess.PIPE, stderr=stderr, text=True, cwd=ROOT,
        ) as process,
    ):  # fmt: skip
        running = Node(process, file, log, tmp_path / "home", tmp_path / "run", server.get("workers", 1))
        try:
            yield running
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


def ask(url: str, prompt: str, max_tokens: int, **more: object) -> httpx.Response:
    body = {"model": "arithmetic", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "seed": 1, **more}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=30.0)


def expected(prompt: str, max_tokens: int) -> str:
    ids = ByteCodec().encode(prompt, parse_special=False)
    answer = continuation(ids, Sampling(max_tokens=max_tokens, temperature=0.0, seed=1))
    return "".join(chr(32 + token) for token in answer)


@contextmanager
def stream(url: str, prompt: str, max_tokens: int) -> Iterator[Iterator[str]]:
    body = {
        "model": "arithmetic", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "seed": 1, "stream": True,
    }  # fmt: skip
    with httpx.Client(timeout=30.0) as client, client.stream("POST", f"{url}/v1/completions", json=body) as response:
        assert response.status_code == 200
        yield (line[6:] for line in response.iter_lines() if line.startswith("data: "))


def text_of(events: list[str]) -> str:
    return "".join(choice["text"] for event in events for choice in json.loads(event).get("choices", ()))


def wait_for(condition: Callable[[], object], within_s: float = 15.0) -> None:
    """Wait until a condition is true.

    Raises:
        AssertionError: it never was.
    """
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        time.sleep(0.02)
