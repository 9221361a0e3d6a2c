"""Bodies, paths and methods that are wrong: one clear answer in the caller's shape, and the next request works."""

import asyncio
import json
from typing import Any

import msgspec
import pytest

from api.body import decode, lone_surrogate
from api.errors import ApiError, UnknownFieldError
from api.schemas.openai import chat_decoder
from api.settings import ApiSettings
from tests.support.api_rig import CHAT, COUNT, MESSAGES, MODEL, TEXT, Rig, chat, message, prompt
from tests.support.scripted_engine import VOCAB

JSON = {"content-type": "application/json"}
PATHS = (CHAT, TEXT, MESSAGES, COUNT)


USER_TURN = {"role": "user", "content": "hi"}


def refused(rig: Rig, path: str, body: Any, status: int = 400, headers: dict[str, str] | None = None) -> dict[str, Any]:
    """The error of a refused request, after checks that hold for each: shape, request id, and that the rig goes on."""
    reply = rig.post(path, body, headers or JSON)
    assert reply.status == status, reply.body
    assert reply.header("content-type") == "application/json"
    answer = reply.json()
    assert answer["request_id"] == reply.header("x-request-id")
    if path.startswith("/v1/messages"):
        assert set(answer) == {"type", "error", "request_id"}
        assert answer["type"] == "error"
        assert set(answer["error"]) == {"type", "message"}
        assert reply.header("request-id") == answer["request_id"]
    else:
        assert set(answer) == {"error", "request_id"}
        assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert not rig.engine.requests
    assert rig.observer.records[-1].status == status
    assert len(rig.observer.records) == len(rig.observer.started)
    assert rig.post(CHAT, chat(), JSON).status == 200
    rig.engine.requests.clear()
    return answer["error"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "body", [b"[]", b"null", b'"hi"', b"1", b"true", b"", b"{", b"{}", b'{"model":"tiny",}', b"// c\n{}"]
)
def test_bc101_top_level_is_no_object(path: str, body: bytes) -> None:
    assert refused(Rig(), path, body)["type"] == "invalid_request_error"


@pytest.mark.parametrize("depth", [100, 1000, 20_000, 200_000])
@pytest.mark.parametrize("name", [b"x", b"metadata", b"prompt"])
def test_bc098_deep_nesting(depth: int, name: bytes) -> None:
    nested = b"[" * depth + b"]" * depth
    reply = Rig().post(TEXT, b'{"model":"tiny","prompt":"hi","' + name + b'":' + nested + b"}", JSON)
    assert reply.status == (200 if name == b"metadata" and depth == 100 else 400)


@pytest.mark.parametrize("depth", [1000, 20_000, 200_000])
@pytest.mark.parametrize(
    ("path", "head", "tail"),
    [
        (CHAT, b'"tools":[{"type":"function","function":{"name":"f","parameters":', b"}}]"),
        (CHAT, b'"response_format":{"type":"json_schema","json_schema":{"schema":', b"}}"),
        (MESSAGES, b'"tools":[{"name":"f","input_schema":', b"}]"),
        (MESSAGES, b'"metadata":', b""),
    ],
)
def test_bc098_deep_nesting_in_fields_of_features(path: str, head: bytes, tail: bytes, depth: int) -> None:
    body = b'{"model":"tiny","max_tokens":4,"messages":[{"role":"user","content":"hi"}],' + head
    assert "nested too deeply" in refused(Rig(), path, body + b"[" * depth + b"]" * depth + tail + b"}")["message"]


