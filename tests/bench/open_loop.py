"""Open-loop load over HTTP/1.1: requests leave at the moments of a Poisson process, whether others have been answered.

Owns the connections, the schedule and what counts as an error. A request's time runs from the moment at which it was
due, so that a server which makes its clients wait is not excused for what it kept from being sent. Reads only as much
of HTTP as the answers of servers need: a status, a length or chunks.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_HEAD_END = b"\r\n\r\n"
_LAST_CHUNK = b"0\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request: when it was due and how long it took, in seconds; ``problem`` is empty for an answer 200."""

    due_s: float
    took_s: float
    problem: str = ""


class _Connection(asyncio.Protocol):
    """One connection; at most one request at a time."""

    def __init__(self, idle: "list[_Connection]") -> None:
        self._idle = idle
        self._received = bytearray()
        self._answer: asyncio.Future[int] | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        status = _status_of_whole(self._received)
        if status is not None and self._answer is not None and not self._answer.done():
            self._answer.set_result(status)

    def connection_lost(self, exc: Exception | None) -> None:
        if self in self._idle:
            self._idle.remove(self)
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionError(str(exc or "closed by the server")))

    async def ask(self, request: bytes) -> int:
        """Send a request and wait for the whole answer; its status."""
        assert self._transport is not None
        self._received.clear()
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        status = await self._answer
        if not self._transport.is_closing() and b"connection: close" not in self._received[:1024].lower():
            self._idle.append(self)
        return status

    def close(self) -> None:
        """Drop it."""
        if self._transport is not None:
            self._transport.abort()


class OpenLoop:
    """Clients of one server on the loopback interface; connections are kept and made as they are needed."""

    def __init__(self, port: int, timeout_s: float, clock: Callable[[], float]) -> None:
        """Load the server on ``port``; a request that takes longer than ``timeout_s`` is an error."""
        self._port = port
        self._timeout_s = timeout_s
        self._clock = clock
        self._idle: list[_Connection] = []

    async def run(self, bodies: Sequence[bytes], rate: float, duration_s: float, seed: int) -> list[Outcome]:
        """Send ``rate`` requests a second for so long, bodies in turn, and wait for the last answer."""
        draw, began_s = random.Random(seed), self._clock()
        sent: list[asyncio.Task[Outcome]] = []
        due_s = draw.expovariate(rate)
        while due_s < duration_s:
            await asyncio.sleep(max(0.0, began_s + due_s - self._clock()))
            body = bodies[len(sent) % len(bodies)]
            sent.append(asyncio.create_task(self._one(self._request(body), began_s + due_s, due_s)))
            due_s += draw.expovariate(rate)
        return list(await asyncio.gather(*sent))

    async def in_turn(self, bodies: Sequence[bytes]) -> list[Outcome]:
        """Send bodies one after the other: the server without load."""
        began_s = self._clock()
        return [
            await self._one(self._request(body), now_s, now_s - began_s) for body in bodies for now_s in [self._clock()]
        ]

    async def at_once(self, bodies: Sequence[bytes]) -> list[Outcome]:
        """Send all bodies at the same moment."""
        now_s = self._clock()
        return list(await asyncio.gather(*(self._one(self._request(body), now_s, 0.0) for body in bodies)))

    def close(self) -> None:
        """Drop every kept connection."""
        for connection in list(self._idle):
            connection.close()
        self._idle.clear()

    def _request(self, body: bytes) -> bytes:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{self._port}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    async def _one(self, request: bytes, due_at_s: float, due_s: float) -> Outcome:
        problem, connection = "", None
        try:
            async with asyncio.timeout(max(0.0, due_at_s + self._timeout_s - self._clock())):
                if self._idle:
                    connection = self._idle.pop()
                else:
                    loop = asyncio.get_running_loop()
                    _, connection = await loop.create_connection(
                        lambda: _Connection(self._idle), "127.0.0.1", self._port
                    )
                status = await connection.ask(request)
                problem = "" if status == 200 else str(status)
        except TimeoutError:
            problem = "time-out"
        except OSError as error:
            problem = type(error).__name__
        if problem and connection is not None:
            if connection in self._idle:
                self._idle.remove(connection)
            connection.close()
        return Outcome(due_s, self._clock() - due_at_s, problem)


def _status_of_whole(received: bytearray) -> int | None:
    """The status, once the whole answer is there."""
    head_end = received.find(_HEAD_END)
    if head_end < 0:
        return None
    head = bytes(received[:head_end]).lower()
    start = head_end + len(_HEAD_END)
    at = head.find(b"\r\ncontent-length:")
    if at >= 0:
        length = int(head[at + 17 :].split(b"\r\n", 1)[0])
        return int(head.split(b" ", 2)[1]) if len(received) >= start + length else None
    return int(head.split(b" ", 2)[1]) if received.endswith(_LAST_CHUNK) else None
