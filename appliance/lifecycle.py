"""The main process of ``zccp serve``: starts the engine and the workers, watches them, stops them in order.

Owns the run's directory, the segment file, the port's reservation and the children. Never imports jax, never serves a
request itself.

The order of a start: check the host, reserve the port, make the run's directory and the segments, start the engine and
the workers, wait until every worker reports that the engine is ready, say so. Until then a child that ends unasked ends
the run with exit code 1 and the child's reason. Afterwards such a child is started again in its place, after a pause
that grows with its failures, and so is an engine that falls silent or whose card reports an error; the others go on.

The order of an end: the workers drain first, since they hold the clients; then the engine; then segments and directory
go.
"""

import os
import secrets
import selectors
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import structlog
from prometheus_client import CollectorRegistry

from appliance.assignment import Assignment, write_cause
from appliance.children import Child
from appliance.config import (
    ApplianceConfig,
    engine_environment,
    notify_address,
    share_counts,
    watchdog_interval_s,
    worker_environment,
)
from appliance.config_rules import host_problems
from appliance.handoff import directories, sweep
from appliance.host.card_errors import KernelLog, served_cards
from appliance.host.numa import Placement, choose, keep_to, read_topology
from appliance.host.process import age_s, notify
from appliance.host.segments import remove_stale
from appliance.reservation import StartError, make_run_directory, make_segments, reserve_port
from appliance.supervision import Healing
from appliance.telemetry import NodeMetrics, clear_metrics, count_as, forget_gauges
from planner.target import DEFAULT_TARGET, find_target

ENGINE_END_S = 2.0
"""Time the engine gets to end after the workers have."""
TURN_S = 1.0
"""Longest turn of the main loop."""
WORKER_MARGIN_S = 2.5
"""Time beyond the drain's deadline that workers get; the whole end stays within the deadline and 5 s."""

_log = structlog.get_logger("zccp.main")


@dataclass(frozen=True, slots=True)
class Commands:
    """How children are started; the path of the assignment is appended."""

    worker: tuple[str, ...] = (sys.executable, "-m", "appliance.worker")
    engine: tuple[str, ...] = (sys.executable, "-m", "appliance.engine_main")


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
            with make_segments(config.shared_memory, instance) as segments:
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

    @property
    def metrics(self) -> Path:
        """Where all processes of the run count."""
        return self.directory / "metrics"

    @property
    def socket(self) -> Path:
        """Where the engine listens."""
        return self.directory / "engine.sock"


