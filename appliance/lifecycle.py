"""The main process of ``zccp serve``: starts the engine and the workers, watches them, stops them in order.

Owns the run's directory, the segment file, the port's reservation and the children. Never imports jax, never serves a
request itself.

The order of a start: check the host, reserve the port, make the run's directory and the segments, start the engine and
the workers, wait until every worker reports that the engine is ready, say so. The order of an end: the workers drain
first, since they hold the clients; then the engine; then segments and directory go. Any child that ends unasked ends
the run with exit code 1: a service manager starts it again.
"""

import fcntl
import os
import secrets
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import structlog

from appliance.assignment import Assignment, Notice, read_notices, write_assignment
from appliance.config import (
    ApplianceConfig,
    engine_environment,
    notify_address,
    watchdog_interval_s,
    worker_environment,
)
from appliance.config_rules import host_problems
from appliance.handoff import directories, sweep
from appliance.host.numa import Placement, choose, keep_to, read_topology
from appliance.host.process import age_s, ending, notify
from appliance.host.segments import SegmentError, SegmentFile, remove_stale
from appliance.telemetry import clear_metrics
from planner.target import DEFAULT_TARGET, find_target

ENGINE_END_S = 2.0
"""Time the engine gets to end after the workers have."""
WORKER_MARGIN_S = 2.5
"""Time beyond the drain's deadline that workers get; the whole end stays within the deadline and 5 s."""

_log = structlog.get_logger("zccp.main")


class StartError(RuntimeError):
    """The appliance cannot start; the message names the cause and the remedy."""


@dataclass(frozen=True, slots=True)
class Commands:
    """How children are started; the path of the assignment is appended."""

    worker: tuple[str, ...] = (sys.executable, "-m", "appliance.worker")
    engine: tuple[str, ...] = (sys.executable, "-m", "appliance.engine_main")


@dataclass(slots=True, eq=False)
class _Child:
    """One child process with what it last said."""

    name: str
    process: "subprocess.Popen[bytes]"
    pidfd: int
    notices: int
    buffer: bytearray = field(default_factory=bytearray)
    last: Notice = field(default_factory=lambda: Notice(state="starting"))
    alive: bool = True


@dataclass(slots=True)
class _Wishes:
    """What signals asked for: the number of requests to stop."""

    stops: int = 0

    def stop(self, _number: int, _frame: FrameType | None) -> None:
        """Signal handler."""
        self.stops += 1


def serve(
    config: ApplianceConfig,
    model: Path,
    commands: Commands | None = None,
    announce: Callable[[str], None] | None = None,
) -> int:
    """Run the appliance until SIGTERM, SIGINT or a failure.

    Args:
        config: checked configuration.
        model: folder of the served model in the model store.
        commands: how children are started.
        announce: called with one line when everything is ready; the default writes it to standard error.

    Returns:
        0 after a signal, 1 when a child failed.

    Raises:
        StartError: something the start needs is missing or taken.
        HandoffDirectoryError: what nginx and the workers share is not fit, or taken.
    """
    problems = host_problems(config, keys_present=config.keys_file.exists())
    if problems:
        raise StartError("\n".join(problems))
    for path in remove_stale():
        _log.info("removed the segments of a dead instance", file=str(path))
    placement = place_near_gpu(config)
    keep_to(placement)
    _log.info("placement", placed=placement.evidence, faults=[fault for fault, _ in placement.faults])
    with reserve_port(config.server.host, config.server.port) as reservation, directories(config.proxy):
        port = reservation.getsockname()[1]
        instance = f"{os.getpid()}-{secrets.token_hex(4)}"
        directory, lock = make_run_directory(config.run, instance)
        try:
            with _make_segments(config, instance) as segments:
                place = _Place(config, directory, port, model, segments.path)
                return _Node(place, commands or Commands(), announce or _to_stderr).run()
        finally:
            shutil.rmtree(directory, ignore_errors=True)
            os.close(lock)


def place_near_gpu(config: ApplianceConfig, root: Path = Path("/")) -> Placement:
    """Where this configuration's processes belong on this host; children and shared memory follow the main process."""
    on_gpu = find_target(config.engine.target or DEFAULT_TARGET).card and config.engine.near_gpu
    first = config.gpu.device_id
    devices = range(first, first + config.engine.devices) if on_gpu else range(0)
    return choose(read_topology(root), devices, os.sched_getaffinity(0))


