"""Chat completions: what reaches the engine, what comes back, whole and streamed."""

import asyncio
import math
from typing import Any

import msgspec
import pytest

from api.ports import Finished, GenerationRequest, SamplingParams, TokenLogprob, Tokens
from tests.support.api_rig import ALIAS, CHAT, CONTEXT, MODEL, Rig, chat
from tests.support.scripted_engine import (
    ASSISTANT,
    BOS,
    EOS,
    SYSTEM,
    USER,
    VOCAB,
    ScriptedEngine,
    Step,
    emit,
    say,
    tokens,
)

PROMPT = [BOS, USER, *b"hi", EOS, ASSISTANT]


def both(script: Any, body: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """One request whole and streamed (with usage); the streamed texts equal the whole ones."""
    whole = Rig(ScriptedEngine(script)).post(CHAT, body)
    assert whole.status == 200, whole.body
    answer = whole.json()
    stream = Rig(ScriptedEngine(script)).post(CHAT, {**body, "stream": True, "stream_options": {"include_usage": True}})
    assert stream.ended
    *chunks, done = stream.data()
    assert done == "[DONE]"
    usage = chunks.pop()
    assert usage["choices"] == []
    assert usage["usage"] == answer["usage"]
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in [*chunks, usage]}) == 1
    for choice in answer["choices"]:
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == choice["index"]]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert [part["delta"].get("role") for part in own].count("assistant") == 1
        assert "".join(part["delta"].get("content", "") for part in own) == choice["message"]["content"]
        assert [part["finish_reason"] for part in own[:-1]] == [None] * (len(own) - 1)
        assert (own[-1]["delta"], own[-1]["finish_reason"]) == ({}, choice["finish_reason"])
        entries = [entry for part in own if part["logprobs"] for entry in part["logprobs"]["content"]]
        assert entries == (choice["logprobs"]["content"] if choice["logprobs"] else [])
    return answer, chunks


def texts(answer: dict[str, Any]) -> list[tuple[str, str]]:
    return [(choice["message"]["content"], choice["finish_reason"]) for choice in answer["choices"]]


def test_the_whole_answer() -> None:
    answer, _ = both(say("ok", cached=4), chat())
    assert answer["object"] == "chat.completion"
    assert answer["model"] == MODEL
    assert answer["id"].startswith("chatcmpl-")
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "ok", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert answer["usage"] == {
        "prompt_tokens": 6,
        "completion_tokens": 2,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 4},
    }


def test_ids_that_later_choices_take_from_the_first_are_not_cached_ones() -> None:
    """The prompt counts once, so what its first choice computed was computed."""

    def script(request: GenerationRequest) -> list[Any]:
        ends = [Finished(choice, "stop", EOS, cached_tokens=4 * (choice > 0)) for choice in (1, 2, 0)]
        return [*(tokens(request, choice, *b"ok") for choice in range(3)), *ends]

    answer, _ = both(script, chat(n=3))
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


def test_bc084_framing_of_a_stream() -> None:
    reply = Rig(ScriptedEngine(say("a\nb", per_event=2))).post(CHAT, chat(stream=True))
    assert reply.header("content-type") == "text/event-stream; charset=utf-8"
    assert reply.header("cache-control") == "no-cache"
    assert reply.header("x-accel-buffering") == "no"
    assert reply.header("content-encoding") is None
    assert reply.body.endswith(b"}\n\ndata: [DONE]\n\n")
    lines = reply.body.split(b"\n\n")
    assert lines.pop() == b""
    assert all(line.startswith(b"data: ") and b"\n" not in line for line in lines)
    assert reply.data()[1]["choices"][0]["delta"] == {"content": "a\n"}


def test_bc083_no_usage_chunk_unless_asked_for() -> None:
    for options in ({}, {"stream_options": {"include_usage": False}}, {"stream_options": None}):
        data = Rig().post(CHAT, chat(stream=True, **options)).data()
        assert [len(chunk["choices"]) for chunk in data[:-1]] == [1] * (len(data) - 1)
        assert all("usage" not in chunk for chunk in data[:-1])


def test_bc088_instant_end_still_has_role_finish_and_done() -> None:
    answer, chunks = both(say(""), chat())
    assert texts(answer) == [("", "stop")]
    assert answer["usage"]["completion_tokens"] == 0
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [{"role": "assistant", "content": ""}, {}]


def test_bc073_choices_come_interleaved_and_their_usage_adds_up() -> None:
    answer, chunks = both(say("abc"), chat(n=3, max_tokens=2))
    assert texts(answer) == [("ab", "length")] * 3
    assert answer["usage"]["completion_tokens"] == 6
    assert answer["usage"]["prompt_tokens"] == 6
    assert [chunk["choices"][0]["index"] for chunk in chunks] == [0, 1, 2] * 4


