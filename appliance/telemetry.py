"""What the appliance tells its operators: one JSON log on standard error and one set of metrics a node.

Owns the form of the log, the redaction of secrets, the names of all metrics and their label values. Metrics are counted
in files that all processes of the node share (the client library's multiprocess mode, whose folder is in the
environment before this module is imported), so any worker can answer for all. Never logs a prompt, a completion, a
header or a body; no label takes a value from a request.
"""

import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from pathlib import Path
from typing import Any, cast

import structlog
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
    values,
)
from prometheus_client.core import CounterMetricFamily
from prometheus_client.multiprocess import (
    MultiProcessCollector,
    mark_process_dead,  # pyright: ignore[reportUnknownVariableType]
)
from prometheus_client.registry import Collector

from api.ports import RequestRecord
from appliance.host.ledger import Usage

_SECRET = re.compile(r"(?i)\b(?:zk|sk)-[A-Za-z0-9_\-]{4,}|\bbearer\s+[^\s\"',}]+|://[^/@\s]+@")
_FINISH_REASONS = frozenset({"stop", "stop_string", "length", "mixed", "cancelled", "error", "refused"})
_NOT_SHOWN = frozenset({"trace", "phases"})
"""Fields of a record that its line in the log has in another form."""
_OWN_PACKAGES = ("api.", "appliance.", "planner.", "pallas_kernels.")
_LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)
_ENGINE_READY = ("zccp_engine_ready", "1 while the engine takes requests.")
_STEP_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.1)


