"""Anthropic messages: conversation rules, the strict event order, token counts."""

import asyncio
from typing import Any

import pytest

from api.ports import Finished, GenerationRequest
from tests.support.api_rig import CONTEXT, COUNT, MESSAGES, MODEL, Rig, message
from tests.support.scripted_engine import ASSISTANT, BOS, EOS, SYSTEM, USER, ScriptedEngine, say, tokens


def check_order(events: list[tuple[str | None, Any]]) -> dict[str, Any]:
    """A strict state machine over the events of a stream; returns the message that they build."""
    assert all(name == payload["type"] for name, payload in events)
    (_, first), *rest = events
    assert first["type"] == "message_start"
    built = first["message"]
    assert (built["content"], built["stop_reason"], built["type"], built["role"]) == ([], None, "message", "assistant")
    kinds = [payload["type"] for _, payload in rest if payload["type"] != "ping"]
    assert rest[0][1] == {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    deltas = kinds.count("content_block_delta")
    assert kinds == [
        "content_block_start",
        *["content_block_delta"] * deltas,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    text = ""
    for _, payload in rest:
        if payload["type"] == "content_block_delta":
            assert (payload["index"], payload["delta"]["type"]) == (0, "text_delta")
            text += payload["delta"]["text"]
        if payload["type"] == "message_delta":
            built |= payload["delta"]
            built["usage"] |= payload["usage"]
    built["content"] = [{"type": "text", "text": text}]
    return built


def both(script: Any, body: dict[str, Any]) -> dict[str, Any]:
    """One request whole and streamed: the same message."""
    whole = Rig(ScriptedEngine(script)).post(MESSAGES, body)
    assert whole.status == 200, whole.body
    stream = Rig(ScriptedEngine(script)).post(MESSAGES, {**body, "stream": True})
    assert stream.ended
    assert b"[DONE]" not in stream.body
    answer, built = whole.json(), check_order(stream.events())
    assert {**built, "id": None} == {**answer, "id": None}
    return answer


def test_bc090_golden_transcript() -> None:
    reply = Rig(ScriptedEngine(say("ok", cached=2))).post(MESSAGES, message(stream=True))
    events = reply.events()
    message_id = events[0][1]["message"]["id"]
    assert message_id.startswith("msg_")
    usage = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0, "input_tokens": 6, "output_tokens": 0}
    shell = {
        "id": message_id, "type": "message", "role": "assistant", "model": MODEL, "content": [], "stop_reason": None,
        "stop_sequence": None, "usage": usage,
    }  # fmt: skip
    block = {"type": "text", "text": ""}
    assert events == [
        ("message_start", {"type": "message_start", "message": shell}),
        ("content_block_start", {"type": "content_block_start", "index": 0, "content_block": block}),
        ("ping", {"type": "ping"}),
        ("content_block_delta",
         {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "o"}}),
        ("content_block_delta",
         {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "k"}}),
        ("content_block_stop", {"type": "content_block_stop", "index": 0}),
        ("message_delta", {
            "type": "message_delta",
            "delta": {"stop_reason": "end_turn", "stop_sequence": None},
            "usage": usage | {"input_tokens": 4, "cache_read_input_tokens": 2, "output_tokens": 2},
        }),
        ("message_stop", {"type": "message_stop"}),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "fields", "reason", "stop", "seen", "count"),
    [
        ("Hello there", {"max_tokens": 3}, "max_tokens", None, "Hel", 3),
        ("Hello", {}, "end_turn", None, "Hello", 5),
        ("hello END", {"stop_sequences": ["END"]}, "stop_sequence", "END", "hello ", 9),
        ("ENDhello", {"stop_sequences": ["END"]}, "stop_sequence", "END", "", 3),
        ("END", {"stop_sequences": ["x", "END"], "max_tokens": 3}, "stop_sequence", "END", "", 3),
        ("", {}, "end_turn", None, "", 0),
        ("x" * 99, {"max_tokens": 1000}, "max_tokens", None, "x" * (CONTEXT - 6), CONTEXT - 6),
    ],
)
def test_bc013_bc175_stop_reasons_and_usage(
    text: str, fields: dict[str, Any], reason: str, stop: str | None, seen: str, count: int
) -> None:
    answer = both(say(text, cached=5), message(**fields))
    assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, stop)
    assert answer["content"] == [{"type": "text", "text": seen}]
    usage = answer["usage"]
    assert usage["output_tokens"] == count
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]) == (1, 5, 0)


def prompted(**fields: Any) -> list[int]:
    rig = Rig()
    reply = rig.post(MESSAGES, {**message(), **fields})
    assert reply.status == 200, reply.body
    return list(rig.engine.requests[0].prompt_ids)


