"""The engine process: loads, says when it is ready, runs THE loop, ends when told.

Asked with ``DUMP_SIGNAL``, which works even while the engine's thread waits for the device, it writes to standard error
in which file, line and function each of its threads is.

Owns the process around ``appliance.engine``: signals, the gateway's life, what is reported when something fails. What
is loaded comes from a builder given as an argument, so that this module is the same whatever runs behind it.
"""

import faulthandler
import gc
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Protocol

import structlog
from prometheus_client import CollectorRegistry

from appliance.assignment import Assignment, Notice, read_assignment, send_notice, send_pulse
from appliance.engine import Engine, EngineFailedError
from appliance.engine_metrics import EngineObserver
from appliance.gateway_engine import EngineGateway, GatewayError
from appliance.host.process import DUMP_SIGNAL, age_s, die_with_parent
from appliance.host.segments import SegmentError, SegmentFile
from appliance.submission import ModelLimits
from appliance.telemetry import Metrics, configure_logging, count_as

END_S = 1.0
"""Time that sequences get after SIGTERM: the workers have drained before, so there should be none."""

_log = structlog.get_logger("zccp.engine")


class BuildEngine(Protocol):
    """Loads everything and returns an engine on the given gateway, with the limits of its model."""

    def __call__(
        self,
        assignment: Assignment,
        gateway: EngineGateway,
        observer: EngineObserver,
        announce: Callable[[str], None],
    ) -> tuple[Engine, ModelLimits]:
        """Load.

        Raises:
            Exception: of any kind; its message is what operators read.
        """
        ...


@dataclass(slots=True)
class _Signals:
    """What SIGTERM does: before there is an engine it ends the process, afterwards it drains the engine."""

    engine: Engine | None = None

    def terminate(self, _number: int, _frame: FrameType | None) -> None:
        """Signal handler.

        Raises:
            SystemExit: while loading.
        """
        if self.engine is None:
            raise SystemExit(0)
        self.engine.drain(time.monotonic() + END_S)


class _Phases:
    """How long each part of a start takes. What was before this process came here is the first, planning the second."""

    def __init__(self, age_s: Callable[[], float] = age_s) -> None:
        self._age_s = age_s
        self._entered: list[tuple[str, float]] = [("starting the process", 0.0), ("planning", age_s())]

    def enter(self, what: str) -> None:
        """The next part begins."""
        self._entered.append((what, self._age_s()))

    def seconds(self) -> dict[str, float]:
        """Seconds of each part, in order; the last one ends now."""
        ends = [began_s for _, began_s in self._entered[1:]] + [self._age_s()]
        return {what: round(end_s - began_s, 3) for (what, began_s), end_s in zip(self._entered, ends, strict=True)}


def run(assignment: Assignment, build: BuildEngine) -> int:
    """Load and serve until SIGTERM.

    Returns:
        0 after a drain, 1 when loading or a step failed.
    """
    die_with_parent(assignment.parent_pid)
    signals = _Signals()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signals.terminate)
    faulthandler.register(DUMP_SIGNAL, all_threads=True)
    configure_logging(assignment.config.log.level, assignment.name)
    count_as(assignment.name)
    try:
        segments = SegmentFile.attach(
            Path(assignment.segments_file), assignment.config.num_segments, assignment.stride_bytes
        )
        gateway = EngineGateway(
            Path(assignment.socket), segments, assignment.epoch, pulse=lambda: send_pulse(assignment.notify_fd)
        )
    except (SegmentError, GatewayError) as error:
        return _failed(assignment, error)
    try:
        return _serve(assignment, build, gateway, signals)
    finally:
        gateway.close()
        segments.close()


def _serve(assignment: Assignment, build: BuildEngine, gateway: EngineGateway, signals: _Signals) -> int:
    phases = _Phases()

    def announce(reason: str) -> None:
        phases.enter(reason)
        _log.info("starting", doing=reason)
        gateway.announce(reason)

    observer = EngineObserver(Metrics(CollectorRegistry()))
    try:
        engine, limits = build(assignment, gateway, observer, announce)
    except Exception as error:  # noqa: BLE001 - whatever fails here is what the operator must read
        return _failed(assignment, error)
    gc.collect()
    gc.freeze()
    gateway.open(limits)
    signals.engine = engine
    send_notice(assignment.notify_fd, Notice(state="ready"))
    seconds = phases.seconds()
    _log.info("engine ready", after_s=round(sum(seconds.values()), 3), phases=seconds)
    try:
        engine.run()
    except EngineFailedError as error:
        return _failed(assignment, error)
    return 0


def _failed(assignment: Assignment, error: BaseException) -> int:
    reason = str(error) or type(error).__name__
    send_notice(assignment.notify_fd, Notice(state="failed", reason=reason))
    _log.error("the engine ends", cause=reason, kind=type(error).__name__, exc_info=error)
    return 1


def main(argv: list[str], build: BuildEngine) -> int:
    """Run the engine that the assignment file in ``argv[1]`` describes."""
    return run(read_assignment(Path(argv[1])), build)


if __name__ == "__main__":
    from appliance.wiring import build_engine

    sys.exit(main(sys.argv, build_engine))
