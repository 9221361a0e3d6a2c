"""The children of one run: the main process starts the engine and the workers, watches them, stops them in order.

Owns the children, their listening sockets and what is known of them. Never imports jax, never serves a request: it
accepts no connection, it only keeps the listening sockets open while workers come and go.

The order of a start: the engine and the workers; wait until every worker reports that the engine is ready; say so.
Until then a child that ends unasked ends the run with exit code 1 and the child's reason. Afterwards such a child is
started again in its place, after a pause that grows with its failures, and so is a child that falls silent or an engine
whose card reports an error; the others go on.

On SIGHUP the configuration is read again. A wrong one is refused; a right one replaces the workers, one after the other
(``appliance.rollout``), with what a reload can apply (``appliance.reload``). The engine goes on throughout.

The order of an end: the workers drain first, since they hold the clients; then the engine.
"""

import os
import selectors
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

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
from appliance.handoff import sweep
from appliance.host.card_errors import KernelLog, served_cards
from appliance.host.process import age_s, notify
from appliance.host.segments import remove_stale
from appliance.reload import ReloadRefusedError, accept
from appliance.reservation import Door, StartError
from appliance.rollout import Rollout
from appliance.supervision import Healing
from appliance.telemetry import NodeMetrics, clear_metrics, configure_logging, count_as, forget_gauges
from appliance.wishes import Wishes
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


@dataclass(frozen=True, slots=True)
class Place:
    """What all children of a run share."""

    directory: Path
    reservation: socket.socket
    model: Path
    segments_file: Path

    @property
    def port(self) -> int:
        """The TCP port at which workers accept."""
        return self.reservation.getsockname()[1]

    @property
    def metrics(self) -> Path:
        """Where all processes of the run count."""
        return self.directory / "metrics"

    @property
    def socket(self) -> Path:
        """Where the engine listens."""
        return self.directory / "engine.sock"