def turn(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def reused(request: GenerationRequest) -> list[Any]:
    """Six ids of which two were reused and three are left for others."""
    return [tokens(request, 0, *b"ok"), Finished(0, "stop", EOS, cached_tokens=2, created_tokens=3)]


def test_the_three_input_counts_add_up_to_the_prompt() -> None:
    assert both(reused, message())["usage"] == {
        "input_tokens": 1, "cache_creation_input_tokens": 3, "cache_read_input_tokens": 2, "output_tokens": 2,
    }  # fmt: skip


MARK = {"cache_control": {"type": "ephemeral"}}


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({}, False),
        ({"cache_control": None}, False),
        ({"system": [{"type": "text", "text": "Be brief.", "cache_control": None}]}, False),
        (MARK, True),
        ({"system": [{"type": "text", "text": "Be brief.", **MARK}]}, True),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "hi", **MARK}]}]}, True),
    ],
)
def test_cache_control_asks_that_the_prompt_be_kept(fields: dict[str, Any], kept: bool) -> None:
    engine = ScriptedEngine(say("ok"))
    assert Rig(engine).post(MESSAGES, message(**fields)).status == 200
    assert [request.keep_prefix for request in engine.requests] == [kept]


def text_block(text: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **fields}


def test_system_as_text_and_as_blocks() -> None:
    cached = {"cache_control": {"type": "ephemeral", "ttl": "5m"}}
    plain = [BOS, SYSTEM, *b"Be brief.", EOS, USER, *b"hi", EOS, ASSISTANT]
    assert prompted(system="Be brief.") == plain
    assert prompted(system=[text_block("Be "), text_block("brief.", **cached)]) == plain
    assert prompted(system="") == prompted(system=[]) == prompted() == [BOS, USER, *b"hi", EOS, ASSISTANT]


def test_blocks_join_and_turns_of_one_role_combine() -> None:
    blocks = [turn("user", [text_block("One"), text_block(".", cache_control=None, citations=None)])]
    assert prompted(messages=blocks) == [BOS, USER, *b"One.", EOS, ASSISTANT]
    assert prompted(messages=[turn("user", "One."), turn("user", "Say OK.")]) == [
        BOS, USER, *b"One.\n\nSay OK.", EOS, ASSISTANT
    ]  # fmt: skip
    assert prompted(messages=[turn("user", "a"), turn("system", "s"), turn("user", "b")]) == [
        BOS, USER, *b"a", EOS, SYSTEM, *b"s", EOS, USER, *b"b", EOS, ASSISTANT
    ]  # fmt: skip


def test_bc104_very_many_turns_of_one_role() -> None:
    turns = [turn("user", f"{number}") for number in range(20_000)]
    rig = Rig(context=1_000_000)
    assert rig.post(MESSAGES, {**message(), "messages": turns}).status == 200
    asked = bytes(token_id for token_id in rig.engine.requests[0].prompt_ids if token_id < 256)
    assert asked == "\n\n".join(map(str, range(20_000))).encode()


def test_bc032_a_last_assistant_turn_is_continued() -> None:
    assert prompted(messages=[turn("user", "Days?"), turn("assistant", "Mon,")]) == [
        BOS, USER, *b"Days?", EOS, ASSISTANT, *b"Mon,"
    ]  # fmt: skip
    answer = both(say(" Tue"), {**message(), "messages": [turn("user", "Days?"), turn("assistant", "Mon,")]})
    assert answer["content"][0]["text"] == " Tue"
    assert answer["usage"]["input_tokens"] == 13


def test_an_empty_prefill_is_none() -> None:
    assert prompted(messages=[turn("user", "a"), turn("assistant", "")]) == [BOS, USER, *b"a", EOS, ASSISTANT]


def test_inert_fields_and_sampling() -> None:
    rig = Rig()
    body = message(
        metadata={"user_id": "u"}, service_tier="auto", cache_control={"type": "ephemeral"}, tools=[],
        thinking={"type": "disabled"}, tool_choice={"type": "none"}, temperature=0.5, top_k=7, top_p=0.9,
    )  # fmt: skip
    assert rig.post(MESSAGES, body).status == 200
    sampling = rig.engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.max_tokens) == (0.5, 7, 0.9, 32)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"system": "Be brief."},
        {"system": [text_block("a"), text_block("b")], "messages": [turn("user", "a"), turn("assistant", "b")]},
    ],
)
def test_bc177_count_tokens_equals_the_real_count(fields: dict[str, Any]) -> None:
    rig = Rig(ScriptedEngine(say("x", cached=1)))
    body = {**message(), **fields}
    usage = rig.post(MESSAGES, body).json()["usage"]
    del body["max_tokens"]
    counted = rig.post(COUNT, body)
    assert counted.json() == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
    assert len(rig.engine.requests) == 1


def test_bc021_a_stream_that_does_not_fit_is_a_plain_error() -> None:
    reply = Rig().post(MESSAGES, message("x" * CONTEXT, stream=True))
    assert (reply.status, reply.header("content-type")) == (400, "application/json")
    assert f"the context holds {CONTEXT}" in reply.json()["error"]["message"]


def test_bc174_concurrent_streams_keep_their_own_state() -> None:
    rig = Rig(ScriptedEngine(lambda request: say(bytes(request.prompt_ids[2:-2]).decode(), pause=0.0002)(request)))

    async def run() -> list[dict[str, Any]]:
        replies = await asyncio.gather(
            *(rig.call("POST", MESSAGES, message(f"text {i}", stream=True)) for i in range(40))
        )
        return [check_order(reply.events()) for reply in replies]

    built = asyncio.run(run())
    assert [one["content"][0]["text"] for one in built] == [f"text {i}" for i in range(40)]
    assert len({one["id"] for one in built}) == 40
    assert rig.engine.running == 0
    assert rig.engine.cancels == [[]] * 40
