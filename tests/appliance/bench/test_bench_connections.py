"""The bench connections: what counts as wrong, against a server with known answers."""

import asyncio

import pytest

from appliance.bench.runner import BenchUseError
from tests.bench import connections
from tests.bench.connections import TOKENS, Tally

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
USAGE = b'data: {"usage": {"completion_tokens": %d}}\n\n'
DONE = b"data: [DONE]\n\n"


def tallied(answer, use):
    """What ``use(port, tally)`` counted with a server that gives every request this answer and closes."""

    async def main():
        async def serve(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            await writer.drain()
            writer.close()

        tally, server = Tally(), await asyncio.start_server(serve, "127.0.0.1", 0)
        await use(server.sockets[0].getsockname()[1], tally)
        server.close()
        await asyncio.sleep(0.01)
        return tally.wrong

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("answer", "wrong"),
    [
        (HEAD + USAGE % TOKENS + DONE, {}),
        (HEAD + USAGE % TOKENS, {"stream: HTTP/1.1 200 OK, without its end": 1}),
        (HEAD + USAGE % 3 + DONE, {"stream: fewer ids than asked for": 1}),
        (b"HTTP/1.1 429 Too Many\r\n\r\n", {"stream: HTTP/1.1 429 To, without its end": 1}),
    ],
)
def test_a_stream_is_right_with_its_end_and_all_its_ids(answer, wrong):
    assert tallied(answer, lambda port, tally: connections._streamed(port, "m", 1, tally)) == wrong


def test_an_idle_connection_counts_once_it_was_answered():
    async def opened(port, tally):
        found = await connections._opened(port, tally)
        if found is not None:
            found[1].transport.abort()

    right = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
    assert tallied(right, opened) == {}
    assert tallied(b"HTTP/1.1 503 No\r\nContent-Length: 0\r\n\r\n", opened) == {"connection refused": 1}
    assert tallied(right[:-1], opened) == {"connection refused": 1}


def test_more_connections_than_files_are_refused(monkeypatch):
    monkeypatch.setattr(connections.resource, "getrlimit", lambda _: (100, 1000))
    with pytest.raises(BenchUseError, match="1001 connections need as many files, and 1000 may be open"):
        connections._allow_files(1001)