@pytest.mark.parametrize("per_event", [1, 2, 3, 7, 30])
@pytest.mark.parametrize(
    ("text", "fields", "seen", "reason", "count"),
    [
        ("0123456789x", {"stop": ["3456789"]}, "012", "stop", 10),
        ("hello END", {"stop": "END"}, "hello ", "stop", 9),
        ("ENDhello", {"stop": ["END"]}, "", "stop", 3),
        ("END", {"stop": ["END"], "max_tokens": 3}, "", "stop", 3),
        ("ENDless", {"stop": ["END"], "max_tokens": 3}, "", "stop", 3),
        ("ENx", {"stop": ["END"], "max_tokens": 2}, "EN", "length", 2),
        ("p;q;r;s", {"stop": ["q;r"], "include_stop_str_in_output": True}, "p;q;r", "stop", 5),
        ("no stop", {"stop": ["z", "y"]}, "no stop", "stop", 7),
        ("a\U0001f9ffb", {"stop": ["\U0001f9ff"]}, "a", "stop", 5),
    ],
)  # fmt: skip
def test_bc010_bc013_bc014_stop_strings(
    text: str, fields: dict[str, Any], seen: str, reason: str, count: int, per_event: int
) -> None:
    answer, _ = both(say(text, per_event=per_event), chat(**fields))
    assert texts(answer) == [(seen, reason)]
    assert answer["usage"]["completion_tokens"] == count


def test_bc014_nothing_after_the_stop_string_of_the_same_token() -> None:
    answer, _ = both(emit(*b"p;", 265, *b"x"), chat(stop=["q;r"], include_stop_str_in_output=True))
    assert texts(answer) == [("p;q;r", "stop")]
    assert answer["usage"]["completion_tokens"] == 3


def test_bc012_an_unrelated_stop_string_delays_nothing() -> None:
    _, chunks = both(say("1 2 3 4"), chat(stop=["Z" * 30]))
    assert [chunk["choices"][0]["delta"].get("content") for chunk in chunks[1:-1]] == list("1 2 3 4")


def test_a_stop_string_cancels_its_choice_only_and_once() -> None:
    def script(request: GenerationRequest) -> list[Step]:
        first = [tokens(request, 0, *b"xEND"), 0.001, tokens(request, 0, *b"more")]
        return [*first, tokens(request, 1, *b"fine"), Finished(0, "stop", EOS), Finished(1, "stop", EOS)]

    engine = ScriptedEngine(script)
    answer = Rig(engine).post(CHAT, chat(n=2, stop="END")).json()
    assert texts(answer) == [("x", "stop"), ("fine", "stop")]
    assert answer["usage"]["completion_tokens"] == 8
    assert engine.cancels == [[0]]
    assert engine.running == 0


@pytest.mark.parametrize("limit", range(1, 14))
def test_bc003_length_cuts_inside_characters(limit: int) -> None:
    text = "\U0001f9ff" * 3
    answer, chunks = both(say(text), chat(max_tokens=limit))
    (seen, reason) = texts(answer)[0]
    whole, rest = divmod(limit, 4)
    assert seen == ("\U0001f9ff" * whole + ("\ufffd" if rest else ""))[: 3 if limit > 12 else 4]
    assert reason == ("stop" if limit > 12 else "length")
    assert answer["usage"]["completion_tokens"] == min(limit, 12)
    replaced = ["\ufffd" in chunk["choices"][0]["delta"].get("content", "") for chunk in chunks[:-1]]
    assert not any(replaced[:-1])


def test_bc001_neighbours_do_not_mix() -> None:
    rigs = Rig(ScriptedEngine(say("\U0001f469\u200d\U0001f680 \u6f22\u5b57 \u017dlu\u0165", pause=0.0005)))

    async def run() -> list[str]:
        calls = [rigs.call("POST", CHAT, chat(stream=True)) for _ in range(8)]
        replies = await asyncio.gather(*calls)
        return [
            "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in reply.data()[:-1]) for reply in replies
        ]

    assert set(asyncio.run(run())) == {"\U0001f469\u200d\U0001f680 \u6f22\u5b57 \u017dlu\u0165"}


