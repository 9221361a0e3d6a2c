"""Trace context: which trace a request belongs to, from the client's header or begun here.

Owns the reading and writing of ``traceparent``. Source: W3C Trace Context, https://www.w3.org/TR/trace-context/.
"""

import re
import secrets

from msgspec import Struct

SAMPLED = 1
_TRACEPARENT = re.compile(rb"(?!ff)([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


class TraceContext(Struct, frozen=True):
    """The place of one request in a trace; ids in lower-case hexadecimal.

    ``span_id`` is this request's own, ``parent_id`` the caller's and empty where the trace begins here.
    """

    trace_id: str
    span_id: str
    parent_id: str = ""
    flags: int = SAMPLED

    @property
    def traceparent(self) -> str:
        """The header for whoever works on this request next."""
        return f"00-{self.trace_id}-{self.span_id}-{self.flags:02x}"


def trace_of(header: bytes | None) -> TraceContext:
    """The trace of a request with this ``traceparent``; a new one where it is missing or not as the standard has it."""
    match = _TRACEPARENT.fullmatch(header or b"")
    version, trace_id, parent_id, flags, more = match.groups() if match else (b"", b"", b"", b"", None)
    if not trace_id.strip(b"0") or not parent_id.strip(b"0") or (version == b"00" and more):
        return TraceContext(secrets.token_hex(16), secrets.token_hex(8))
    return TraceContext(trace_id.decode(), secrets.token_hex(8), parent_id.decode(), int(flags, 16) & SAMPLED)