def reserve_port(host: str, port: int) -> socket.socket:
    """Bind, without listening, the address that the workers will share; keeps everybody else off it.

    Raises:
        StartError: the address is in use, not allowed or not this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
            if port == 0:
                address = probe.getsockname()
        reservation = socket.socket(family, kind | socket.SOCK_CLOEXEC, protocol)
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reservation.bind(address)
    except OSError as error:
        raise StartError(
            f"cannot listen on {host} port {port}: {error.strerror or error};"
            " stop what uses it, or choose another with --port or server.port"
        ) from error
    return reservation


def make_run_directory(parent: Path, instance: str) -> tuple[Path, int]:
    """Make the directory of this run, 0700, and remove those of dead ones.

    Returns:
        The directory and a descriptor whose lock says that this run is alive.

    Raises:
        StartError: it cannot be made.
    """
    directory = parent / instance
    try:
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory.mkdir(mode=0o700)
        lock = os.open(directory / "alive", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise StartError(f"run directory {directory}: {error.strerror}; choose another paths.run") from error
    for other in parent.iterdir():
        if other != directory and _is_dead(other):
            shutil.rmtree(other, ignore_errors=True)
    return directory, lock


def _is_dead(directory: Path) -> bool:
    """Whether a run's directory has a lock that nobody holds; without a lock it may be starting just now."""
    try:
        descriptor = os.open(directory / "alive", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def _make_segments(config: ApplianceConfig, instance: str) -> SegmentFile:
    memory = config.shared_memory
    try:
        return SegmentFile.create(instance, memory.segment_count, memory.segment_size_kb * 1024)
    except SegmentError as error:
        raise StartError(str(error)) from error


def _to_stderr(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


@dataclass(frozen=True, slots=True)
class _Place:
    """What all children of a run share."""

    config: ApplianceConfig
    directory: Path
    port: int
    model: Path
    segments_file: Path


class _Node:
    """The children of one run and what is known of them."""

    def __init__(self, place: _Place, commands: Commands, announce: Callable[[str], None]) -> None:
        self._place = place
        self._config = place.config
        self._commands = commands
        self._announce = announce
        self._selector = selectors.DefaultSelector()
        self._children: list[_Child] = []
        self._wishes = _Wishes()
        self._manager = notify_address()
        self._ready = False
        self._epoch = time.monotonic_ns()

    def run(self) -> int:
        """Start everything, watch it, and end it in order; the exit code."""
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        old = {number: signal.signal(number, self._wishes.stop) for number in (signal.SIGTERM, signal.SIGINT)}
        old_wake = signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        self._selector.register(wake_read, selectors.EVENT_READ, None)
        try:
            self._start_all()
            code = self._watch()
        finally:
            self._stop_all()
            self._selector.close()
            signal.set_wakeup_fd(old_wake)
            for number, handler in old.items():
                signal.signal(number, handler)
            os.close(wake_read)
            os.close(wake_write)
        return code

    @property
    def _workers(self) -> list[_Child]:
        return self._children[1:]

    def _start_all(self) -> None:
        metrics = self._place.directory / "metrics"
        clear_metrics(metrics)
        self._start("engine", 0, self._commands.engine, engine_environment(self._config, metrics))
        for index in range(self._config.server.workers):
            self._start("worker", index, self._commands.worker, worker_environment(metrics))
        _log.info("processes started", after_s=round(age_s(), 3), workers=self._config.server.workers)

    def _start(self, role: str, index: int, command: Iterable[str], environment: dict[str, str]) -> None:
        read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        assignment = Assignment(
            role="worker" if role == "worker" else "engine",
            index=index,
            parent_pid=os.getpid(),
            notify_fd=write,
            epoch=self._epoch,
            port=self._place.port,
            segments_file=str(self._place.segments_file),
            socket=str(self._place.directory / "engine.sock"),
            metrics=str(self._place.directory / "metrics"),
            model=str(self._place.model),
            config=self._config,
        )
        path = self._place.directory / f"{assignment.name}.json"
        write_assignment(path, assignment)
        try:
            process = subprocess.Popen(  # noqa: S603 - our own programs
                [*command, str(path)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=(write,),
                process_group=0,
            )
        finally:
            os.close(write)
        child = _Child(assignment.name, process, os.pidfd_open(process.pid), read)
        self._children.append(child)
        self._selector.register(child.pidfd, selectors.EVENT_READ, child)
        self._selector.register(child.notices, selectors.EVENT_READ, child)

    def _watch(self) -> int:
        """Until a signal or the end of a child; the exit code."""
        interval_s = watchdog_interval_s()
        beat_s = interval_s / 2 if interval_s else 1.0
        sweep_s = self._config.shared_memory.cleanup_interval_ms / 1000
        next_beat, next_sweep = 0.0, time.monotonic() + sweep_s
        while not self._wishes.stops:
            now = time.monotonic()
            if now >= next_beat:
                next_beat = now + beat_s
                if interval_s and self._is_healthy():
                    notify(self._manager, "WATCHDOG=1")
            if now >= next_sweep:
                next_sweep = now + sweep_s
                remove_stale()
                sweep(self._config.proxy, time.clock_gettime(time.CLOCK_REALTIME))
            if not self._ready and all(child.last.state == "ready" for child in self._workers):
                self._say_ready()
                next_beat = min(next_beat, now + 0.05)
            self._poll(max(0.0, min(next_beat, next_sweep) - time.monotonic()))
            dead = [child for child in self._children if not child.alive]
            if dead:
                for child in dead:
                    reason = f": {child.last.reason}" if child.last.state == "failed" else ""
                    _log.error(
                        "a child process ended; the appliance stops",
                        child=child.name,
                        ended=ending(child.process.returncode) + reason,
                    )
                return 1
        return 0

    def _is_healthy(self) -> bool:
        """Whether no worker has lost the engine; what starts or drains counts as healthy."""
        return all(child.last.state != "lost" for child in self._workers)

    def _say_ready(self) -> None:
        host, port = self._config.server.host, self._place.port
        if not _answers(host, port):
            return
        self._ready = True
        shown = f"[{host}]" if ":" in host else host
        self._announce(f"zccp is ready at http://{shown}:{port}")
        notify(self._manager, "READY=1", f"STATUS=serving on port {port}")

    def _poll(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            child: _Child | None = key.data
            if child is None:
                os.read(key.fd, 4096)
            elif key.fd == child.notices:
                self._hear(child)
            else:
                self._reap(child)

    def _hear(self, child: _Child) -> None:
        data = os.read(child.notices, 65536)
        if not data:
            self._selector.unregister(child.notices)
            return
        child.buffer += data
        for notice in read_notices(child.buffer):
            child.last = notice
            _log.debug("child says", child=child.name, state=notice.state, reason=notice.reason)

    def _reap(self, child: _Child) -> None:
        child.process.wait()
        child.alive = False
        self._selector.unregister(child.pidfd)
        os.close(child.pidfd)

    def _stop_all(self) -> None:
        """Workers first, within the drain's deadline; then the engine; whoever does not end is killed."""
        notify(self._manager, "STOPPING=1", "STATUS=draining")
        engine_alive = bool(self._children) and self._children[0].alive
        wanted_s = self._config.server.drain_s if engine_alive else 0.0
        self._end(self._workers, wanted_s + WORKER_MARGIN_S)
        self._end(self._children[:1], ENGINE_END_S)
        for child in self._children:
            if child.notices in self._selector.get_map():
                self._selector.unregister(child.notices)
            os.close(child.notices)

    def _end(self, children: list[_Child], within_s: float) -> None:
        living = [child for child in children if child.alive]
        for child in living:
            child.process.terminate()
        asked = self._wishes.stops
        deadline = time.monotonic() + within_s
        while any(child.alive for child in living):
            left = deadline - time.monotonic()
            if left <= 0:
                break
            self._poll(min(left, 0.5))
            if self._wishes.stops > asked:
                asked = self._wishes.stops
                for child in living:
                    if child.alive:
                        child.process.terminate()
        for child in living:
            if child.alive:
                _log.error("a child did not end in time and is killed", child=child.name)
                child.process.kill()
                self._reap(child)


def _answers(host: str, port: int) -> bool:
    """Whether somebody accepts connections there; an address for any interface is tried on the loopback."""
    target = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared, not bound
    try:
        with socket.create_connection((target, port), timeout=1.0):
            return True
    except OSError:
        return False