def test_bc005_bc066_chat_logprobs() -> None:
    answer, _ = both(emit(263, 264, *b"!"), chat(logprobs=True, top_logprobs=2))
    content = answer["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["\ufffd", "\ufffd\ufffd", "!"]
    assert bytes(b for entry in content for b in entry["bytes"]).decode() == "\U0001fae0!"
    assert answer["choices"][0]["message"]["content"] == "\U0001fae0!"
    assert [239, 191, 189] not in [entry["bytes"] for entry in content]
    assert [len(entry["top_logprobs"]) for entry in content] == [2, 2, 2]
    assert content[2]["top_logprobs"] == [
        {"token": "!", "logprob": -0.5, "bytes": [33]},
        {"token": '"', "logprob": -1.5, "bytes": [34]},
    ]


def test_bc065_impossible_alternatives_are_null_and_the_json_stays_strict() -> None:
    def script(request: GenerationRequest) -> list[Step]:
        top = ((111, -0.0), (112, -math.inf), (113, math.nan))
        return [Tokens(0, (111,), (TokenLogprob(111, -0.0, top),)), Finished(0, "stop", EOS)]

    answer, _ = both(script, chat(logprobs=True, top_logprobs=3))
    (entry,) = answer["choices"][0]["logprobs"]["content"]
    assert [one["logprob"] for one in entry["top_logprobs"]] == [0.0, None, None]
    raw = Rig(ScriptedEngine(script)).post(CHAT, chat(logprobs=True, top_logprobs=3)).body
    assert not any(word in raw for word in (b"NaN", b"Infinity"))


def test_bc069_no_alternatives_is_not_no_logprobs() -> None:
    for fields in ({"logprobs": True}, {"logprobs": True, "top_logprobs": 0}):
        answer, _ = both(say("ok"), chat(**fields))
        assert [entry["top_logprobs"] for entry in answer["choices"][0]["logprobs"]["content"]] == [[], []]


def test_logprobs_cover_the_counted_tokens_stop_string_included() -> None:
    answer, _ = both(say("xEND more", per_event=3), chat(logprobs=True, stop="END"))
    assert [entry["token"] for entry in answer["choices"][0]["logprobs"]["content"]] == list("xEND")
    assert answer["usage"]["completion_tokens"] == 4


def asked(**fields: Any) -> SamplingParams:
    rig = Rig()
    assert rig.post(CHAT, chat(**fields)).status == 200
    assert rig.engine.requests[0].prompt_ids == PROMPT
    return rig.engine.requests[0].sampling


ROOM = CONTEXT - len(PROMPT)


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({}, ROOM),
        ({"max_tokens": None}, ROOM),
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 5}, 5),
        ({"max_tokens": 5, "max_completion_tokens": 9}, 9),
        ({"max_tokens": CONTEXT}, ROOM),
        ({"max_tokens": 10**30}, ROOM),
    ],
)
def test_bc019_bc020_max_tokens(fields: dict[str, Any], limit: int) -> None:
    assert asked(**fields) == SamplingParams(max_tokens=limit)


def test_bc020_a_clamped_answer_that_fills_the_context_ends_with_length() -> None:
    answer, _ = both(say("x" * CONTEXT), chat(max_tokens=CONTEXT))
    assert texts(answer) == [("x" * ROOM, "length")]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"temperature": 0}, {"temperature": 0.0}),
        ({"temperature": 5e-324}, {"temperature": 0.0}),
        ({"temperature": 1e-12}, {"temperature": 0.0}),
        ({"temperature": 1e-5}, {"temperature": 1e-5}),
        ({"temperature": None, "top_p": None}, {}),
        ({"top_p": 0}, {"temperature": 0.0}),
        ({"top_p": 1e-12}, {"top_p": 1e-12}),
        ({"top_k": 0}, {}),
        ({"top_k": -1}, {}),
        ({"top_k": 9_999_999}, {}),
        ({"top_k": 3}, {"top_k": 3}),
        ({"min_p": 1.0}, {"min_p": 1.0}),
        ({"frequency_penalty": 2.0, "presence_penalty": -2}, {"frequency_penalty": 2.0, "presence_penalty": -2.0}),
        ({"repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"logit_bias": {"5": 100, str(VOCAB - 1): -100}}, {"logit_bias": ((5, 100.0), (VOCAB - 1, -100.0))}),
        ({"logit_bias": {}}, {}),
        ({"seed": 0}, {"seed": 0}),
        ({"seed": -(2**63)}, {"seed": -(2**63)}),
        ({"seed": None}, {}),
        ({"min_tokens": 4, "ignore_eos": True}, {"min_tokens": 4, "ignore_eos": True}),
        ({"min_tokens": 10**6}, {"min_tokens": ROOM}),
        ({"stop_token_ids": [7, 8]}, {"stop_token_ids": (7, 8)}),
        ({"logprobs": True}, {"top_logprobs": 0}),
        ({"logprobs": True, "top_logprobs": 20}, {"top_logprobs": 20}),
        ({"logprobs": False}, {}),
    ],
)
def test_bc075_bc076_bc079_bc081_sampling(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    assert asked(**fields) == msgspec.structs.replace(SamplingParams(max_tokens=ROOM), **expected)


def test_inert_fields_change_nothing() -> None:
    inert = {
        "user": "u", "metadata": {"a": {"b": 1}}, "store": True, "service_tier": "auto", "parallel_tool_calls": False,
        "tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"],
        "safety_identifier": "s", "prompt_cache_key": "k",
    }  # fmt: skip
    assert asked(**inert) == SamplingParams(max_tokens=ROOM)
    assert asked(tools=None, tool_choice=None, user=None, response_format=None) == SamplingParams(max_tokens=ROOM)


