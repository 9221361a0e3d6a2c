"""An API worker process: HTTP on one side, the engine on the other, no jax.

Owns the process: its order of start, its readiness and its end. Reads its assignment from the main process; everything
else comes from the modules that it wires together.

On SIGTERM it drains: ready turns 503 and new requests are refused at once, running ones get until the deadline, the
rest end with a typed error, then the server closes. A second SIGTERM moves the deadline to now.
"""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog
import uvloop
from prometheus_client import CollectorRegistry

from api.app import ROUTES, create_app
from api.ports import ModelCard, TextCodec
from api.settings import ApiSettings, Clock
from appliance.assignment import Assignment, Notice, read_assignment, send_notice
from appliance.gateway_worker import LinkSettings, WorkerGateway
from appliance.host.ledger import Ledger, LedgerError
from appliance.host.process import die_with_parent
from appliance.host.segments import SegmentError, SegmentFile, share
from appliance.http_server import HttpServer
from appliance.keys import FileKeyRing, KeyFileError
from appliance.model.codec import Codec
from appliance.model.record import ModelRecordError, read_record
from appliance.model.tokenizer import TokenizerError
from appliance.telemetry import Metrics, WorkerObserver, configure_logging, count_as

CLOSE_GRACE_S = 2.0
"""Time for the last bytes once every choice has ended."""

_log = structlog.get_logger("zccp.worker")

LoadText = Callable[[Assignment], tuple[TextCodec, ModelCard]]


@dataclass(slots=True)
class _Stop:
    """Signals received: how many, and an event that each of them sets."""

    event: asyncio.Event
    signals: int = 0

    def signalled(self) -> None:
        """Note one more."""
        self.signals += 1
        self.event.set()


def run(assignment: Assignment, load_text: LoadText) -> int:
    """Serve until told to stop.

    Args:
        assignment: this worker's part.
        load_text: gives the codec and the card of the served model.

    Returns:
        The exit code: 0 after a drain, 1 when a file that it needs is damaged or the server failed.
    """
    die_with_parent(assignment.parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    configure_logging(assignment.config.log.level, assignment.name)
    count_as(assignment.name)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            return runner.run(_serve(assignment, load_text))
        except (KeyFileError, LedgerError, ModelRecordError, SegmentError, TokenizerError) as error:
            send_notice(assignment.notify_fd, Notice(state="failed", reason=str(error)))
            _log.error("the worker ends", cause=str(error), kind=type(error).__name__)
            return 1


async def _serve(assignment: Assignment, load_text: LoadText) -> int:
    config = assignment.config
    stop = _Stop(asyncio.Event())
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.signalled)
    owned = share(config.shared_memory.segment_count, config.server.workers, assignment.index)
    segments = SegmentFile.attach(
        Path(assignment.segments_file), config.shared_memory.segment_count, assignment.stride_bytes
    )
    gateway = WorkerGateway(
        LinkSettings(
            worker=assignment.index,
            pid=os.getpid(),
            socket=Path(assignment.socket),
            owned=owned,
            request_timeout_s=config.server.request_timeout_s,
        ),
        segments,
    )
    codec, card = load_text(assignment)
    keys = FileKeyRing(config.keys_file)
    ledger = Ledger(config.home / "usage.bin")
    metrics = Metrics(CollectorRegistry())
    observer = WorkerObserver(metrics, ROUTES, ledger.usage, keys.tenants, Path(assignment.metrics))
    settings = ApiSettings(
        max_body_bytes=int(config.server.max_body_mb * 1024 * 1024),
        keepalive_s=config.server.keepalive_s,
        write_timeout_s=config.server.write_timeout_s,
        max_choices=min(64, owned.count),
        cors_origins=config.server.cors_origins,
        draining=lambda: stop.signals > 0,
    )
    app = create_app(gateway, codec, card, keys, ledger, observer, settings, Clock())
    server = HttpServer(
        app,
        config.server.host,
        assignment.port,
        http2=config.server.http2,
        max_connections=max(1, config.server.max_connections // config.server.workers),
    )
    gateway.start()
    serving = server.start()
    telling = asyncio.create_task(
        _tell(gateway, assignment.notify_fd, lambda: metrics.segments_used.set(owned.count - gateway.free_segments))
    )
    waiting = asyncio.create_task(stop.event.wait())
    await asyncio.wait({serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
    if not waiting.done():
        cause = serving.exception() or "it returned"
        _log.error("the HTTP server ended", cause=str(cause))
        send_notice(assignment.notify_fd, Notice(state="failed", reason=f"the HTTP server ended: {cause}"))
        return 1
    telling.cancel()
    await _drain(gateway, stop, config.server.drain_s)
    closed = await server.stop(CLOSE_GRACE_S)
    await gateway.close()
    segments.close()
    ledger.close()
    _log.info("worker ends", answers_cut=not closed)
    return 0


async def _tell(gateway: WorkerGateway, descriptor: int, count: Callable[[], None]) -> None:
    """Tell the main process of each change of the engine's state, and count what this worker holds."""
    told = ""
    while True:
        count()
        status = gateway.status()
        if status.state != told:
            told = status.state
            send_notice(descriptor, Notice(state=status.state, reason=status.reason))
        await asyncio.sleep(0.05 if told != "ready" else 0.25)


async def _drain(gateway: WorkerGateway, stop: _Stop, drain_s: float) -> None:
    """Let running requests end until the deadline or a second signal; then end the rest."""
    gateway.drain("this server is shutting down")
    deadline_s = time.monotonic() + drain_s
    _log.info("draining", running=gateway.outstanding, deadline_s=drain_s)
    stop.event.clear()
    again = asyncio.create_task(stop.event.wait())
    while gateway.outstanding and stop.signals < 2 and time.monotonic() < deadline_s:
        await asyncio.wait({again}, timeout=0.02)
    again.cancel()
    if gateway.outstanding:
        _log.warning("requests cut by the end of the drain", requests=gateway.outstanding)
        gateway.give_up("the server is shutting down and this request did not end in time; send it again")


def main(argv: list[str], load_text: LoadText) -> int:
    """Run the worker that the assignment file in ``argv[1]`` describes."""
    return run(read_assignment(Path(argv[1])), load_text)


def load_text(assignment: Assignment) -> tuple[TextCodec, ModelCard]:
    """Codec and card of the stored model that the assignment names.

    Raises:
        ModelRecordError: the model's folder is damaged.
    """
    folder, config = Path(assignment.model), assignment.config
    record = read_record(folder)
    name = config.model.name or record.name
    aliases = {alias: target in (name, record.name) for alias, target in config.model.aliases.items()}
    for alias in (alias for alias, is_served in aliases.items() if not is_served):
        _log.warning("alias of a model that is not served", alias=alias, of=config.model.aliases[alias], served=name)
    card = ModelCard(
        name=name,
        aliases=tuple(alias for alias, is_served in aliases.items() if is_served),
        created=record.created,
        context=config.context_of(record.context),
        vocab=record.read_architecture().vocab,
        has_chat_template=bool(record.chat_templates),
    )
    return Codec.load(folder), card


if __name__ == "__main__":
    code = main(sys.argv, load_text)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the server's own threads need no orderly end once every answer is out