def test_bc098_deep_nesting_in_a_tool_call_of_the_history() -> None:
    block = b'{"type":"tool_use","id":"a","name":"b","input":' + b"[" * 20_000 + b"]" * 20_000 + b"}"
    body = b'{"model":"tiny","max_tokens":4,"messages":[{"role":"assistant","content":[' + block + b"]}]}"
    assert "nested too deeply" in refused(Rig(), MESSAGES, body)["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, b'{"model":"tiny","messages":[{"role":"user","content":"cut \\ud83e"}]}'),
        (CHAT, b'{"model":"tiny","messages":[{"role":"user","content":"cut \\ud83e"}],"stream":true}'),
        (TEXT, b'{"model":"tiny","prompt":"\\udcab"}'),
        (MESSAGES, b'{"model":"tiny","messages":[{"role":"user","content":[{"type":"text","text":"\\udd16 q"}]}]}'),
        (CHAT, b'{"model":"tiny","messages":[{"role":"user","content":"hi"}],"stop":"\\ud800\\ud800"}'),
        (CHAT, b'{"model":"\\ud83e","messages":[{"role":"user","content":"hi"}]}'),
        (CHAT, b'{"model":"tiny","messages":[{"role":"user","content":"hi"}],"user":"\\ud83e"}'),
        (CHAT, b'{"model":"tiny","messages":[{"role":"user","content":"hi"}],"tools":[{"a":"\\ud83e"}]}'),
        (CHAT, b'{"model":"tiny","messages":[{"role":"user","content":"hi"}],"response_format":{"y":"\\ud83e"}}'),
    ],
)  # fmt: skip
def test_bc099_lone_surrogates(path: str, body: bytes) -> None:
    error = refused(Rig(), path, body)
    assert f"lone surrogate escape at byte {body.index(b'ud') - 1}" in error["message"]


def test_bc099_paired_escapes_work() -> None:
    rig = Rig()
    body = b'{"model":"tiny","prompt":"a\\ud83e\\udd16b","max_tokens":2}'
    assert rig.post(TEXT, body, JSON).status == 200
    assert rig.engine.requests[0].prompt_ids[1:] == list("a\U0001f916b".encode())


@pytest.mark.parametrize(
    ("body", "at"), [(rb"\\ud83e", None), (rb"\ud83e\udd16", None), (rb"x\ud83e", 1), (rb"\ud83e\\ud83e", 0)]
)
def test_lone_surrogate_reads_escapes_as_json_does(body: bytes, at: int | None) -> None:
    assert lone_surrogate(body) == at


@pytest.mark.parametrize("hex_body", ["7b226d6f64656c223a22ff227d", "efbbbf7b7d", "feff007b007d"])
def test_bc100_undecodable_bodies(hex_body: str) -> None:
    assert "no valid JSON" in refused(Rig(), CHAT, bytes.fromhex(hex_body))["message"]


@pytest.mark.parametrize("before", [0, 65_530, 200_000])
@pytest.mark.parametrize("name", [b"user", b"metadata", b"response_format"])
def test_bc100_undecodable_values_that_nothing_reads(name: bytes, before: int) -> None:
    rig = Rig(context=500_000)

    def body(value: bytes) -> bytes:
        padding = b"x" * before
        value = {b"user": b'"%s"', b"metadata": b'{"a":["%s"]}', b"response_format": b'{"type":"text","a":"%s"}'}[
            name
        ] % value
        return (
            b'{"model":"tiny","messages":[{"role":"user","content":"' + padding + b'"}],"' + name + b'":' + value + b"}"
        )

    for damaged in (b"\xff", b"\xe6\xbc", b"\xed\xa0\x80"):
        assert "are no UTF-8" in refused(rig, CHAT, body(damaged))["message"]
    assert rig.post(CHAT, body("\u6f22\U0001f9ff".encode()), JSON).status == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-type": "application/json"}, 200),
        ({"content-type": "application/json; charset=UTF-8"}, 200),
        ({"content-type": "application/vnd.x+json"}, 200),
        ({"content-type": ""}, 200),
        ({}, 200),
        ({"content-type": "application/json; charset=utf-16"}, 415),
        ({"content-type": "application/json; charset=nonsense"}, 415),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "multipart/form-data; boundary=x"}, 415),
        ({"content-encoding": "gzip"}, 415),
    ],
)
def test_bc100_media_types(headers: dict[str, str], status: int) -> None:
    assert Rig().post(CHAT, chat(), headers).status == status


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_json_does_not_have(value: str) -> None:
    body = f'{{"model":"tiny","prompt":"x","temperature":{value}}}'.encode()
    refused(Rig(), TEXT, body)


