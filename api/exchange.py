"""Exchange: one HTTP request and its response, from the first byte to the record.

Owns the request id, the watch on the client's connection, the bound on every write and the figures of the record.
Reads headers and messages; never the meaning of a body. An exchange is given up when the client leaves or does not
read: the task that works on it is then cancelled, which is how waiting, streaming and queued requests all end early.
"""

import asyncio
import re
import secrets
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from litestar.types import HTTPReceiveMessage, HTTPScope, Message, Receive, Scope, Send

from api.errors import Shape, shape_of
from api.ports import Finished, RequestPhase, RequestRecord, Tenant
from api.settings import ApiSettings, Clock
from api.trace import trace_of

CLIENT_LEFT = "client left"
CLIENT_STUCK = "client does not read"

DISCARD_S = 1.0
DISCARD_BODIES = 2
"""An answer to a body that nobody wants waits this long, and for so many times the largest body, for it to end: a
connection that is closed while bytes come in is reset, and the client may lose the answer with it."""

_STATE_KEY = "exchange"
REQUEST_ID = r"[!#-\[\]-~]{1,128}"
"""Ids that are taken over from clients: printable, and without the two characters that JSON would have to escape."""

_REQUEST_ID = re.compile(REQUEST_ID.encode())


@dataclass(slots=True)
class Tally:
    """Figures of one request as they come to be known; times in seconds on the monotonic clock."""

    stream: bool = False
    model: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    created_tokens: int = 0
    completion_tokens: int = 0
    submitted_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    phases: list[RequestPhase] = field(default_factory=list[RequestPhase])
    finish_reasons: set[str] = field(default_factory=set[str])
    error: str = ""


