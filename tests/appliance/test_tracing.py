"""Spans of finished requests: their ids, times and attributes, and what a collector gets."""

import logging
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import msgspec
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from api.ports import RequestPhase, RequestRecord
from api.trace import TraceContext
from appliance.tracing import TraceExporter, to_collector

TRACE, SPAN, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", "a1b2c3d4e5f60718"
S = 1_000_000_000
RECORD = RequestRecord(
    request_id="r1", trace=TraceContext(TRACE, SPAN), route="/v1/messages", tenant="team", status=200,
    finish_reason="length", stream=True, prompt_tokens=12, cached_tokens=4, completion_tokens=3, duration_s=2.0,
    phases=(RequestPhase("receive", 0.0, 0.25), RequestPhase("queue", 0.5, 0.125)), model="tiny",
)  # fmt: skip


def spans_of(record, sample_ratio=1.0):
    kept = InMemorySpanExporter()
    exporter = TraceExporter(SimpleSpanProcessor(kept), sample_ratio=sample_ratio, clock_ns=lambda: 100 * S)
    exporter.export(record)
    exporter.export(record)
    return kept.get_finished_spans()


def test_a_request_is_a_span_and_each_phase_one_under_it():
    receive, queue, request = spans_of(RECORD)[:3]
    assert [span.name for span in (receive, queue, request)] == ["receive", "queue", "POST /v1/messages"]
    assert (f"{request.context.trace_id:032x}", f"{request.context.span_id:016x}") == (TRACE, SPAN)
    assert (request.parent, request.kind) == (None, SpanKind.SERVER)
    assert (request.start_time, request.end_time) == (98 * S, 100 * S)
    for span, began, took in ((receive, 98 * S, S // 4), (queue, 98 * S + S // 2, S // 8)):
        assert (span.start_time, span.end_time) == (began, began + took)
        assert (span.parent.span_id, span.context.trace_id) == (request.context.span_id, request.context.trace_id)
    assert request.attributes == {
        "http.request.method": "POST", "http.route": "/v1/messages", "http.response.status_code": 200,
        "zccp.request_id": "r1", "zccp.tenant": "team", "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "zccp", "gen_ai.request.model": "tiny", "gen_ai.response.model": "tiny",
        "gen_ai.usage.input_tokens": 12, "gen_ai.usage.output_tokens": 3, "gen_ai.usage.cache_read.input_tokens": 4,
        "gen_ai.response.finish_reasons": ("length",),
    }  # fmt: skip
    assert request.resource.attributes["service.name"] == "zccp"


def test_the_callers_span_is_the_parent():
    request = spans_of(msgspec.structs.replace(RECORD, trace=TraceContext(TRACE, SPAN, PARENT)))[2]
    assert (f"{request.parent.span_id:016x}", f"{request.context.span_id:016x}") == (PARENT, SPAN)


@pytest.mark.parametrize(
    ("parent", "flags", "ratio", "sent"), [(PARENT, 0, 1.0, 0), (PARENT, 1, 0.0, 6), ("", 1, 0.0, 0)]
)
def test_a_callers_choice_is_kept_and_traces_that_begin_here_are_drawn(parent, flags, ratio, sent):
    record = msgspec.structs.replace(RECORD, trace=TraceContext(TRACE, SPAN, parent, flags))
    assert len(spans_of(record, ratio)) == sent


def test_a_failed_request_is_an_error_and_a_refused_one_is_not():
    failed = msgspec.structs.replace(RECORD, status=200, finish_reason="error", error="generation_failed")
    refused = msgspec.structs.replace(RECORD, status=400, finish_reason="refused", error="unknown_field")
    assert spans_of(failed)[2].status.status_code is StatusCode.ERROR
    assert spans_of(refused)[2].status.status_code is StatusCode.UNSET
    assert spans_of(refused)[2].attributes["error.type"] == "unknown_field"


def test_a_collector_gets_the_spans_at_the_latest_at_the_end():
    bodies = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            bodies.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        exporter = to_collector(f"http://127.0.0.1:{server.server_port}/v1/traces", 1.0)
        exporter.export(RECORD)
        exporter.close()
        server.shutdown()
        thread.join()
    ((path, body),) = bodies
    assert path == "/v1/traces"
    (resource,) = ExportTraceServiceRequest.FromString(body).resource_spans
    spans = resource.scope_spans[0].spans
    assert {(span.name, span.trace_id.hex()) for span in spans} == {
        ("receive", TRACE), ("queue", TRACE), ("POST /v1/messages", TRACE),
    }  # fmt: skip


def test_a_collector_that_is_not_there_costs_one_line(caplog):
    exporter = to_collector("http://127.0.0.1:1/v1/traces", 1.0)
    with caplog.at_level(logging.WARNING):
        exporter.export(RECORD)
        exporter.close()
    assert len(caplog.records) == 1