def test_bc104_a_declared_length_is_refused_and_its_body_thrown_away() -> None:
    rig = Rig(settings=ApiSettings(max_body_bytes=100))

    async def call() -> None:
        callers: list[Any] = []
        reply = await rig.call("POST", CHAT, [b"x" * 101], {"content-length": "101"}, callers=callers)
        assert reply.status == 413
        assert reply.json()["error"]["code"] == "body_too_large"
        assert reply.json()["error"]["message"] == (
            "the body has 101 bytes or more; at most 100 are taken: send less, or raise server.max_body_mb"
        )
        assert callers[0]._parts == []

    asyncio.run(call())


def test_bc104_a_longer_body_than_declared_is_refused_while_reading() -> None:
    rig = Rig(settings=ApiSettings(max_body_bytes=100))
    reply = rig.post(MESSAGES, [b"x" * 60, b"x" * 60, b"x" * 60])
    assert reply.status == 413
    assert reply.json()["error"]["type"] == "request_too_large"


def test_a_body_in_parts_is_joined() -> None:
    raw = json.dumps(chat("in parts")).encode()
    rig = Rig()
    assert rig.post(CHAT, [raw[:7], raw[7:20], raw[20:]]).status == 200
    assert bytes(i for i in rig.engine.requests[0].prompt_ids if i < 256) == b"in parts"


def test_a_body_that_does_not_arrive_is_given_up() -> None:
    rig = Rig(settings=ApiSettings(body_timeout_s=0.02))
    reply = asyncio.run(rig.call("POST", CHAT, [b'{"model":'], stalls=True))
    assert reply.status == 408
    assert "within 0.02 s" in reply.json()["error"]["message"]


@pytest.mark.parametrize("name", ["no-such-model", "", "../../etc/passwd", "x" * 100_000, "TINY", "tiny "])
@pytest.mark.parametrize("path", PATHS)
def test_bc106_unknown_models(path: str, name: str) -> None:
    body = {CHAT: chat(), TEXT: prompt(), MESSAGES: message(), COUNT: chat()}[path] | {"model": name}
    error = refused(Rig(), path, body, 404)
    assert error["type"] == ("not_found_error" if path in (MESSAGES, COUNT) else "invalid_request_error")
    assert error.get("code", "model_not_found") == "model_not_found"
    assert len(error["message"]) < 200
    assert "'tiny'" in error["message"]


def test_bc106_no_model_or_null() -> None:
    assert refused(Rig(), CHAT, {**chat(), "model": None})["param"] == "model"
    assert refused(Rig(), CHAT, {"messages": chat()["messages"]})["param"] == "model"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", CHAT, 405),
        ("DELETE", "/v1/models/x", 405),
        ("POST", "/v1/unknown", 404),
        ("GET", "/", 404),
        ("GET", "/v1/messages/other", 404),
        ("GET", "/v1/models/" + "x" * 5000, 414),
        ("POST", f"/v1//{CHAT.removeprefix('/v1/')}", 200),
        ("POST", f"{CHAT}/", 200),
        ("OPTIONS", CHAT, 204),
    ],
)
def test_bc107_methods_and_paths(method: str, path: str, status: int) -> None:
    rig = Rig()
    reply = asyncio.run(rig.call(method, path, chat()))
    assert reply.status == status
    assert reply.header("x-request-id")
    if status == 405:
        assert reply.header("allow")
    if status > 400:
        assert "message" in reply.json()["error"]
        assert "Traceback" not in reply.body.decode()
    assert [record.status for record in rig.observer.records] == [status]


@pytest.mark.parametrize("path", ["/health", "/health/live", "/health/ready", "/v1/models"])
def test_bc107_head_gives_the_headers_alone(path: str) -> None:
    rig = Rig()
    got, head = rig.get(path), asyncio.run(rig.call("HEAD", path))
    assert head.status == 200
    assert head.body == b""
    assert head.header("content-length") == got.header("content-length") == str(len(got.body))


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (CHAT, chat(x=1), "x"),
        (CHAT, chat(guided_regex="[a-"), "guided_regex"),
        (CHAT, chat(functions=[]), "functions"),
        (CHAT, {"model": MODEL, "messages": [{"role": "user", "content": "a", "x_extra": 1}]}, "messages[0].x_extra"),
        (CHAT, chat(stream=True, stream_options={"zz": 1}), "stream_options.zz"),
        (TEXT, prompt(response_format={}), "response_format"),
        (MESSAGES, message(seed=1), "seed"),
        (MESSAGES, {**message(), "messages": [{"role": "user", "content": [{"type": "text", "text": "a", "k": 1}]}]},
         "messages[0].content[0].k"),
    ],
)  # fmt: skip
def test_unknown_fields_are_named_with_their_path(path: str, body: dict[str, Any], field: str) -> None:
    error = refused(Rig(), path, body)
    assert error["message"].startswith(f"{field}: no such field")
    if path != MESSAGES:
        assert (error["param"], error["code"]) == (field, "unknown_parameter")


