"""The trace context of a request, from headers that are right, wrong and of versions to come."""

import pytest

from api.trace import TraceContext, trace_of

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize(
    ("header", "flags"),
    [
        (f"00-{TRACE}-{PARENT}-01", 1),
        (f"00-{TRACE}-{PARENT}-00", 0),
        (f"00-{TRACE}-{PARENT}-03", 1),
        (f"cc-{TRACE}-{PARENT}-01", 1),
        (f"cc-{TRACE}-{PARENT}-01-what-the-future-brings", 1),
    ],
)
def test_a_request_goes_on_with_its_callers_trace(header, flags):
    found = trace_of(header.encode())
    assert (found.trace_id, found.parent_id, found.flags) == (TRACE, PARENT, flags)
    assert found.span_id != PARENT
    assert found.traceparent == f"00-{TRACE}-{found.span_id}-0{flags}"


@pytest.mark.parametrize(
    "header",
    [
        None, b"", b"nonsense", f"00-{TRACE.upper()}-{PARENT}-01".encode(), f"00-{'0' * 32}-{PARENT}-01".encode(),
        f"00-{TRACE}-{'0' * 16}-01".encode(), f"ff-{TRACE}-{PARENT}-01".encode(),
        f"00-{TRACE}-{PARENT}-01-more".encode(),
        f"00-{TRACE}-{PARENT}-1".encode(), f"00-{TRACE[1:]}-{PARENT}-01".encode(), f"00-{TRACE}-{PARENT}-01\n".encode(),
    ],
)  # fmt: skip
def test_everything_else_begins_a_trace(header):
    one, other = trace_of(header), trace_of(header)
    assert one.trace_id != other.trace_id
    assert (len(one.trace_id), len(one.span_id), one.parent_id, one.flags) == (32, 16, "", 1)


def test_the_header_is_the_standards():
    assert TraceContext(TRACE, PARENT, flags=0).traceparent == f"00-{TRACE}-{PARENT}-00"
