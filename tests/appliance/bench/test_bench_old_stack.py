"""The bench old-stack: open-loop load against a server with known answers, the search for a rate, and the ratios."""

import asyncio
import json
import time

import pytest

from appliance.bench.runner import BenchError
from tests.bench.old_stack import Arm, Turn, compared, read_bodies, sustained_rate, told, weighed
from tests.bench.open_loop import OpenLoop, Outcome

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n"
BUSY = b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


def asked(answers, use):
    """What ``use`` gives with a client of a server that answers request n with ``answers[n]``; None = never."""

    async def main():
        seen, connections = [], []

        async def serve(reader, writer):
            connections.append(writer)
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
                seen.append(await reader.readexactly(length))
                answer = answers[len(seen) - 1]
                if answer is None:
                    await asyncio.Event().wait()
                for part in (answer[:20], answer[20:]):
                    writer.write(part)
                    await writer.drain()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        client = OpenLoop(server.sockets[0].getsockname()[1], 0.2, time.monotonic)
        found = await use(client)
        client.close()
        server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        for writer in connections:
            writer.transport.abort()
        await asyncio.sleep(0)
        return found, seen, len(connections)

    return asyncio.run(main())


def test_answers_in_one_piece_and_in_chunks_keep_their_connection():
    found, seen, connections = asked([OK, CHUNKED, OK], lambda client: client.in_turn([b"a", b"bb", b"ccc"]))
    assert [outcome.problem for outcome in found] == ["", "", ""]
    assert (seen, connections) == ([b"a", b"bb", b"ccc"], 1)


def test_refusals_and_silence_are_problems_and_their_connections_go():
    found, _, connections = asked([BUSY, None, OK], lambda client: client.in_turn([b"a", b"b", b"c"]))
    assert [outcome.problem for outcome in found] == ["503", "time-out", ""]
    assert connections == 3
    assert found[1].took_s >= 0.2


def test_requests_leave_when_they_are_due_whether_others_are_answered():
    async def load(client):
        return await client.run([b"x"], rate=200, duration_s=0.25, seed=3)

    found, seen, connections = asked([None] * 500, load)
    assert len(found) == len(seen) == connections > 20
    assert {outcome.problem for outcome in found} == {"time-out"}
    due = [outcome.due_s for outcome in found]
    assert due == sorted(due)
    assert due[-1] < 0.25


def test_a_server_that_is_not_there_is_a_problem():
    async def load():
        client = OpenLoop(1, 0.5, time.monotonic)
        return await client.in_turn([b"x"])

    assert [outcome.problem for outcome in asyncio.run(load())] == ["ConnectionRefusedError"]


def test_the_workload_is_fixed():
    bodies = [json.loads(body) for body in read_bodies()]
    assert len(bodies) == 64
    assert {body["max_tokens"] for body in bodies} == {8, 12, 16, 24, 32}
    assert all(body["ignore_eos"] and body["temperature"] == 0 for body in bodies)


class TestRates:
    def search(self, limit, first, *, errors_from=1e9):
        tried = []

        async def turn(rate):
            tried.append(rate)
            return Turn(0.1, 0.3 if rate <= limit else 0.4, 2 if rate > errors_from else 0, 100)

        return asyncio.run(sustained_rate(turn, first, 0.3)), tried

    @pytest.mark.parametrize("first", [1.0, 100.0])
    def test_it_is_found_from_below_and_from_above(self, first):
        rate, tried = self.search(10.0, first)
        assert 10.0 / 2 ** (1 / 16) <= rate <= 10.0
        assert len(tried) < 14

    def test_errors_count(self):
        rate, _ = self.search(1e9, 1.0, errors_from=10.0)
        assert 10.0 / 2 ** (1 / 16) <= rate <= 10.0

    def test_a_stack_that_sustains_nothing_is_an_error(self):
        with pytest.raises(BenchError, match="a stack does not sustain"):
            self.search(0.0, 1.0)


def test_a_turn_is_summed_up():
    turn = Turn.of([Outcome(0.0, n / 100, "503" if n == 100 else "") for n in range(1, 101)])
    assert (turn.p50_s, turn.p99_s, turn.errors, turn.error_share) == (0.5, 0.99, 1, 0.01)
    with pytest.raises(BenchError, match="raise --seconds"):
        Turn.of([])


def test_ratios_are_of_turns_that_belong_together():
    slow, fast = Turn(0.8, 3.0, 19, 100), Turn(0.1, 0.1, 0, 100)
    arm = Arm(
        {"old": 2.0, "zccp": 20.0}, {"old": slow, "zccp": fast}, [(slow, fast)] * 3, [(slow, fast)], [(fast, slow)]
    )
    results = {result.name: result for result in compared(arm, null=False)}
    assert {name: round(result.value, 6) for name, result in results.items()} == {
        "p50_ratio": 8.0, "p99_ratio": 30.0, "rate_ratio": 10.0, "error_ratio": 39.0, "p99_growth_5x": 30.0,
    }  # fmt: skip
    assert [result.met for result in results.values()] == [True, True, True, True, False]
    layer = {result.name: result.met for result in compared(arm, null=True)}
    assert layer == {
        "layer_p50_ratio": True, "layer_p99_ratio": True, "layer_rate_ratio": None, "layer_error_ratio": None,
        "layer_p99_growth_5x": None,
    }  # fmt: skip
    assert any(
        "zccp at 2 times the old stack's rate: 100.0 / 100.0 ms, 0 errors of 100" in line for line in told("model", arm)
    )


def test_memory_of_a_request_has_a_floor():
    mb = 1024 * 1024
    per_request, total = weighed(0.0, 2000 * mb, 500 * mb, 2600 * mb)
    assert (per_request.value, total.value) == (600 / 0.05, 4.0)