class _Node:
    """The children of one run and what is known of them."""

    def __init__(self, place: _Place, commands: Commands, announce: Callable[[str], None]) -> None:
        self._place = place
        self._config = place.config
        self._announce = announce
        self._selector = selectors.DefaultSelector()
        self._wishes = _Wishes()
        self._manager = notify_address()
        self._ready = False
        self._serving = False
        self._healing = Healing()
        self._epoch = 0
        clear_metrics(place.metrics)
        share_counts(place.metrics)
        count_as("main")
        self._metrics = NodeMetrics(CollectorRegistry())
        environment = engine_environment(self._config, place.metrics)
        self._engine = Child("engine", 0, commands.engine, environment, self._selector)
        environment = worker_environment(place.metrics)
        self._workers = [
            Child("worker", index, commands.worker, environment, self._selector)
            for index in range(self._config.server.workers)
        ]
        self._kernel_log = self._open_kernel_log()

    def run(self) -> int:
        """Start everything, watch it, and end it in order; the exit code."""
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        old = {number: signal.signal(number, self._wishes.stop) for number in (signal.SIGTERM, signal.SIGINT)}
        old_wake = signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        self._selector.register(wake_read, selectors.EVENT_READ, None)
        try:
            for child in self._children:
                self._start(child)
            _log.info("processes started", after_s=round(age_s(), 3), workers=len(self._workers))
            code = self._watch()
        finally:
            self._stop_all()
            if self._kernel_log is not None:
                self._kernel_log.close()
            self._selector.close()
            signal.set_wakeup_fd(old_wake)
            for number, handler in old.items():
                signal.signal(number, handler)
            os.close(wake_read)
            os.close(wake_write)
        return code

    @property
    def _children(self) -> list[Child]:
        return [self._engine, *self._workers]

    def _start(self, child: Child) -> None:
        if child is self._engine:
            self._epoch = max(self._epoch + 1, time.monotonic_ns())

        def assign(notify_fd: int) -> Assignment:
            return Assignment(
                role=child.role,
                index=child.index,
                parent_pid=os.getpid(),
                notify_fd=notify_fd,
                epoch=self._epoch,
                port=self._place.port,
                segments_file=str(self._place.segments_file),
                socket=str(self._place.socket),
                metrics=str(self._place.metrics),
                model=str(self._place.model),
                config=self._config,
            )

        child.start(assign, self._place.directory)

    # ------------------------------------------------------------------ while it runs

    def _watch(self) -> int:
        """Until a signal or a failure of the first start; the exit code."""
        interval_s = watchdog_interval_s()
        beat_s = interval_s / 2 if interval_s else TURN_S
        sweep_s = self._config.shared_memory.cleanup_interval_ms / 1000
        next_beat, next_sweep = 0.0, time.monotonic() + sweep_s
        while not self._wishes.stops:
            now = time.monotonic()
            if now >= next_beat:
                next_beat = now + beat_s
                if interval_s and self._healing.is_well(now, serving=self._serving or not self._ready):
                    notify(self._manager, "WATCHDOG=1")
            if now >= next_sweep:
                next_sweep = now + sweep_s
                remove_stale()
                sweep(self._config.proxy, time.clock_gettime(time.CLOCK_REALTIME))
            if not self._ready and all(child.last.state == "ready" for child in self._workers):
                self._say_ready()
                next_beat = min(next_beat, now + 0.05)
            due = min(next_beat, next_sweep, now + TURN_S, *(child.wake_s for child in self._children))
            ended = self._poll(max(0.0, due - time.monotonic()))
            if ended and not self._ready:
                for child, how in ended.items():
                    _log.error("a child process ended; the appliance stops", child=child.name, ended=how)
                return 1
            if not self._wishes.stops:
                self._mend(ended)
        return 0

    def _mend(self, ended: dict[Child, str]) -> None:
        """Plan a new life for what has ended, end what hangs, start what is due, and tell of what changed."""
        now = time.monotonic()
        for child, how in ended.items():
            self._plan_restart(child, how, now)
        silent_s, limit_s = self._engine.silent_s(now), self._config.engine.step_timeout_s
        if 0 < limit_s < silent_s:
            self._give_up_engine(f"no sign of life for {silent_s:.0f} s, engine.step_timeout_s is {limit_s:g}", now)
        self._engine.kill_if_due(now)
        for child in self._children:
            if child.is_due(now):
                child.restarts += 1
                self._metrics.restarts.labels(child.role).inc()
                try:
                    self._start(child)
                except OSError as error:
                    self._plan_restart(child, f"it cannot be started: {error.strerror or error}", now)
        self._tell_change()

    def _plan_restart(self, child: Child, how: str, now: float) -> None:
        pause_s = child.retry_after_end(now)
        _log.error(
            "a child process ended; it is started again",
            child=child.name,
            ended=how,
            pause_s=pause_s,
            restarts=child.restarts,
        )
        forget_gauges(self._place.metrics, child.name)
        if child is self._engine:
            self._metrics.engine_ready.set(0)
            write_cause(self._place.socket, f"the engine ended and is started again: {how}")

    def _give_up_engine(self, cause: str, now: float) -> None:
        if self._engine.doom(cause, now):
            _log.error("the engine is ended", cause=cause)
            self._metrics.engine_ready.set(0)

    def _tell_change(self) -> None:
        """Tell the service manager and the metrics when requests begin or cease to be served."""
        ready = sum(child.is_alive and child.last.state == "ready" for child in self._workers)
        lost = any(child.is_alive and child.last.state == "lost" for child in self._workers)
        serving = self._ready and self._engine.ready_since_s is not None and ready > 0 and not lost
        self._metrics.workers_ready.set(ready)
        if serving == self._serving:
            return
        self._serving = serving
        if serving:
            write_cause(self._place.socket, "")
        notify(self._manager, f"STATUS=serving on port {self._place.port}" if serving else "STATUS=recovering")

    def _say_ready(self) -> None:
        host, port = self._config.server.host, self._place.port
        if not _answers(host, port):
            return
        self._ready = self._serving = True
        shown = f"[{host}]" if ":" in host else host
        self._announce(f"zccp is ready at http://{shown}:{port}")
        notify(self._manager, "READY=1", f"STATUS=serving on port {port}")

    def _poll(self, timeout_s: float) -> dict[Child, str]:
        """Deal with what happens within ``timeout_s``; the children that ended, and how."""
        ended: dict[Child, str] = {}
        for key, _ in self._selector.select(timeout_s):
            if isinstance(key.data, Child):
                how = key.data.handle(key.fd, time.monotonic())
                if how is not None:
                    ended[key.data] = how
            elif isinstance(key.data, KernelLog):
                self._read_kernel_log(key.data)
            else:
                os.read(key.fd, 4096)
        return ended

    # ------------------------------------------------------------------ errors of cards

    def _open_kernel_log(self) -> KernelLog | None:
        """The log in which the driver of the served cards reports; None without cards, or where it cannot be read."""
        if not find_target(self._config.engine.target or DEFAULT_TARGET).card:
            return None
        visible = engine_environment(self._config, self._place.metrics)["CUDA_VISIBLE_DEVICES"]
        try:
            log = KernelLog(served_cards(visible))
        except OSError as error:
            _log.warning(
                "errors of cards are not watched: the kernel's log cannot be read; give this user CAP_SYSLOG",
                cause=error.strerror,
            )
            return None
        self._selector.register(log, selectors.EVENT_READ, log)
        return log

    def _read_kernel_log(self, log: KernelLog) -> None:
        """End the engine when a card of its reports that it cannot go on; what comes later is of the same event."""
        try:
            errors = log.read()
        except OSError as error:
            self._selector.unregister(log)
            _log.warning("errors of cards are not watched any more", cause=error.strerror)
            return
        if errors and self._engine.ready_since_s is not None:
            self._give_up_engine(str(errors[0]), time.monotonic())

    # ------------------------------------------------------------------ the end

    def _stop_all(self) -> None:
        """Workers first, within the drain's deadline; then the engine; whoever does not end is killed."""
        notify(self._manager, "STOPPING=1", "STATUS=draining")
        wanted_s = self._config.server.drain_s if self._engine.is_alive else 0.0
        self._end(self._workers, wanted_s + WORKER_MARGIN_S)
        self._end([self._engine], ENGINE_END_S)

    def _end(self, children: list[Child], within_s: float) -> None:
        for child in children:
            child.terminate()
        asked = self._wishes.stops
        deadline = time.monotonic() + within_s
        while any(child.is_alive for child in children):
            left = deadline - time.monotonic()
            if left <= 0:
                break
            self._poll(min(left, 0.5))
            if self._wishes.stops > asked:
                asked = self._wishes.stops
                for child in children:
                    child.terminate()
        for child in children:
            if child.is_alive:
                _log.error("a child did not end in time and is killed", child=child.name)
                child.kill(time.monotonic())


def _answers(host: str, port: int) -> bool:
    """Whether somebody accepts connections there; an address for any interface is tried on the loopback."""
    target = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared, not bound
    try:
        with socket.create_connection((target, port), timeout=1.0):
            return True
    except OSError:
        return False
