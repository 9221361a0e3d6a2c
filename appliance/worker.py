"""An API worker process: HTTP on one side, the engine on the other, no jax.

Owns the process: its order of start, its readiness and its end. Reads its assignment from the main process; everything
else comes from the modules that it wires together.

On SIGTERM it drains: ready turns 503 and new requests are refused at once, running ones get until the deadline, the
rest end with a typed error, then the server closes. A second SIGTERM moves the deadline to now.

On ``RETIRE_SIGNAL`` it gives way to the worker that replaces it, and no client notices: it accepts no connection any
more but answers what comes over those that it has, each answer telling the client to connect anew (HTTP/1), for
``LINGER_S``; then idle connections are closed, those with running answers when these have ended (over HTTP/2 after a
GOAWAY). What is still running at the deadline of a drain ends as in a drain.
"""

import asyncio
import contextlib
import faulthandler
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
import uvloop
from litestar import Litestar
from prometheus_client import CollectorRegistry

from api.app import ROUTES, create_app
from api.body_file import HandedOver
from api.ports import Generator, ModelCard, RequestRecord, TextCodec
from api.settings import ApiSettings, Clock
from appliance.assignment import Assignment, Notice, read_assignment, send_notice, send_pulse
from appliance.config import ApplianceConfig
from appliance.config_cache import fingerprints
from appliance.config_rules import PROXY_IDLE_CONNECTIONS
from appliance.gateway_worker import LinkSettings, WorkerGateway, lost_after_s
from appliance.handoff import BodyDirectory, HandoffDirectoryError
from appliance.host.ledger import Ledger, LedgerError
from appliance.host.process import DUMP_SIGNAL, RETIRE_SIGNAL, die_with_parent, raise_open_files
from appliance.host.segments import SegmentError, SegmentFile, share
from appliance.http_server import HttpServer, at_port, at_socket
from appliance.keys import FileKeyRing, KeyFileError
from appliance.model.codec import Codec
from appliance.model.record import ModelRecordError, read_record
from appliance.model.tokenizer import TokenizerError
from appliance.telemetry import Metrics, WorkerObserver, configure_logging, count_as

if TYPE_CHECKING:
    from appliance.reuse.answers import KeptAnswers
    from appliance.reuse.proposals import Proposals
    from appliance.tracing import TraceExporter

LINGER_S = 5.0
"""Time in which a client is told over its open connection, at its next request, to open another one. A connection that
rests for longer is closed, as any server may do; only a request sent in that very moment would meet the closed end. Of
a drain it takes at most half, so that what is running then has as long again."""
PULSE_S = 0.5
"""Interval of the signs of life."""
CLOSE_GRACE_S = 2.0
"""Time for the last bytes once every choice has ended."""
TRACES_GRACE_S = 1.0
"""Time for the last traces."""

_DAMAGED = (HandoffDirectoryError, KeyFileError, LedgerError, ModelRecordError, SegmentError, TokenizerError)
"""What ends a worker at its start with the message alone."""

_log = structlog.get_logger("zccp.worker")

LoadText = Callable[[Assignment], tuple[TextCodec, ModelCard]]


@dataclass(slots=True)
class _Stop:
    """Signals received: how many asked for an end, whether one asked to give way, and an event that each sets."""

    event: asyncio.Event
    signals: int = 0
    leaving: bool = False

    def signalled(self) -> None:
        """Note one more request to end."""
        self.signals += 1
        self.event.set()

    def retired(self) -> None:
        """Note that another worker takes the connections."""
        self.leaving = True
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
    faulthandler.register(DUMP_SIGNAL, all_threads=True)
    raise_open_files()
    configure_logging(assignment.config.log.level, assignment.name)
    count_as(assignment.name)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            return runner.run(_serve(assignment, load_text))
        except _DAMAGED as error:
            send_notice(assignment.notify_fd, Notice(state="failed", reason=str(error)))
            _log.error("the worker ends", cause=str(error), kind=type(error).__name__)
            return 1


def _listening_stop() -> _Stop:
    """What the signals of this process set, on the running loop."""
    stop, loop = _Stop(asyncio.Event()), asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.signalled)
    loop.add_signal_handler(RETIRE_SIGNAL, stop.retired)
    return stop