def test_a_huge_unknown_field_name_is_not_echoed_in_full() -> None:
    with pytest.raises(UnknownFieldError) as caught:
        decode(chat_decoder, msgspec.json.encode({"y" * 100_000: 1}))
    assert len(caught.value.message) < 400


def test_duplicate_keys_take_the_last() -> None:
    rig = Rig()
    assert rig.post(TEXT, b'{"model":"x","model":"tiny","prompt":"hi"}').status == 200


@pytest.mark.parametrize(
    ("path", "body", "param", "text"),
    [
        (CHAT, {**chat(), "messages": []}, "messages", "messages is empty"),
        (CHAT, {"model": MODEL}, "messages", "required"),
        (CHAT, {**chat(), "messages": None}, "messages", "Expected `array`"),
        (CHAT, {**chat(), "messages": {"role": "user", "content": "hi"}}, "messages", "Expected `array`"),
        (CHAT, {**chat(), "messages": ["hi"]}, "messages[0]", "Expected `object`"),
        (CHAT, {**chat(), "messages": [{"content": "hi"}]}, "messages[0].role", "required"),
        (CHAT, {**chat(), "messages": [{"role": "wizard", "content": "hi"}]}, "messages[0].role", "'wizard'"),
        (CHAT, {**chat(), "messages": [{"role": "tool", "content": "hi"}]}, "messages[0].role", "must be one of"),
        (CHAT, {**chat(), "messages": [{"role": "user", "content": None}]}, "messages[0].content", "required"),
        (CHAT, {**chat(), "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
         "messages[0].content[0].type", "only 'text'"),
        (CHAT, {**chat(), "messages": [{"role": "user", "content": [{"type": "text"}]}]},
         "messages[0].content[0].text", "required"),
        (CHAT, chat(max_tokens=0), "max_tokens", "max_tokens is 0; it must be 1 or more"),
        (CHAT, chat(max_completion_tokens=0), "max_completion_tokens", "1 or more"),
        (CHAT, chat(max_tokens=-5), "max_tokens", "-5"),
        (CHAT, chat(max_tokens="5"), "max_tokens", "Expected `int"),
        (CHAT, chat(max_tokens=5.5), "max_tokens", "Expected `int"),
        (CHAT, chat(top_k=-2), "top_k", "-2"),
        (CHAT, chat(top_p=1.0000001), "top_p", "between 0 and 1"),
        (CHAT, chat(top_p=-0.1), "top_p", "between 0 and 1"),
        (CHAT, chat(temperature=-1), "temperature", "temperature is -1"),
        (CHAT, chat(temperature=2.5), "temperature", "temperature is 2.5; it must be between 0 and 2"),
        (CHAT, chat(min_p=1.5), "min_p", "between 0 and 1"),
        (CHAT, chat(presence_penalty=-3), "presence_penalty", "between -2 and 2"),
        (CHAT, chat(frequency_penalty=2.1), "frequency_penalty", "between -2 and 2"),
        (CHAT, chat(repetition_penalty=0), "repetition_penalty", "repetition_penalty is 0"),
        (CHAT, chat(seed=2**63), "seed", "between"),
        (CHAT, chat(n=0), "n", "between 1 and 8"),
        (CHAT, chat(n=9), "n", "between 1 and 8"),
        (CHAT, chat(min_tokens=50, max_tokens=40), "min_tokens", "min_tokens is 50; max_tokens is only 40"),
        (CHAT, chat(logit_bias={"99999999": -100}), "logit_bias", f"between 0 and {VOCAB - 1}"),
        (CHAT, chat(logit_bias={str(VOCAB): 1}), "logit_bias", "token ids"),
        (CHAT, chat(logit_bias={"-1": 5}), "logit_bias", "'-1'"),
        (CHAT, chat(logit_bias={"abc": 5}), "logit_bias", "'abc'"),
        (CHAT, chat(logit_bias={"\u0665": 5}), "logit_bias", "token ids"),
        (CHAT, chat(logit_bias={"5": 1000}), "logit_bias", "between -100 and 100"),
        (CHAT, chat(logit_bias={"5": "x"}), "logit_bias", "Expected `float`"),
        (CHAT, chat(logit_bias={"5": None}), "logit_bias", "Expected `float`"),
        (CHAT, chat(logit_bias={str(i): 1 for i in range(5000)}), "logit_bias", "at most 4096"),
        (CHAT, chat(stop=["a"] * 5), "stop", "at most 4"),
        (CHAT, chat(stop=["a", ""]), "stop[1]", "empty"),
        (CHAT, chat(stop=""), "stop[0]", "empty"),
        (CHAT, chat(stop="x" * 1025), "stop[0]", "at most 1024"),
        (CHAT, chat(stop_token_ids=[1, 2, 3, 4, 5]), "stop_token_ids", "at most 4"),
        (CHAT, chat(stop_token_ids=[VOCAB]), "stop_token_ids", "between 0"),
        (CHAT, chat(top_logprobs=5), "top_logprobs", "without logprobs"),
        (CHAT, chat(logprobs=False, top_logprobs=5), "top_logprobs", "without logprobs"),
        (CHAT, chat(logprobs=True, top_logprobs=21), "top_logprobs", "between 0 and 20"),
        (CHAT, chat(logprobs=True, top_logprobs=-1), "top_logprobs", "between 0 and 20"),
        (CHAT, chat(logprobs=5), "logprobs", "Expected `bool"),
        (CHAT, chat(stream_options={"include_usage": True}), "stream_options", "without stream"),
        (CHAT, chat(response_format={"type": "json_object"}), "response_format", "'json_object'"),
        (CHAT, chat(response_format={"type": "json_schema", "json_schema": {"schema": {"$ref": "#/x"}}}),
         "response_format", "'json_schema'"),
        (CHAT, chat(tools=[{"type": "function", "function": {"name": "f"}}]), "tools", "tools has 1 entries"),
        (CHAT, chat(tool_choice="required"), "tool_choice", "asks for a tool"),
        (CHAT, chat(tool_choice={"type": "function"}), "tool_choice", "asks for a tool"),
        (CHAT, chat(modalities=["text", "audio"]), "modalities", "only"),
        (TEXT, prompt(logprobs=6), "logprobs", "between 0 and 5"),
        (TEXT, prompt(logprobs=1, echo=True), "echo", "together with logprobs"),
        (TEXT, prompt(suffix="x"), "suffix", "not supported"),
        (TEXT, prompt(best_of=2), "best_of", "only the value of n"),
        (TEXT, prompt(max_tokens=-1), "max_tokens", "0 or more"),
        (TEXT, prompt(None), "prompt", "Expected"),
        (TEXT, prompt([]), "prompt", "empty"),
        (TEXT, prompt([[]]), "prompt", "empty"),
        (TEXT, prompt([[1], []]), "prompt[1]", "empty"),
        (TEXT, prompt(["a", 1]), "prompt", "mixes"),
        (TEXT, prompt([True]), "prompt[0]", "Expected"),
        (TEXT, prompt([1, -1]), "prompt", "holds -1"),
        (TEXT, prompt([[1], [VOCAB]]), "prompt[1]", f"holds {VOCAB}"),
        (TEXT, prompt(["a"] * 9, n=8), "prompt", "72 choices; at most 64"),
    ],
)  # fmt: skip
def test_bc025_bc031_bc048_bc051_bc069_bc076_bc079_openai_values_outside_their_range(
    path: str, body: Any, param: str, text: str
) -> None:
    error = refused(Rig(), path, body)
    assert error["param"] == param
    assert text in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (message(max_tokens=0), "max_tokens is 0"),
        (chat(), "max_tokens: the field is required"),
        ({**message(), "messages": []}, "messages is empty"),
        ({"model": MODEL, "max_tokens": 9}, "messages: the field is required"),
        ({**message(), "messages": None}, "messages: Expected `array`"),
        ({**message(), "messages": {"role": "user", "content": "hi"}}, "messages: Expected `array`"),
        ({**message(), "messages": [USER_TURN, {"role": "assistant", "content": [
            {"type": "text", "text": "Let me look."}, {"type": "tool_use", "id": "t1", "name": "w", "input": {}}]}]},
         "messages[1].content[1].type is 'tool_use'; only 'text' is supported"),
        ({**message(), "messages": [{"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "rain"}]}]}]},
         "messages[0].content[0].type is 'tool_result'; only 'text' is supported"),
        ({**message(), "messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1"}]}]},
         "messages[0].content[0].type is 'tool_result'"),
        (message(temperature=1.1), "temperature is 1.1; it must be between 0 and 1"),
        (message(top_p=2), "top_p is 2"),
        (message(top_k=-2), "top_k is -2"),
        (message(stop_sequences=["a"] * 17), "at most 16"),
        (message(stop_sequences=[""]), "stop_sequences[0] is empty"),
        (message(thinking={"type": "enabled", "budget_tokens": 1024}), "thinking.type is 'enabled'"),
        (message(tools=[{"name": "w", "input_schema": {"type": "object"}}]), "tools has 1 entries"),
        (message(tool_choice={"type": "any"}), "tool_choice.type is 'any'"),
        ({**message(), "messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role is 'wizard'"),
        ({**message(), "messages": [{"role": "user", "content": ""}]}, "messages[0].content is empty"),
        ({**message(), "messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
         "messages[0].content[0].type is 'image'"),
        ({**message(), "messages": [{"role": "user", "content": [{"type": "text", "text": ""}]}]},
         "messages[0].content[0].text"),
        ({**message(), "messages": [*message()["messages"], {"role": "assistant", "content": "So "}]},
         "messages[1].content: a final assistant message cannot end with white space"),
        ({**message(), "system": [{"type": "image"}]}, "system[0].type"),
        ({**message(), "messages": [{"role": "assistant", "content": ""}]}, "messages has no content"),
    ],
)  # fmt: skip
def test_bc025_bc054_anthropic_values_outside_their_range(body: Any, text: str) -> None:
    error = refused(Rig(), MESSAGES, body)
    assert text in error["message"]
    assert error["type"] == "invalid_request_error"