def configure_logging(level: str, process: str) -> None:
    """Send every log line of this process, the libraries' too, to standard error as one JSON object.

    Args:
        level: debug, info, warning or error.
        process: what the process is, as in ``worker-0``; part of each line.
    """
    threshold = logging.getLevelNamesMapping()[level.upper()]

    def add_process(_: object, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        event["process"] = process
        event["pid"] = os.getpid()
        return event

    shared: list[structlog.types.Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
        add_process,
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name, structlog.stdlib.ExtraAdder()],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                show_exception,
                redact,
                structlog.processors.JSONRenderer(sort_keys=False),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(threshold)
    for name in ("httpx", "httpcore", "jax", "orbax", "absl"):
        logging.getLogger(name).setLevel(max(threshold, logging.WARNING))


def show_exception(_: object, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Replace ``exc_info`` by where an exception came from and, where it cannot quote a client, what it says.

    The messages of our own errors and of the system's are written for people; a library's may quote what it was given,
    and that may be a prompt, so of those only the type is shown.
    """
    given = event.pop("exc_info", None)
    error: BaseException | None = None
    if isinstance(given, BaseException):
        error = given
    elif isinstance(given, tuple):
        error = cast("BaseException | None", given[1])
    elif given:
        error = sys.exc_info()[1]
    chain: list[str] = []
    while error is not None and len(chain) < 5:
        kind = type(error)
        shown = kind.__module__.startswith(_OWN_PACKAGES) or isinstance(error, OSError)
        frames = traceback.extract_tb(error.__traceback__)[-12:]
        places = " < ".join(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in reversed(frames))
        chain.append(f"{kind.__module__}.{kind.__qualname__}{f': {error}' if shown else ''} at {places}")
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if chain:
        event["exception"] = chain
    return event


def redact(_: object, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Replace what looks like a key or a password in any text of a log line; a last net, not the first."""
    for key, value in event.items():
        event[key] = _clean(value)
    return event


def _clean(value: object) -> object:
    match value:
        case None | bool() | int() | float():
            return value
        case list() | tuple():
            return [_clean(item) for item in cast("list[object]", value)]
        case dict():
            return {_clean(str(key)): _clean(item) for key, item in cast("dict[object, object]", value).items()}
        case _:
            return _SECRET.sub("[redacted]", str(value))


class FingerprintMetrics:
    """Metrics of fingerprints and of the index that they are looked up in."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Register under ``registry``."""
        self.fingerprints = Counter(
            "zccp_fingerprints", "Prompts by the result of their look-up.", ("result",), registry=registry
        )
        self.fingerprint_bands = Counter(
            "zccp_fingerprint_bands", "Band keys that hits shared with their candidates.", registry=registry
        )
        self.fingerprint_tokens = Counter(
            "zccp_fingerprint_tokens", "Prompt ids looked up, and shared.", ("kind",), registry=registry
        )
        self.fingerprint_seconds = Histogram(
            "zccp_fingerprint_seconds", "Time of a fingerprint.", buckets=_STEP_BUCKETS, registry=registry
        )
        self.index_calls = Counter(
            "zccp_index_calls", "Calls of the index in Redis.", ("operation", "outcome"), registry=registry
        )
        self.index_seconds = Histogram(
            "zccp_index_seconds", "Time of a call of the index in Redis.", ("operation",),
            buckets=_STEP_BUCKETS, registry=registry,
        )  # fmt: skip
        self.index_down = Gauge(
            "zccp_index_down", "Workers that leave the index in Redis alone after failures.",
            registry=registry, multiprocess_mode="livesum",
        )  # fmt: skip


class TierMetrics:
    """Metrics of the tiers behind the page pool; ``tier`` is host, disk or redis."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Register under ``registry``."""
        self.pages = Counter(
            "zccp_tier_pages",
            "Pages of a tier by what became of them: hit, miss, saved, evicted, left_out, damaged, failed.",
            ("tier", "event"),
            registry=registry,
        )
        self.bytes = Counter(
            "zccp_tier_bytes", "Bytes copied into a tier and out of it.", ("tier", "direction"), registry=registry
        )
        self.held = Gauge(
            "zccp_tier_pages_held", "Pages that a tier holds.", ("tier",),
            registry=registry, multiprocess_mode="livemostrecent",
        )  # fmt: skip


class Metrics:
    """Every metric of the appliance; made once a process, after the environment names the shared folder."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Register under ``registry``; a process that exposes merged values passes one of its own."""

        def counter(name: str, text: str, labels: Iterable[str] = ()) -> Counter:
            return Counter(name, text, labels, registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, registry=registry, multiprocess_mode="livemostrecent")

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, buckets=buckets, registry=registry)

        self.running = gauge("zccp_requests_running", "Sequences that hold a slot.")
        self.waiting = gauge("zccp_requests_waiting", "Sequences in the queue.")
        self.waiting_tokens = gauge("zccp_waiting_tokens", "Prompt ids in the queue.")
        self.pages_used = gauge("zccp_kv_pages_used", "Pages of keys and values in use.")
        self.pages_total = gauge("zccp_kv_pages_total", "Pages of keys and values.")
        self.pages_ratio = gauge("zccp_kv_use_ratio", "Share of the pages in use, 0 to 1.")
        self.pages_cached = gauge("zccp_kv_pages_cached", "Free pages that still hold a prefix.")
        self.evictions = counter("zccp_kv_evictions", "Cached pages taken for something else.")
        self.ready = gauge(*_ENGINE_READY)
        self.segments_used = Gauge(
            "zccp_segments_used",
            "Context segments that requests hold.",
            registry=registry,
            multiprocess_mode="livesum",
        )
        self.segments_refused = counter("zccp_segments_refused", "Requests that found no free segment.")
        self.prompt_tokens = counter("zccp_prompt_tokens", "Prompt ids computed.")
        self.reused_tokens = counter("zccp_prompt_tokens_reused", "Prompt ids found in pages.")
        self.joins = counter("zccp_prefix_joins", "Waits for a prompt that another request was computing.")
        self.generated_tokens = counter("zccp_generated_tokens", "Completion ids made.")
        self.preemptions = counter("zccp_preemptions", "Sequences that gave their pages back and waited again.")
        self.compilations = counter("zccp_compilations", "Programs compiled after ready; 0 is right.")
        self.steps = counter("zccp_steps", "Program launches.", ("phase",))
        self.step_rows = counter("zccp_step_rows", "Sequences in those launches.", ("phase",))
        self.step_host = histogram("zccp_step_host_seconds", "Host time of a step.", _STEP_BUCKETS)
        self.predictions = counter("zccp_predictions", "Completion lengths predicted.", ("source",))
        self.prediction_lstm = gauge("zccp_prediction_lstm_in_use", "1 while the LSTM predicts, 0 for the baseline.")
        self.prediction_lstm_loss = gauge(
            "zccp_prediction_lstm_loss_tokens", "Pinball loss of the LSTM on held-out requests."
        )
        self.prediction_baseline_loss = gauge(
            "zccp_prediction_baseline_loss_tokens", "Pinball loss of the rolling quantile on the same requests."
        )
        self.prediction_trainings = counter("zccp_prediction_trainings", "Trainings of the LSTM.", ("outcome",))
        self.requests = counter("zccp_requests", "Requests answered.", ("route", "status"))
        self.finished = counter("zccp_requests_finished", "Requests ended.", ("reason",))
        self.first_token = histogram("zccp_time_to_first_token_seconds", "Arrival to first token.", _LATENCY_BUCKETS)
        self.per_token = histogram("zccp_time_per_output_token_seconds", "Time a later token.", _TOKEN_BUCKETS)
        self.phases = Histogram(
            "zccp_request_phase_seconds", "Time of a part of a request.", ("phase",),
            buckets=_LATENCY_BUCKETS, registry=registry,
        )  # fmt: skip
        self.duration = histogram("zccp_request_seconds", "Arrival to last byte.", _LATENCY_BUCKETS)
        self.cached_tokens = counter("zccp_cached_prompt_tokens", "Prompt ids whose keys and values were reused.")
        self.answers = counter("zccp_answers", "Requests looked up among the answers that are kept.", ("result",))
        self.of_fingerprints = FingerprintMetrics(registry)
        self.of_tiers = TierMetrics(registry)


class NodeMetrics:
    """What the main process counts of its children; made once, after ``share_counts`` and ``count_as``."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Register under ``registry``."""
        self.restarts = Counter(
            "zccp_restarts", "Processes started again after they had ended.", ("process",), registry=registry
        )
        self.workers_ready = Gauge(
            "zccp_workers_ready",
            "Worker processes that take requests.",
            registry=registry,
            multiprocess_mode="livemostrecent",
        )
        self.engine_ready = Gauge(*_ENGINE_READY, registry=registry, multiprocess_mode="livemostrecent")

        def memory(name: str, text: str) -> Gauge:
            return Gauge(name, text, ("process",), registry=registry, multiprocess_mode="livemostrecent")

        self.resident = memory("zccp_resident_bytes", "Memory of the engine and of the workers that serve.")
        self.resident_when_ready = memory("zccp_resident_bytes_when_ready", "The same when each of them became ready.")
        for role in ("engine", "worker"):
            self.restarts.labels(role)


class WorkerObserver:
    """Counts and logs finished requests in a worker; implements ``api.ports.Observer``."""

    def __init__(
        self,
        metrics: Metrics,
        routes: Iterable[str],
        usage: Callable[[], list[Usage]],
        tenants: Callable[[], dict[str, str]],
        directory: Path,
        *,
        slow_request_s: float = 0.0,
        export: Callable[[RequestRecord], None] | None = None,
    ) -> None:
        """Observe.

        Args:
            metrics: where to count.
            routes: the route templates that may appear as labels; any other counts as ``other``.
            usage: totals of each key.
            tenants: key id -> tenant.
            directory: the folder in which the processes of the node count.
            slow_request_s: a request that took longer is logged as a warning; 0 = none.
            export: sends a request's trace somewhere.
        """
        self._metrics = metrics
        self._routes = frozenset(routes)
        self._directory = directory
        self._slow_request_s = slow_request_s
        self._export = export
        self._key_usage = _KeyUsage(usage, tenants)
        self._log = structlog.get_logger("zccp.request")

    def request_started(self, route: str) -> None:
        """Nothing is counted before a request ends."""

    def request_finished(self, record: RequestRecord) -> None:
        """Count a request and write its line."""
        metrics = self._metrics
        route = record.route if record.route in self._routes else "other"
        metrics.requests.labels(route, f"{record.status // 100}xx").inc()
        if record.finish_reason:
            reason = record.finish_reason if record.finish_reason in _FINISH_REASONS else "other"
            metrics.finished.labels(reason).inc()
            metrics.duration.observe(record.duration_s)
        if record.time_to_first_token_s is not None:
            metrics.first_token.observe(record.time_to_first_token_s)
        if record.time_per_output_token_s is not None:
            metrics.per_token.observe(record.time_per_output_token_s)
        if record.cached_tokens:
            metrics.cached_tokens.inc(record.cached_tokens)
        for phase in record.phases:
            metrics.phases.labels(phase.name).observe(phase.took_s)
        self._write(record)
        if self._export is not None:
            self._export(record)

    def _write(self, record: RequestRecord) -> None:
        named = {name: _rounded(getattr(record, name)) for name in record.__struct_fields__ if name not in _NOT_SHOWN}
        fields = {name: value for name, value in named.items() if value not in (None, "")}
        fields["trace_id"] = record.trace.trace_id
        fields["phases"] = {phase.name: _rounded(phase.took_s) for phase in record.phases}
        slow = 0 < self._slow_request_s < record.duration_s
        if slow:
            fields["slow"] = True
        write = self._log.warning if slow or record.status >= 500 else self._log.info
        write("request", **fields)

    def exposition(self) -> tuple[str, bytes]:
        """Content type and body of ``/metrics``, merged over the processes of the node."""
        registry = CollectorRegistry()
        MultiProcessCollector(registry, path=str(self._directory))
        registry.register(self._key_usage)
        return CONTENT_TYPE_LATEST, generate_latest(registry)


class _KeyUsage(Collector):
    """Usage of each key as counters, read from the ledger at the moment of the scrape."""

    def __init__(self, usage: Callable[[], list[Usage]], tenants: Callable[[], dict[str, str]]) -> None:
        self._usage = usage
        self._tenants = tenants

    def collect(self) -> Iterator[CounterMetricFamily]:
        """The two families; only keys that exist are shown, so the number of series is bounded by the file of keys."""
        requests = CounterMetricFamily("zccp_key_requests", "Requests of a key.", labels=("tenant", "key"))
        tokens = CounterMetricFamily("zccp_key_tokens", "Tokens of a key.", labels=("tenant", "key"))
        tenants = self._tenants()
        for used in self._usage():
            if used.key_id in tenants:
                requests.add_metric((tenants[used.key_id], used.key_id), used.requests)
                tokens.add_metric((tenants[used.key_id], used.key_id), used.tokens)
        yield requests
        yield tokens


def count_as(process: str) -> None:
    """Count under the name of this process from now on; call before it makes any metric.

    A process that is started again goes on with the counts of the one before, so that counters never fall and there are
    as many files as names.
    """
    values.ValueClass = values.MultiProcessValue(lambda: process)  # pyright: ignore[reportUnknownMemberType]


def forget_gauges(directory: Path, process: str) -> None:
    """Drop what a dead process said of the moment; its counters stay."""
    mark_process_dead(process, str(directory))


def counts_are_shared() -> bool:
    """Whether this process counts in the node's shared folder (the environment was set in time)."""
    return values.ValueClass.__name__ == "MmapedValue"


def clear_metrics(directory: Path) -> None:
    """Make the folder of counts, empty; called by the main process before any other starts."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path in directory.glob("*.db"):
        path.unlink(missing_ok=True)


def _rounded(value: object) -> object:
    return round(value, 6) if isinstance(value, float) else value