class Exchange:
    """The state of one exchange; created by the edge, found by routes with ``exchange_of``."""

    __slots__ = (
        "_arrived",
        "_clean_up",
        "_clock",
        "_complete",
        "_given_up",
        "_head",
        "_http1",
        "_receive",
        "_send",
        "_settings",
        "_started_s",
        "_status",
        "_task",
        "_watcher",
        "headers",
        "request_id",
        "response_headers",
        "route",
        "shape",
        "tally",
        "tenant",
        "trace",
    )

    def __init__(
        self, scope: HTTPScope, receive: Receive, send: Send, *, route: str, settings: ApiSettings, clock: Clock
    ) -> None:
        self.headers: list[tuple[bytes, bytes]] = list(cast("Any", scope["headers"]))
        self.route = route
        self.shape: Shape = shape_of(scope["path"], self.headers)
        self.request_id = self._matching(b"x-request-id", _REQUEST_ID) or fresh_id("req_")
        self.trace = trace_of(self.header(b"traceparent"))
        self.tenant: Tenant | None = None
        self.tally = Tally()
        self.response_headers: list[tuple[bytes, bytes]] = [(b"x-request-id", self.request_id.encode())]
        if self.shape is Shape.ANTHROPIC:
            self.response_headers.append((b"request-id", self.request_id.encode()))
        self._head = scope["method"] == "HEAD"
        self._http1 = scope["http_version"].startswith("1")
        self._arrived = not any(name in (b"content-length", b"transfer-encoding") for name, _ in self.headers)
        self._receive = receive
        self._send = send
        self._settings = settings
        self._clock = clock
        self._started_s = clock.monotonic()
        self._task = asyncio.current_task()
        self._watcher: asyncio.Task[None] | None = None
        self._clean_up: list[Callable[[], None]] = []
        self._given_up = ""
        self._status = 0
        self._complete = False

    @property
    def given_up(self) -> str:
        """Why the exchange was given up; empty while it was not."""
        return self._given_up

    @property
    def tenant_name(self) -> str:
        """Who asks; empty while that is not known or no key is needed."""
        return self.tenant.name if self.tenant is not None else ""

    def header(self, name: bytes) -> bytes | None:
        """The first value of a header, by its lower-case name."""
        return next((value for key, value in self.headers if key == name), None)

    def on_close(self, clean_up: Callable[[], None]) -> None:
        """Have something released when the exchange ends, however it ends."""
        self._clean_up.append(clean_up)

    @contextmanager
    def phase(self, name: Literal["receive", "tokenise"]) -> Generator[None]:
        """Time a part of the request."""
        began_s = self._clock.monotonic()
        try:
            yield
        finally:
            took_s = self._clock.monotonic() - began_s
            self.tally.phases.append(RequestPhase(name, began_s - self._started_s, took_s))

    def was_in_engine(self, finished: Finished) -> None:
        """Note how long the parts took that the engine knows of; ids of a whole answer are heard of at its end."""
        began_s = (self.tally.submitted_s or self._started_s) - self._started_s
        prefill_s, decode_s = began_s + finished.queue_s, began_s + finished.queue_s + finished.prefill_s
        heard_s = self.tally.first_token_s
        if heard_s is not None and not self.tally.stream:
            self.tally.first_token_s = min(heard_s, self._started_s + decode_s)
        self.tally.phases += (
            RequestPhase("queue", began_s, finished.queue_s),
            RequestPhase("prefill", prefill_s, finished.prefill_s),
            RequestPhase("decode", decode_s, finished.decode_s),
        )

    async def receive(self) -> HTTPReceiveMessage:
        """The next message from the client."""
        message = cast("HTTPReceiveMessage", await self._receive())
        self._arrived = message["type"] != "http.request" or not message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        """Write one message, with this exchange's headers on the first.

        Raises:
            ConnectionError: the client has not read for the write time-out; the exchange is then given up.
        """
        if message["type"] == "http.response.start":
            self._status = message["status"]
            if not self._arrived:
                await self._discard_body()
            if self._http1 and (not self._arrived or self._settings.leaving()):
                self.response_headers.append((b"connection", b"close"))
            message = cast("Message", {**message, "headers": [*message["headers"], *self.response_headers]})
        elif message["type"] == "http.response.body":
            if self._head:
                message = cast("Message", {**message, "body": b""})
            self._complete = not message.get("more_body", False)
        try:
            async with asyncio.timeout(self._settings.write_timeout_s):
                await self._send(message)
        except TimeoutError as error:
            self._complete = False
            self.give_up(CLIENT_STUCK)
            await asyncio.sleep(0)
            raise ConnectionError(f"a write waited {self._settings.write_timeout_s} s; {CLIENT_STUCK}") from error

    async def _discard_body(self) -> None:
        """Read what is left of the body, within bounds; beyond them the connection is not used again."""
        left = DISCARD_BODIES * self._settings.max_body_bytes
        if self.header(b"expect") is None:  # who waits for leave to send has not begun
            try:
                async with asyncio.timeout(DISCARD_S):
                    while not self._arrived and left > 0:
                        message = await self.receive()
                        left -= len(message.get("body", b"")) if message["type"] == "http.request" else 0
            except TimeoutError:
                pass

    def watch(self) -> None:
        """Begin to watch for the client leaving. To be called once the body has been read."""
        self._watcher = asyncio.create_task(self._wait_for_disconnect())

    def give_up(self, reason: str) -> None:
        """End the exchange early by cancelling the task that works on it; nothing happens once it is complete."""
        if self._complete or self._given_up or self._task is None:
            return
        self._given_up = reason
        self._task.cancel()

    def close(self) -> None:
        """Release what belongs to the exchange. Called once, by the edge."""
        self._complete = True
        if self._watcher is not None:
            self._watcher.cancel()
        for clean_up in self._clean_up:
            clean_up()
        self._clean_up.clear()

    def record(self) -> RequestRecord:
        """What the exchange was, for the observer. A client that left or did not read counts as status 499."""
        tally = self.tally
        first, last = tally.first_token_s, tally.last_token_s
        per_token = None
        if first is not None and last is not None and tally.completion_tokens > 1:
            per_token = (last - first) / (tally.completion_tokens - 1)
        ended_s, phases = self._clock.monotonic(), list(tally.phases)
        if tally.stream and first is not None:
            phases.append(RequestPhase("stream", first - self._started_s, ended_s - first))
        return RequestRecord(
            request_id=self.request_id,
            trace=self.trace,
            route=self.route,
            tenant=self.tenant_name,
            status=499 if self._given_up else self._status or 500,
            finish_reason="cancelled" if self._given_up else self._finish_reason(),
            stream=tally.stream,
            prompt_tokens=tally.prompt_tokens,
            cached_tokens=tally.cached_tokens,
            completion_tokens=tally.completion_tokens,
            time_to_first_token_s=None if first is None else first - self._started_s,
            time_per_output_token_s=per_token,
            duration_s=ended_s - self._started_s,
            phases=tuple(phases),
            model=tally.model,
            error=self._given_up or tally.error,
        )

    def _finish_reason(self) -> str:
        if self.tally.error:
            return "error" if self._status == 200 or self._status >= 500 else "refused"
        reasons = self.tally.finish_reasons
        return next(iter(reasons)) if len(reasons) == 1 else "mixed" if reasons else ""

    async def _wait_for_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.give_up(CLIENT_LEFT)

    def _matching(self, name: bytes, pattern: re.Pattern[bytes]) -> str | None:
        value = self.header(name)
        return value.decode("ascii") if value is not None and pattern.fullmatch(value) else None


def attach_exchange(scope: Scope, exchange: Exchange) -> None:
    """Put an exchange where ``exchange_of`` finds it."""
    scope["state"][_STATE_KEY] = exchange


def exchange_of(scope: Scope) -> Exchange:
    """The exchange of a request."""
    return cast("dict[str, Exchange]", scope["state"])[_STATE_KEY]


def fresh_id(prefix: str) -> str:
    """An id that no other answer has."""
    return prefix + secrets.token_hex(12)