class Node:
    """The children of one run and what is known of them."""

    def __init__(
        self,
        config: ApplianceConfig,
        place: Place,
        commands: Commands,
        announce: Callable[[str], None],
        reread: Callable[[], ApplianceConfig],
    ) -> None:
        self._config = self._before = config
        self._place = place
        self._commands = commands
        self._announce = announce
        self._reread = reread
        self._selector = selectors.DefaultSelector()
        self._wishes = Wishes(self._selector)
        self._manager = notify_address()
        self._ready = False
        self._serving = False
        self._healing = Healing()
        self._epoch = 0
        self._doors: dict[int, Door] = {}
        self._rollout: Rollout | None = None
        clear_metrics(place.metrics)
        share_counts(place.metrics)
        count_as("main")
        self._metrics = NodeMetrics(CollectorRegistry())
        environment = engine_environment(config, place.metrics)
        self._engine = Child("engine", 0, commands.engine, environment, self._selector)
        self._workers = [self._make_worker(index, index) for index in range(config.server.workers)]
        self._kernel_log = self._open_kernel_log()

    def _make_worker(self, index: int, door: int) -> Child:
        environment = worker_environment(self._place.metrics)
        return Child("worker", index, self._commands.worker, environment, self._selector, door)

    def run(self) -> int:
        """Start everything, watch it, and end it in order; the exit code."""
        with self._wishes.heard():
            try:
                for child in self._children:
                    self._start(child)
                _log.info("processes started", after_s=round(age_s(), 3), workers=len(self._workers))
                return self._watch()
            finally:
                self._stop_all()
                for door in self._doors.values():
                    door.close()
                if self._kernel_log is not None:
                    self._kernel_log.close()
                self._selector.close()

    @property
    def _children(self) -> list[Child]:
        return [self._engine, *self._workers, *(self._rollout.children if self._rollout is not None else ())]

    def _start(self, child: Child) -> None:
        """Begin a life of a child.

        Raises:
            OSError: the system gives no process, pipe or file.
            StartError: its listening sockets cannot be had.
        """
        descriptors: tuple[int, ...] = ()
        if child is self._engine:
            self._epoch = max(self._epoch + 1, time.monotonic_ns())
        else:
            if child.door not in self._doors:
                private = self._config.proxy.socket_of(child.door) if self._config.proxy.directory else None
                self._doors[child.door] = Door(self._place.reservation, private)
            descriptors = self._doors[child.door].descriptors

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
                listeners=descriptors,
            )

        child.start(assign, self._place.directory, descriptors)

    # ------------------------------------------------------------------ while it runs

    def _watch(self) -> int:
        """Until a signal or a failure of the first start; the exit code."""
        interval_s = watchdog_interval_s()
        beat_s = interval_s / 2 if interval_s else TURN_S
        next_beat, next_sweep = 0.0, time.monotonic() + self._sweep_s
        while not self._wishes.stops:
            now = time.monotonic()
            if now >= next_beat:
                next_beat = now + beat_s
                if interval_s and self._healing.is_well(now, serving=self._serving or not self._ready):
                    notify(self._manager, "WATCHDOG=1")
            if now >= next_sweep:
                next_sweep = now + self._sweep_s
                remove_stale()
                self._weigh()
                sweep(self._config.proxy, time.clock_gettime(time.CLOCK_REALTIME))
            if not self._ready and all(child.last.state == "ready" for child in self._workers):
                self._say_ready()
                next_beat = min(next_beat, now + 0.05)
            late = self._rollout.wake_s if self._rollout is not None else next_beat
            due = min(next_beat, next_sweep, now + TURN_S, late, *(child.wake_s for child in self._children))
            ended = self._poll(max(0.0, due - time.monotonic()))
            if ended and not self._ready:
                for child, how in ended.items():
                    _log.error("a child process ended; the appliance stops", child=child.name, ended=how)
                return 1
            if not self._wishes.stops:
                self._mend(ended)
                self._reload(time.monotonic())
        return 0

    @property
    def _sweep_s(self) -> float:
        return self._config.shared_memory.cleanup_interval_ms / 1000

    def _mend(self, ended: dict[Child, str]) -> None:
        """Plan a new life for what has ended, end what hangs, start what is due, and tell of what changed."""
        now = time.monotonic()
        for child, how in ended.items():
            self._deal_with_end(child, how, now)
        self._end_silent(now)
        for child in self._children:
            child.kill_if_due(now)
            if child.is_due(now):
                child.restarts += 1
                self._metrics.restarts.labels(child.role).inc()
                try:
                    self._start(child)
                except (OSError, StartError) as error:
                    self._plan_restart(child, f"it cannot be started: {_words(error)}", now)
        self._tell_change()

    def _deal_with_end(self, child: Child, how: str, now: float) -> None:
        """Whatever ended: a newcomer of a reload, a worker that gave way, or one that is to be started again."""
        rollout = self._rollout
        if rollout is not None and child is rollout.newcomer:
            self._give_up_reload(how, now)
        elif rollout is not None and rollout.has_left(child):
            forget_gauges(self._place.metrics, child.name)
        elif rollout is not None and rollout.is_replaced_next(child):
            _log.error("a child process ended; the one that replaces it is starting", child=child.name, ended=how)
            forget_gauges(self._place.metrics, child.name)
        else:
            self._plan_restart(child, how, now)

    def _end_silent(self, now: float) -> None:
        """End a child that hangs: the engine, or a worker that serves; one that gives way has its own deadline."""
        limits = {self._engine: ("engine.step_timeout_s", self._config.engine.step_timeout_s)}
        limits |= dict.fromkeys(self._workers, ("server.worker_timeout_s", self._config.server.worker_timeout_s))
        for child, (key, limit_s) in limits.items():
            silent_s = child.silent_s(now)
            if 0 < limit_s < silent_s:
                self._give_up(child, f"no sign of life for {silent_s:.0f} s, {key} is {limit_s:g}", now)

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
        elif (door := self._doors.pop(child.door, None)) is not None:
            door.close()  # so that clients and nginx are sent to another worker at once

    def _give_up(self, child: Child, cause: str, now: float) -> None:
        if child.doom(cause, now):
            _log.error(f"the {child.role} is ended", child=child.name, cause=cause)
            if child is self._engine:
                self._metrics.engine_ready.set(0)

    def _weigh(self) -> None:
        """Say how much memory the engine and the workers have, and had when they were ready."""
        for name, children in (("engine", [self._engine]), ("workers", self._workers)):
            weights = [child.weigh() for child in children if child.ready_since_s is not None]
            self._metrics.resident.labels(name).set(sum(now for now, _ in weights))
            self._metrics.resident_when_ready.labels(name).set(sum(first for _, first in weights))

    def _tell_change(self) -> None:
        """Tell the service manager and the metrics when requests begin or cease to be served."""
        ready = sum(child.is_alive and child.last.state == "ready" for child in self._workers)
        lost = any(child.is_alive and child.last.state == "lost" for child in self._workers)
        serving = self._ready and self._engine.ready_since_s is not None and ready > 0 and not lost
        self._metrics.workers_ready.set(ready)
        if serving == self._serving:
            return
        self._serving = serving
        self._weigh()
        if serving:
            write_cause(self._place.socket, "")
        notify(self._manager, f"STATUS=serving on port {self._place.port}" if serving else "STATUS=recovering")

    def _say_ready(self) -> None:
        host, port = self._config.server.host, self._place.port
        self._ready = self._serving = True
        self._weigh()
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
                self._wishes.wake()
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
            self._give_up(self._engine, str(errors[0]), time.monotonic())

    # ------------------------------------------------------------------ a reload

    def _reload(self, now: float) -> None:
        """Begin a reload that was asked for, or go on with the one under way."""
        if self._rollout is None:
            if not (self._ready and self._wishes.take_reload() and self._take_configuration()):
                return
            stamp = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
            notify(self._manager, "RELOADING=1", f"MONOTONIC_USEC={stamp}", "STATUS=reloading")
            self._rollout = Rollout(self._workers, self._make_worker)
        rollout = self._rollout
        swap = rollout.take_over(now, self._config.server.drain_s + WORKER_MARGIN_S)
        if swap is not None:
            old, new = swap
            self._workers[self._workers.index(old)] = new
            _log.info("a worker takes over", worker=new.name, instead_of=old.name, door=new.door)
        late = rollout.end_late(now)
        if late is not None:
            _log.error("a worker that gave way did not end in time and is killed", child=late.name)
        newcomer = rollout.next_newcomer()
        if newcomer is not None:
            try:
                self._start(newcomer)
            except (OSError, StartError) as error:
                self._give_up_reload(f"it cannot be started: {_words(error)}", now)
        elif rollout.is_done:
            self._rollout = None
            _log.info("reloaded", workers=rollout.replaced)
            self._tell_manager()

    def _take_configuration(self) -> bool:
        """Read the configuration again and take what a reload applies; whether it is right."""
        try:
            change = accept(self._config, self._reread)
        except ReloadRefusedError as error:
            _log.error("reload refused; everything goes on as before", cause=str(error))
            return False
        for key in change.waiting:
            _log.warning("a changed setting waits; restart the appliance for it to take effect", setting=key)
        if change.changes_nginx:
            _log.warning("nginx's configuration changes too; print it with `zccp config --nginx` and reload nginx")
        _log.info("reloading", settings=change.applied)
        self._before, self._config = self._config, change.config
        configure_logging(self._config.log.level, "main")
        return True

    def _give_up_reload(self, how: str, now: float) -> None:
        """Go on as before where a worker with the new settings cannot start."""
        assert self._rollout is not None
        rollout, self._rollout = self._rollout, None
        _log.error(
            "reload given up: a worker with the new settings cannot start; the others go on",
            ended=how,
            replaced=rollout.replaced,
        )
        if rollout.newcomer is not None:
            forget_gauges(self._place.metrics, rollout.newcomer.name)
        self._config = self._before
        configure_logging(self._config.log.level, "main")
        for worker in self._workers:
            if not worker.is_alive and not worker.is_planned:
                self._plan_restart(worker, "it was to be replaced", now)
        self._tell_manager()

    def _tell_manager(self) -> None:
        """Tell the service manager that a reload is over."""
        notify(self._manager, "READY=1", f"STATUS=serving on port {self._place.port}")

    # ------------------------------------------------------------------ the end

    def _stop_all(self) -> None:
        """Workers first, within the drain's deadline; then the engine; whoever does not end is killed."""
        notify(self._manager, "STOPPING=1", "STATUS=draining")
        wanted_s = self._config.server.drain_s if self._engine.is_alive else 0.0
        self._end(self._children[1:], wanted_s + WORKER_MARGIN_S)
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


def _words(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