def test_bc029_a_template_refusal_is_the_clients_error_with_the_templates_words() -> None:
    error = refused(Rig(), CHAT, chat("REFUSE"))
    assert error["message"] == "messages: roles must alternate"


def test_a_model_without_a_template_takes_text_only() -> None:
    rig = Rig(has_chat_template=False)
    assert "no chat template" in rig.post(CHAT, chat()).json()["error"]["message"]
    assert rig.post(TEXT, prompt()).status == 200


def test_faults_of_ours_are_a_500_without_details(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()

    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("secret detail")

    rig.codec.encode_chat = broken  # type: ignore[method-assign]
    for path, body in ((CHAT, chat()), (MESSAGES, message())):
        reply = rig.post(path, body)
        assert reply.status == 500
        assert b"secret" not in reply.body
        assert reply.header("x-request-id") in reply.body.decode()
    assert "secret detail" in caplog.text
    assert rig.observer.records[-1].error == "internal_error"


def test_every_error_of_the_tree_has_both_shapes() -> None:
    kinds = {
        "rate_limit_error", "server_error", "invalid_request_error", "authentication_error", "permission_error",
        "not_found_error", "timeout_error", "request_too_large", "api_error", "overloaded_error",
    }  # fmt: skip

    def tree(cls: type[ApiError]) -> list[type[ApiError]]:
        return [cls, *(deeper for sub in cls.__subclasses__() for deeper in tree(sub))]

    for cls in tree(ApiError):
        assert {cls.openai_type, cls.anthropic_type} <= kinds, cls
        assert 400 <= cls.status < 600
