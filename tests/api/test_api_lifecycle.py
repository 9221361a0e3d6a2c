"""Failures in mid-stream, clients that leave or do not read, silences: nothing runs on, nothing ends falsely."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from api.ports import Finished, GenerationRequest, Tenant
from api.settings import ApiSettings
from tests.support.api_rig import CHAT, MESSAGES, TEXT, Caller, Rig, chat, message, prompt, until
from tests.support.scripted_engine import ScriptedEngine, Step, say, tokens

ALL = [(CHAT, chat), (TEXT, prompt), (MESSAGES, message)]


def then(*steps: Step) -> Callable[[GenerationRequest], list[Step]]:
    """A script: the text ``ab`` and then these steps."""
    return lambda request: [tokens(request, 0, *b"ab"), *steps]


FAULTS = [
    (Finished(0, "error", error="the device was lost"), "the device was lost", "generation_failed", "api_error"),
    (Finished(0, "error"), "gave this request up", "generation_failed", "api_error"),
    (
        Finished(0, "cancelled", error="deadline of 5 s passed"),
        "deadline of 5 s passed",
        "not_ready",
        "overloaded_error",
    ),
    (RuntimeError("secret"), "internal error", "internal_error", "api_error"),
]


@pytest.mark.parametrize(("fault", "text", "code", "kind"), FAULTS)
@pytest.mark.parametrize(("path", "body"), ALL, ids=[path for path, _ in ALL])
def test_bc086_a_failure_after_the_first_byte(
    path: str, body: Any, fault: Step, text: str, code: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(ScriptedEngine(then(fault)))
    reply = rig.post(path, body(stream=True))
    assert reply.status == 200
    assert reply.ended
    assert b"secret" not in reply.body
    assert b"[DONE]" not in reply.body
    assert b'"stop"' not in reply.body
    name, last = reply.events()[-1]
    assert text in last["error"]["message"]
    assert last["request_id"] == reply.header("x-request-id")
    if path == MESSAGES:
        assert (name, last["type"], last["error"]["type"]) == ("error", "error", kind)
        assert b"message_stop" not in reply.body
    else:
        assert (name, last["error"]["code"]) == (None, code)
    record = rig.observer.records[0]
    assert (record.status, record.finish_reason, record.error) == (200, "error", code)
    assert "stream failed" in caplog.text


@pytest.mark.parametrize(("fault", "text", "code", "kind"), FAULTS)
def test_a_failure_of_a_whole_answer_has_its_status(fault: Step, text: str, code: str, kind: str) -> None:
    rig = Rig(ScriptedEngine(then(fault)))
    reply = rig.post(CHAT, chat())
    assert reply.status == (503 if code == "not_ready" else 500)
    assert text in reply.json()["error"]["message"]
    assert rig.post(MESSAGES, message()).json()["error"]["type"] == kind


def test_a_failed_choice_gives_up_the_others() -> None:
    def script(request: GenerationRequest) -> list[Step]:
        return [tokens(request, 0, *b"a"), Finished(1, "error", error="broken"), 60.0]

    engine = ScriptedEngine(script)
    assert Rig(engine).post(CHAT, chat(n=2)).status == 500
    assert engine.cancels == [[None]]
    assert engine.running == 0


def test_an_engine_that_ends_without_a_finish_is_a_failure() -> None:
    reply = Rig(ScriptedEngine(then())).post(CHAT, chat(stream=True))
    assert "without finishing" in reply.data()[-1]["error"]["message"]


def test_a_failure_in_one_generation_of_a_batch_ends_it() -> None:
    def script(request: GenerationRequest) -> list[Step]:
        return [RuntimeError("x")] if request.prompt_ids[-1] == ord("1") else [60.0]

    engine = ScriptedEngine(script)
    assert Rig(engine).post(TEXT, prompt(["1", "2"])).status == 500
    assert engine.cancels == [[None], [None]]


def left(
    rig: Rig, path: str, body: Any, when: Callable[[Rig], bool], headers: Mapping[str, str | bytes] | None = None
) -> None:
    """Start a request and let the client leave as soon as ``when`` holds; return once the app is done with it."""

    async def run() -> None:
        callers: list[Caller] = []
        task = asyncio.ensure_future(rig.call("POST", path, body, headers, callers=callers))
        await until(lambda: when(rig))
        callers[0].leave()
        reply = await asyncio.wait_for(task, 1)
        assert not reply.ended

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), ALL, ids=[path for path, _ in ALL])
def test_bc092_a_client_that_leaves_cancels_once(path: str, body: Any, stream: bool) -> None:
    engine = ScriptedEngine(then(60.0))
    rig = Rig(engine)
    left(rig, path, body(stream=stream), lambda _: bool(engine.generations and engine.generations[0].emitted))
    assert engine.cancels == [[None]]
    assert engine.running == 0
    record = rig.observer.records[0]
    assert (record.status, record.finish_reason, record.error) == (499, "cancelled", "client left")
    assert record.completion_tokens == 2


def test_ids_that_nobody_read_are_counted_for_a_client_that_leaves() -> None:
    engine = ScriptedEngine(then(60.0))
    rig = Rig(engine, keys={b"k": Tenant(name="t", key_id="k1", requests_per_minute=9, tokens_per_minute=900)})

    def when(_: Rig) -> bool:
        if not engine.generations or not engine.generations[0].emitted:
            return False
        engine.generations[0].unread = 7
        return True

    left(rig, CHAT, chat(), when, {"x-api-key": b"k"})
    assert rig.observer.records[0].completion_tokens == 9
    assert rig.quota.tokens["k1"] == rig.observer.records[0].prompt_tokens + 9


@pytest.mark.parametrize(("path", "body"), ALL, ids=[path for path, _ in ALL])
def test_only_an_answer_that_nobody_reads_on_the_way_is_asked_for_as_a_whole(path: str, body: Any) -> None:
    engine = ScriptedEngine(say("done"))
    rig = Rig(engine)
    stop = {"stop_sequences" if path == MESSAGES else "stop": ["x"]}
    for fields in ({}, {"stream": True}, stop):
        rig.post(path, body(**fields))
    assert [request.whole for request in engine.requests] == [True, False, False]


def test_leaving_before_any_token_cancels_in_the_queue() -> None:
    engine = ScriptedEngine(lambda _: [60.0])
    left(Rig(engine), CHAT, chat(stream=True), lambda _: bool(engine.generations))
    assert engine.cancels == [[None]]


def test_leaving_while_the_engine_admits_cancels_what_it_admits() -> None:
    engine = ScriptedEngine(lambda _: [60.0])

    async def run() -> None:
        engine.admission = asyncio.Event()
        rig = Rig(engine)
        callers: list[Caller] = []
        task = asyncio.ensure_future(rig.call("POST", CHAT, chat(), callers=callers))
        await until(lambda: engine.requests)
        callers[0].leave()
        await task
        assert engine.generations == []
        engine.admission.set()
        await until(lambda: engine.cancels == [[None]])

    asyncio.run(run())


def test_leaving_a_batch_cancels_each_generation_once() -> None:
    engine = ScriptedEngine(then(60.0))
    left(Rig(engine), TEXT, prompt(["a", "b", "c"]), lambda _: len(engine.generations) == 3)
    assert engine.cancels == [[None]] * 3


def test_a_body_that_breaks_off_is_refused_and_runs_nothing() -> None:
    rig = Rig()

    async def run() -> None:
        callers: list[Caller] = []
        task = asyncio.ensure_future(rig.call("POST", CHAT, [b'{"model":'], callers=callers, stalls=True))
        await asyncio.sleep(0.01)
        callers[0].leave()
        reply = await asyncio.wait_for(task, 1)
        assert reply.status == 400
        assert reply.json()["error"]["code"] == "invalid_json"
        assert reply.json()["error"]["message"] == "the body broke off or is badly framed after 9 bytes; send all of it"

    asyncio.run(run())
    assert not rig.engine.requests
    assert (rig.observer.records[0].status, rig.observer.records[0].error) == (400, "invalid_json")


def test_bc094_normal_completion_never_cancels() -> None:
    engine = ScriptedEngine(say("done"))
    rig = Rig(engine)

    async def run() -> None:
        for batch in range(5):
            await asyncio.gather(
                *(
                    rig.call("POST", CHAT, chat(stream=bool(i % 2)), {"x-request-id": f"same-{batch}"})
                    for i in range(40)
                )
            )

    asyncio.run(run())
    assert engine.cancels == [[]] * 200
    assert engine.running == 0
    assert [record.status for record in rig.observer.records] == [200] * 200


def test_bc094_a_request_with_the_same_id_goes_on_when_one_leaves() -> None:
    gate = asyncio.Event()
    engine = ScriptedEngine(then(gate, Finished(0, "stop")))
    rig = Rig(engine)

    async def run() -> None:
        callers: list[Caller] = []
        same = {"x-request-id": "same"}
        calls = [
            asyncio.ensure_future(rig.call("POST", CHAT, chat(stream=True), same, callers=callers)) for _ in range(3)
        ]
        await until(lambda: len(engine.generations) == 3 and all(one.emitted for one in engine.generations))
        callers[1].leave()
        await until(lambda: engine.cancels[1])
        gate.set()
        first, left, last = await asyncio.gather(*calls)
        assert not left.ended
        assert first.body.endswith(b"[DONE]\n\n")
        assert last.body.endswith(b"[DONE]\n\n")

    asyncio.run(run())
    assert engine.cancels == [[], [None], []]
    assert engine.running == 0


def test_a_client_that_leaves_after_the_last_byte_cancels_nothing() -> None:
    engine = ScriptedEngine(say("done"))
    rig = Rig(engine)

    async def run() -> None:
        async def leave(caller: Caller, chunk: bytes) -> None:
            if b"[DONE]" in chunk:
                caller.leave()
                await asyncio.sleep(0.01)

        reply = await rig.call("POST", CHAT, chat(stream=True), on_chunk=leave)
        assert reply.body.endswith(b"[DONE]\n\n")

    asyncio.run(run())
    assert engine.cancels == [[]]
    assert rig.observer.records[0].status == 200


@pytest.mark.parametrize(("path", "body"), ALL, ids=[path for path, _ in ALL])
def test_bc096_a_reader_that_does_not_read_is_dropped(path: str, body: Any) -> None:
    engine = ScriptedEngine(say("x" * 40))
    rig = Rig(engine, settings=ApiSettings(write_timeout_s=0.02))

    async def run() -> None:
        chunks: list[bytes] = []

        async def stuck(_: Caller, chunk: bytes) -> None:
            chunks.append(chunk)
            if len(chunks) == 4:
                await asyncio.sleep(60)

        reply = await asyncio.wait_for(rig.call("POST", path, body(stream=True), on_chunk=stuck), 1)
        assert not reply.ended
        assert len(chunks) == 4

    asyncio.run(run())
    assert engine.cancels == [[None]]
    assert rig.observer.records[0].error == "client does not read"


def test_bc096_events_are_not_taken_while_the_client_does_not_read() -> None:
    engine = ScriptedEngine(say("x" * 40))
    rig = Rig(engine, settings=ApiSettings(write_timeout_s=60))

    async def run() -> None:
        gate = asyncio.Event()

        async def slow(_: Caller, chunk: bytes) -> None:
            if b'"content":"x"' in chunk:
                await gate.wait()

        task = asyncio.ensure_future(rig.call("POST", CHAT, chat(stream=True), on_chunk=slow))
        await asyncio.sleep(0.02)
        assert engine.generations[0].emitted == 1
        gate.set()
        reply = await task
        assert reply.body.count(b'"content":"x"') == 40

    asyncio.run(run())


@pytest.mark.parametrize(("path", "body"), ALL, ids=[path for path, _ in ALL])
def test_bc188_pings_break_the_silence(path: str, body: Any) -> None:
    rig = Rig(ScriptedEngine(lambda request: [0.1, *say("ok")(request)]), settings=ApiSettings(keepalive_s=0.02))
    reply = rig.post(path, body(stream=True))
    ping = b"event: ping\ndata: " if path == MESSAGES else b": ping\n\n"
    silent = reply.body.split(b'"text":"o"' if path != CHAT else b'"content":"o"')[0]
    assert silent.count(ping) >= 2
    events = reply.events()
    assert events[-1] == (("message_stop", {"type": "message_stop"}) if path == MESSAGES else (None, "[DONE]"))


def test_no_pings_while_tokens_flow() -> None:
    rig = Rig(ScriptedEngine(say("x" * 20, pause=0.002)), settings=ApiSettings(keepalive_s=5))
    assert b": ping" not in rig.post(CHAT, chat(stream=True)).body


def test_bc022_refusals_leave_running_streams_alone() -> None:
    engine = ScriptedEngine(say("x" * 10, pause=0.001))
    rig = Rig(engine)

    async def run() -> None:
        good = [asyncio.ensure_future(rig.call("POST", CHAT, chat(stream=True))) for _ in range(3)]
        bad = await asyncio.gather(*(rig.call("POST", CHAT, chat("x" * 64 * (1 + i % 10))) for i in range(40)))
        assert {reply.status for reply in bad} == {400}
        assert all(reply.body.endswith(b"[DONE]\n\n") for reply in await asyncio.gather(*good))

    asyncio.run(run())
    assert engine.running == 0
    assert len(engine.requests) == 3