async def _serve(assignment: Assignment, load_text: LoadText) -> int:
    config = assignment.config
    stop = _listening_stop()
    owned = share(config.num_segments, config.server.workers + 1, assignment.index)
    segments = SegmentFile.attach(Path(assignment.segments_file), config.num_segments, assignment.stride_bytes)
    gateway = WorkerGateway(
        LinkSettings(
            worker=assignment.index,
            pid=os.getpid(),
            socket=Path(assignment.socket),
            owned=owned,
            lost_after_s=lost_after_s(config.engine.step_timeout_s),
            request_timeout_s=config.server.request_timeout_s,
        ),
        segments,
    )
    codec, card = load_text(assignment)
    codec = _with_stable_head(codec, config.cache.volatile_headers)
    keys = FileKeyRing(config.keys_file)
    ledger = Ledger(config.home / "usage.bin")
    metrics = Metrics(CollectorRegistry())
    traces = _traces(config)
    proposals = _proposals(assignment, codec, card, metrics)
    observer = WorkerObserver(
        metrics,
        ROUTES,
        ledger.usage,
        keys.tenants,
        Path(assignment.metrics),
        slow_request_s=config.telemetry.slow_request_s,
        export=_told(proposals, traces),
    )
    settings = ApiSettings(
        max_body_bytes=config.max_body_bytes,
        keepalive_s=config.server.keepalive_s,
        write_timeout_s=config.server.write_timeout_s,
        max_choices=min(64, owned.count),
        cors_origins=config.server.cors_origins,
        draining=lambda: stop.signals > 0,
        leaving=lambda: stop.leaving,
    )
    generator, answers = _generator(assignment, gateway, proposals, metrics)
    app = create_app(generator, codec, card, keys, ledger, observer, settings, Clock(), answers)
    servers = _servers(assignment, app, settings)
    gateway.start()
    serving = [server.start() for server in servers]
    telling = asyncio.create_task(_tell(gateway, assignment.notify_fd, owned.count, metrics))
    waiting = asyncio.create_task(stop.event.wait())
    await asyncio.wait({*serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
    if not waiting.done():
        cause = next(task for task in serving if task.done()).exception() or "it returned"
        _log.error("the HTTP server ended", cause=str(cause))
        send_notice(assignment.notify_fd, Notice(state="failed", reason=f"the HTTP server ended: {cause}"))
        return 1
    drain_s = config.server.drain_s if stop.signals else await _give_way(servers, gateway, stop, config.server.drain_s)
    await _drain(gateway, stop, drain_s)
    closed = all(await asyncio.gather(*(server.stop(CLOSE_GRACE_S) for server in servers)))
    telling.cancel()
    await gateway.close()
    segments.close()
    ledger.close()
    if proposals is not None:
        proposals.close()
    if traces is not None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.to_thread(traces.close), TRACES_GRACE_S)
    _log.info("worker ends", answers_cut=not closed)
    return 0


def _traces(config: ApplianceConfig) -> "TraceExporter | None":
    """What sends traces, where a collector is configured; its packages are loaded only then."""
    telemetry = config.telemetry
    if not telemetry.otlp_endpoint:
        return None
    from appliance.tracing import to_collector  # noqa: PLC0415

    return to_collector(telemetry.otlp_endpoint, telemetry.trace_sample_ratio)


def _with_stable_head(codec: TextCodec, headers: tuple[str, ...]) -> TextCodec:
    """The codec behind what leaves volatile headers out, where any are named."""
    if not headers:
        return codec
    from appliance.reuse.volatile import StableHead  # noqa: PLC0415 - the pattern engine, only where it is used

    return StableHead(codec, headers)


def _proposals(assignment: Assignment, codec: TextCodec, card: ModelCard, metrics: Metrics) -> "Proposals | None":
    """What looks for prompts alike, where that is on."""
    cache = assignment.config.cache
    if not fingerprints(cache):
        return None
    from appliance.reuse.serving import model_identity, proposals_of  # noqa: PLC0415 - only where it is on

    return proposals_of(
        cache, codec.token_bytes, model_identity(Path(assignment.model), card.name), metrics.of_fingerprints
    )


def _generator(
    assignment: Assignment, gateway: WorkerGateway, proposals: "Proposals | None", metrics: Metrics
) -> "tuple[Generator, KeptAnswers | None]":
    """What requests go to: kept answers first, where there are any, then the engine; and those answers."""
    generator: Generator = gateway if proposals is None else proposals.over(gateway)
    cache = assignment.config.cache
    if not cache.answers_mb:
        return generator, None
    from appliance.reuse.answers import KeptAnswers, Marks  # noqa: PLC0415 - only where it is used

    marks = Marks(Path(assignment.socket).with_name("answers"))
    answers = KeptAnswers(
        int(cache.answers_mb * 2**20), cache.answers_ttl_s, marks, time.monotonic, metrics.answers
    )  # fmt: skip
    return answers.over(generator), answers


def _told(proposals: "Proposals | None", traces: "TraceExporter | None") -> Callable[[RequestRecord], None]:
    """Who hears of each request that has ended, beside the metrics and the log."""

    def tell(record: RequestRecord) -> None:
        if traces is not None:
            traces.export(record, proposals.attributes(record.request_id) if proposals is not None else {})
        if proposals is not None:
            proposals.ended(record)

    return tell


def _servers(assignment: Assignment, app: Litestar, settings: ApiSettings) -> list[HttpServer]:
    """The server at the port that clients may use and, with nginx in front, the one at the socket that it alone may.

    Raises:
        HandoffDirectoryError: nginx's bodies could not be taken from their directory.
    """
    server, proxy = assignment.config.server, assignment.config.proxy
    share = max(1, server.max_connections // server.workers)
    port, *private = (socket.socket(fileno=descriptor) for descriptor in assignment.listeners)
    servers = [at_port(app, port, http2=server.http2, max_connections=share)]
    for listener in private:
        handed_over = HandedOver(app, BodyDirectory(proxy.bodies).take, settings)
        most = server.max_connections + PROXY_IDLE_CONNECTIONS
        servers.append(at_socket(handed_over, listener, max_connections=most))
    return servers


async def _tell(gateway: WorkerGateway, descriptor: int, segments: int, metrics: Metrics) -> None:
    """Tell the main process of each change of the engine's state and that the loop turns; count what is held here."""
    told, pulse_s, refused = "", 0.0, 0
    while True:
        metrics.segments_used.set(segments - gateway.free_segments)
        metrics.segments_refused.inc(gateway.refused - refused)
        refused = gateway.refused
        status = gateway.status()
        if status.state != told:
            told = status.state
            send_notice(descriptor, Notice(state=status.state, reason=status.reason))
        if (now := time.monotonic()) >= pulse_s:
            pulse_s = now + PULSE_S
            send_pulse(descriptor)
        await asyncio.sleep(0.05 if told != "ready" else 0.25)


async def _give_way(servers: list[HttpServer], gateway: WorkerGateway, stop: _Stop, drain_s: float) -> float:
    """Let everything that this worker has come to its end, without a new connection.

    Returns:
        How long what is left may still take: nothing after ``drain_s``, a whole drain if SIGTERM came meanwhile.
    """
    for server in servers:
        server.take_no_more()
    _log.info("another worker takes over", running=gateway.outstanding, deadline_s=drain_s)
    deadline_s = time.monotonic() + drain_s
    stop.event.clear()
    ended = asyncio.create_task(stop.event.wait())
    await asyncio.wait({ended}, timeout=min(LINGER_S, drain_s / 2))
    if not ended.done():
        left_s = max(0.0, deadline_s - time.monotonic())
        closing = asyncio.gather(*(server.stop(left_s) for server in servers))
        await asyncio.wait({ended, closing}, return_when=asyncio.FIRST_COMPLETED)
    ended.cancel()
    return drain_s if stop.signals else 0.0


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
    return Codec.load(folder, known_bytes=int(config.cache.known_ids_mb * 1024 * 1024)), card


if __name__ == "__main__":
    code = main(sys.argv, load_text)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the server's own threads need no orderly end once every answer is out
