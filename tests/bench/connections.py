"""connections: ten thousand idle keep-alive connections and hundreds of streams at once on one appliance.

Opens the idle connections first, each after one answered request, then runs the streams together, then asks on a sample
of the idle ones again. Every answer that is not right, every stream without its end and every connection that was lost
counts. Memory is the proportional set size of all processes of the appliance, before, with the idle ones, and at the
most while streams run.
"""

import asyncio
import json
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import click
import msgspec

from appliance.bench.report import Findings, Result
from appliance.bench.runner import BenchContext, BenchUseError
from appliance.bench.served import Served, build_store, serving
from tests.bench.stacks import Stack

OPTIONS: Sequence[click.Parameter] = [
    click.Option(["--idle"], type=click.IntRange(1, 60_000), default=10_000, show_default=True, help="Connections."),
    click.Option(["--streams"], type=click.IntRange(1, 4096), default=500, show_default=True, help="At once."),
    click.Option(["--workers"], type=click.IntRange(1, 64), default=2, show_default=True, help="API workers."),
]
TOKENS = 16
_AT_ONCE = 200
_SAMPLE = 500
_MIB = 1024 * 1024
_PROBE = b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n"


@dataclass(slots=True)
class Tally:
    """What went wrong, by what it was."""

    wrong: dict[str, int] = field(default_factory=dict[str, int])

    def note(self, what: str) -> None:
        """Count one more."""
        self.wrong[what] = self.wrong.get(what, 0) + 1

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self.wrong.values())


def run(context: BenchContext, *, idle: int, streams: int, workers: int) -> Findings:
    """Hold the connections, run the streams, and count.

    Raises:
        BenchUseError: this process may not open so many files.
        BenchError: the appliance does not start.
    """
    _allow_files(idle + streams + 200)
    overrides = {
        "server": {"workers": workers, "max_connections": idle + streams + 1000},
        "shared_memory": {"segment_count": streams + streams // 4 + 2 * workers, "segment_size_kb": 516},
        "engine": {"max_waiting": streams, "max_waiting_tokens": 1 << 20},
    }
    context.progress("building what is missing", 0, 1)
    build_store(context.config, {})
    with serving(context.config, overrides) as served:
        return asyncio.run(_measured(served, idle, streams, context.progress))


async def _measured(served: Served, idle: int, streams: int, progress: Callable[[str, int, int], None]) -> Findings:
    tally, stack = Tally(), Stack("zccp", int(served.url.rpartition(":")[2]), (served.pid,))
    before = stack.pss_bytes()
    connections: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    for first in range(0, idle, _AT_ONCE):
        progress("opening idle connections", first, idle)
        some = (_opened(stack.port, tally) for _ in range(min(_AT_ONCE, idle - first)))
        connections += [one for one in await asyncio.gather(*some) if one is not None]
    held = stack.pss_bytes()
    progress("running streams", 0, streams)
    began_s = time.monotonic()
    running = asyncio.gather(*(_streamed(stack.port, served.model, number, tally) for number in range(streams)))
    most = held
    while not running.done():
        most = max(most, await asyncio.to_thread(stack.pss_bytes))
    await running
    took_s = time.monotonic() - began_s
    progress("asking on idle connections", 0, 1)
    step = max(1, len(connections) // _SAMPLE)
    for reader, writer in connections[::step]:
        if not await _asked(reader, writer):
            tally.note("idle connection lost")
    for _, writer in connections:
        writer.transport.abort()
    each = (held - before) / max(1, len(connections)) / 1024
    memory = (
        f"memory of all processes (PSS): {before / _MIB:.0f} MiB, with idle connections {held / _MIB:.0f} MiB "
        f"({each:.1f} KiB each), at most {most / _MIB:.0f} MiB while streams ran"
    )
    notes = (
        f"{len(connections)} idle connections of {idle}, {streams} streams of {TOKENS} ids in {took_s:.1f} s",
        memory,
        *(f"{count} x {what}" for what, count in sorted(tally.wrong.items())),
    )
    return Findings(
        (
            Result("errors", tally.total, "requests", 1, (tally.total, tally.total), 0.0, "=="),
            Result("idle_connection_kb", each, "KiB", 1, (each, each)),
            Result("memory_pss_mb", most / _MIB, "MiB", 1, (most / _MIB, most / _MIB)),
        ),
        notes,
    )


async def _opened(port: int, tally: Tally) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        if await _asked(reader, writer):
            return reader, writer
        writer.transport.abort()
    except OSError:
        pass
    tally.note("connection refused")
    return None


async def _asked(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    """One request on a connection that stays open; whether it was answered with 200."""
    try:
        async with asyncio.timeout(30):
            writer.write(_PROBE)
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n", 1)[0] or 0)
            await reader.readexactly(length)
            return head.startswith(b"HTTP/1.1 200")
    except (OSError, asyncio.IncompleteReadError, TimeoutError):
        return False


async def _streamed(port: int, model: str, number: int, tally: Tally) -> None:
    body = msgspec.json.encode(
        {
            "model": model, "prompt": f"Number {number} of a list of things is", "max_tokens": TOKENS, "temperature": 0,
            "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
        }
    )  # fmt: skip
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    try:
        async with asyncio.timeout(600):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(f"{head}\r\nConnection: close\r\n\r\n".encode() + body)
            answer = await reader.read(-1)
            writer.transport.abort()
    except (OSError, TimeoutError) as error:
        tally.note(f"stream: {type(error).__name__}")
        return
    if not answer.startswith(b"HTTP/1.1 200") or b"data: [DONE]" not in answer:
        tally.note(f"stream: {answer[:15].decode('latin-1')}, without its end")
        return
    events = [line for line in answer.split(b"\n") if line.startswith(b"data: {")]
    if json.loads(events[-1][6:])["usage"]["completion_tokens"] != TOKENS:
        tally.note("stream: fewer ids than asked for")


def _allow_files(wanted: int) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most < wanted:
        raise BenchUseError(f"{wanted} connections need as many files, and {most} may be open; raise ulimit -n")
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
