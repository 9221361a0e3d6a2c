"""Streams of server-sent events: framing, pings, failures after the first byte, and the end.

Owns the order of writes and the clean-up. Reads events from a ``Run``; what they look like is a ``Frames``' business.

A stream that fails says so with a typed error event and then closes, without the event that ends a good one. A client
that does not read is dropped after the write time-out; a client that leaves ends the stream through its exchange.
"""

import asyncio
import logging
from contextlib import aclosing
from typing import Protocol

import msgspec
from litestar.types import ASGIApp, Receive, Scope, Send

from api.errors import ApiError, InternalError
from api.exchange import Exchange
from api.run import Delta, End, Run
from api.services import Services

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

_log = logging.getLogger(__name__)
_encoder = msgspec.json.Encoder()


class Frames(Protocol):
    """What the events of one stream look like on the wire; one instance a stream."""

    ping: bytes

    def opening(self) -> bytes:
        """What comes before the first token."""
        ...

    def delta(self, delta: Delta) -> bytes:
        """New text of a choice."""
        ...

    def end(self, end: End) -> bytes:
        """A choice is complete; may be empty."""
        ...

    def closing(self) -> bytes:
        """What ends a good stream."""
        ...

    def failure(self, error: ApiError) -> bytes:
        """What ends a bad one."""
        ...


def data(payload: object) -> bytes:
    """One event without a name."""
    return b"data: " + _encoder.encode(payload) + b"\n\n"


def named(event: str, payload: object) -> bytes:
    """One event with a name."""
    return b"event: " + event.encode() + b"\n" + data(payload)


class _Writer:
    """Writes to one client, one event at a time, and breaks silences with pings."""

    __slots__ = ("_clock", "_keepalive_s", "_last_s", "_lock", "_ping", "_send")

    def __init__(self, services: Services, send: Send, ping: bytes) -> None:
        self._clock = services.clock.monotonic
        self._keepalive_s = services.settings.keepalive_s
        self._send = send
        self._ping = ping
        self._lock = asyncio.Lock()
        self._last_s = self._clock()

    async def write(self, event: bytes, *, more: bool = True) -> None:
        """Send bytes; empty ones only end the stream."""
        if not event and more:
            return
        async with self._lock:
            await self._send({"type": "http.response.body", "body": event, "more_body": more})
            self._last_s = self._clock()

    async def keep_alive(self) -> None:
        """Ping whenever nothing was written for a while. Runs until cancelled or until the client is gone."""
        while True:
            rest = self._last_s + self._keepalive_s - self._clock()
            if rest > 0:
                await asyncio.sleep(rest)
                continue
            try:
                await self.write(self._ping)
            except ConnectionError:
                return


def event_stream(services: Services, exchange: Exchange, run: Run, frames: Frames) -> ASGIApp:
    """An ASGI app that streams a run and closes it, whatever happens."""

    async def respond(scope: Scope, receive: Receive, send: Send) -> None:
        del scope, receive
        exchange.tally.stream = True
        writer = _Writer(services, send, frames.ping)
        pings: asyncio.Task[None] | None = None
        try:
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            await writer.write(frames.opening())
            pings = asyncio.create_task(writer.keep_alive())
            await writer.write(await _stream(exchange, run, frames, writer), more=False)
        finally:
            if pings is not None:
                pings.cancel()
            run.close()

    return respond


async def _stream(exchange: Exchange, run: Run, frames: Frames, writer: _Writer) -> bytes:
    """Write all events but the last bytes, which are returned."""
    try:
        async with aclosing(run.events()) as events:
            async for event in events:
                await writer.write(frames.delta(event) if isinstance(event, Delta) else frames.end(event))
    except ApiError as error:
        _log.warning("stream failed: %s", error.message, extra={"request_id": exchange.request_id})
        exchange.tally.error = error.code
        return frames.failure(error)
    except ConnectionError:
        raise
    except Exception:  # noqa: BLE001 - the client must learn of any fault of ours, and the log its cause
        _log.exception("stream failed", extra={"request_id": exchange.request_id})
        exchange.tally.error = InternalError.code
        return frames.failure(InternalError("internal error; the server's log has the cause under this request id"))
    return frames.closing()