def prompted(messages: list[dict[str, Any]]) -> list[int]:
    rig = Rig()
    assert rig.post(CHAT, {"model": ALIAS, "messages": messages}).status == 200
    return list(rig.engine.requests[0].prompt_ids)


def test_bc027_parts_join_without_a_separator() -> None:
    parts = prompted(
        [
            {"role": "system", "content": [{"type": "text", "text": "One."}]},
            {"role": "user", "content": [{"type": "text", "text": "Of "}, {"type": "text", "text": "Fr?"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "Paris"}]},
            {"role": "user", "content": "And?"},
        ]
    )
    plain = prompted(
        [
            {"role": "system", "content": "One."},
            {"role": "user", "content": "Of Fr?"},
            {"role": "assistant", "content": "Paris"},
            {"role": "user", "content": "And?"},
        ]
    )
    assert parts == plain
    assert plain[:6] == [BOS, SYSTEM, *b"One."]


def test_bc029_bc030_order_is_the_templates_business() -> None:
    assert prompted([{"role": "developer", "content": "B"}, {"role": "user", "content": "H"}]) == prompted(
        [{"role": "system", "content": "B"}, {"role": "user", "content": "H"}]
    )
    assert prompted([{"role": "user", "content": "1"}, {"role": "user", "content": "2"}]) == [
        BOS, USER, *b"1", EOS, USER, *b"2", EOS, ASSISTANT
    ]  # fmt: skip


def test_bc031_messages_that_sdks_send_back() -> None:
    back = {"role": "assistant", "content": None, "refusal": None, "annotations": [], "audio": None,
            "function_call": None, "tool_calls": None}  # fmt: skip
    assert prompted([{"role": "user", "content": "a", "name": "pat"}, back, {"role": "user", "content": "b"}]) == [
        BOS, USER, *b"a", EOS, ASSISTANT, EOS, USER, *b"b", EOS, ASSISTANT
    ]  # fmt: skip


def test_bc048_tool_calls_in_the_history_are_refused_by_place() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "edit", "arguments": '{"text": "half a str'}}
    body = chat()
    body["messages"] += [{"role": "assistant", "content": None, "tool_calls": [call]}]
    reply = Rig().post(CHAT, body)
    assert (reply.status, reply.json()["error"]["param"]) == (400, "messages[1].tool_calls[0]")


@pytest.mark.parametrize("size", [CONTEXT, CONTEXT + 10, CONTEXT * 10])
@pytest.mark.parametrize("stream", [False, True])
def test_bc021_bc024_prompts_that_do_not_fit(size: int, stream: bool) -> None:
    rig = Rig()
    reply = rig.post(CHAT, chat("x" * (size - 4), stream=stream, max_tokens=16))
    assert (reply.status, reply.header("content-type")) == (400, "application/json")
    error = reply.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "context_length_exceeded")
    assert f"the prompt has {size} tokens; the context holds {CONTEXT}" in error["message"]
    assert not rig.engine.requests


def test_bc021_one_less_than_the_context_gives_one_token() -> None:
    rig = Rig(ScriptedEngine(say("xyz")))
    answer = rig.post(CHAT, chat("x" * (CONTEXT - 5))).json()
    assert texts(answer) == [("x", "length")]
    assert answer["usage"]["prompt_tokens"] == CONTEXT - 1


def test_an_alias_is_echoed_and_the_engine_sees_the_model() -> None:
    rig = Rig()
    assert rig.post(CHAT, {**chat(), "model": ALIAS}).json()["model"] == ALIAS
    assert rig.engine.requests[0].model == MODEL


def test_large_prompts_are_tokenised_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    rig = Rig(context=100_000)
    encode = rig.codec.encode_chat

    def spy(*args: Any, **kwargs: Any) -> list[int]:
        try:
            asyncio.get_running_loop()
            seen.append("loop")
        except RuntimeError:
            seen.append("thread")
        return encode(*args, **kwargs)

    monkeypatch.setattr(rig.codec, "encode_chat", spy)
    assert rig.post(CHAT, chat("x" * 20_000)).status == 200
    assert rig.post(CHAT, chat("x")).status == 200
    assert seen == ["thread", "loop"]
