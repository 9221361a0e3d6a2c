"""Traces: each finished request as OpenTelemetry spans, sent to a collector over OTLP.

Owns the form of the spans: one of the request, with the caller's as its parent, and under it one a phase. Everything is
known when a request has ended, so that nothing is traced while it runs. Sending is the library's, in a thread of its
own with a bounded queue: a collector that is slow or gone costs spans and nothing else. Never holds a text of a client.
Source: OpenTelemetry semantic conventions for HTTP and for generative AI.
"""

import logging
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from api.ports import RequestRecord

SERVICE = "zccp"
SEND_S = 2.0
"""Time that a batch may take to be sent, with everything that is tried again."""
COMPLAINTS_S = 60.0
"""Least time between two lines about a collector that does not answer."""

_OPERATIONS = {"/v1/messages": "chat", "/v1/chat/completions": "chat", "/v1/completions": "text_completion"}
_COMPLAIN = ("opentelemetry.exporter.otlp.proto.http.trace_exporter", "opentelemetry.sdk._shared_internal")
"""Loggers that write whenever a collector does not answer."""
_S = 1_000_000_000


class TraceExporter:
    """Turns records into spans. ``clock_ns`` gives nanoseconds since 1970."""

    def __init__(
        self, processor: SpanProcessor, *, sample_ratio: float, clock_ns: Callable[[], int] = time.time_ns
    ) -> None:
        """Hand spans to ``processor``; of traces that begin here, to a share of them."""
        self._ids = _GivenIds()
        self._clock_ns = clock_ns
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(sample_ratio)),
            resource=Resource.create({"service.name": SERVICE}),
            id_generator=self._ids,
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer(SERVICE)

    def export(self, record: RequestRecord, more: Mapping[str, str | int] = MappingProxyType({})) -> None:
        """The spans of a request that has just ended; the first one has the attributes ``more`` too."""
        trace = record.trace
        ended_ns = self._clock_ns()
        began_ns = ended_ns - int(record.duration_s * _S)
        context = None
        if trace.parent_id:
            parent = SpanContext(
                int(trace.trace_id, 16), int(trace.parent_id, 16), is_remote=True, trace_flags=TraceFlags(trace.flags)
            )
            context = set_span_in_context(NonRecordingSpan(parent))
        self._ids.give(trace.trace_id, trace.span_id)
        span = self._tracer.start_span(
            f"POST {record.route}", context, SpanKind.SERVER, {**_attributes(record), **more}, start_time=began_ns
        )
        if span.is_recording():
            inside = set_span_in_context(span)
            for phase in record.phases:
                at_ns = began_ns + int(phase.began_s * _S)
                self._tracer.start_span(phase.name, inside, start_time=at_ns).end(at_ns + int(phase.took_s * _S))
            if record.status >= 500 or record.finish_reason == "error":
                span.set_status(Status(StatusCode.ERROR, record.error or None))
        span.end(ended_ns)

    def close(self) -> None:
        """Send what is queued and stop."""
        self._provider.shutdown()


def to_collector(endpoint: str, sample_ratio: float) -> TraceExporter:
    """An exporter to the traces endpoint of a collector, as ``http://localhost:4318/v1/traces``."""
    seldom = _Seldom(COMPLAINTS_S)
    for name in _COMPLAIN:
        logging.getLogger(name).addFilter(seldom)
    processor = BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=SEND_S))
    return TraceExporter(processor, sample_ratio=sample_ratio)


def _attributes(record: RequestRecord) -> dict[str, str | int | tuple[str, ...]]:
    found: dict[str, str | int | tuple[str, ...]] = {
        "http.request.method": "POST",
        "http.route": record.route,
        "http.response.status_code": record.status,
        "zccp.request_id": record.request_id,
    }
    if record.tenant:
        found["zccp.tenant"] = record.tenant
    if record.error:
        found["error.type"] = record.error
    if record.model:
        found |= {
            "gen_ai.operation.name": _OPERATIONS.get(record.route, "chat"),
            "gen_ai.provider.name": SERVICE,
            "gen_ai.request.model": record.model,
            "gen_ai.response.model": record.model,
            "gen_ai.usage.input_tokens": record.prompt_tokens,
            "gen_ai.usage.output_tokens": record.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
            "gen_ai.response.finish_reasons": (record.finish_reason,),
        }
    return found


class _GivenIds(RandomIdGenerator):
    """The ids that a request already has, once each; random ones after that."""

    def __init__(self) -> None:
        self._trace_id, self._span_id = "", ""

    def give(self, trace_id: str, span_id: str) -> None:
        """Use these for the next span."""
        self._trace_id, self._span_id = trace_id, span_id

    def generate_trace_id(self) -> int:
        given, self._trace_id = self._trace_id, ""
        return int(given, 16) if given else super().generate_trace_id()

    def generate_span_id(self) -> int:
        given, self._span_id = self._span_id, ""
        return int(given, 16) if given else super().generate_span_id()


class _Seldom(logging.Filter):
    """Lets one line through, and then none for a while."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._seconds = seconds
        self._clock = clock
        self._next_s = float("-inf")

    def filter(self, record: logging.LogRecord) -> bool:  # noqa: ARG002 - whatever the line says
        """Whether a line is written."""
        if self._clock() < self._next_s:
            return False
        self._next_s = self._clock() + self._seconds
        return True
