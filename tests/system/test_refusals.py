"""Bad input against the real server, in both shapes: one clear error each, and the next request works."""

import json
from typing import Any

import pytest

from tests.support.running_appliance import RunningAppliance

pytestmark = pytest.mark.system

MODEL = "smollm2-135m"
USER = [{"role": "user", "content": "hi"}]
ANTHROPIC, OPENAI = "/v1/messages", "/v1/chat/completions"

# what is sent (a change of a good body, or a whole raw body), status, OpenAI code, words that the message must hold
TABLE: dict[str, tuple[dict[str, Any] | bytes, int, str, tuple[str, ...]]] = {
    "no json": (b"{", 400, "invalid_json", ()),
    "no object": (b"[]", 400, "invalid_value", ("object",)),
    "empty body": (b"", 400, "invalid_json", ()),
    "not a number": (b'{"model": "smollm2-135m", "temperature": NaN}', 400, "invalid_json", ()),
    "infinity": (b'{"model": "smollm2-135m", "temperature": Infinity}', 400, "invalid_json", ()),
    "no utf-8": (b'{"model": "\xff\xfe"}', 400, "invalid_json", ()),
    "unknown field": ({"mood": "good"}, 400, "unknown_parameter", ("mood",)),
    "unknown field in a message": (
        {"messages": [{"role": "user", "content": "x", "mood": 1}]},
        400,
        "unknown_parameter",
        ("mood", "messages[0]"),
    ),
    "wrong type": ({"max_tokens": "many"}, 400, "invalid_value", ("max_tokens",)),
    "half a token": ({"max_tokens": 1.5}, 400, "invalid_value", ("max_tokens",)),
    "no token": ({"max_tokens": 0}, 400, "invalid_value", ("max_tokens", "0", "1")),
    "negative": ({"max_tokens": -1}, 400, "invalid_value", ("max_tokens", "-1")),
    "too hot": ({"temperature": 9}, 400, "invalid_value", ("temperature", "9")),
    "top_p": ({"top_p": 1.5}, 400, "invalid_value", ("top_p", "1.5")),
    "unknown model": ({"model": "gpt-9"}, 404, "model_not_found", ("gpt-9", MODEL)),
    "no messages": ({"messages": []}, 400, "invalid_value", ("messages",)),
    "unknown role": ({"messages": [{"role": "robot", "content": "x"}]}, 400, "invalid_value", ("robot",)),
    "missing model": ({"model": None}, 400, "invalid_value", ("model",)),
    "tools": ({"tools": [{"name": "f"}]}, 400, "unsupported_parameter", ("tools",)),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        400,
        "unsupported_parameter",
        ("image",),
    ),
    "too long a prompt": (
        {"messages": [{"role": "user", "content": "word " * 9000}]},
        400,
        "context_length_exceeded",
        ("8192", "the prompt has"),
    ),
    "too large a body": ({"messages": [{"role": "user", "content": "x" * 1_100_000}]}, 413, "body_too_large", ()),
}
TYPES = {400: "invalid_request_error", 404: "not_found_error", 413: "request_too_large"}


@pytest.mark.parametrize("path", [OPENAI, ANTHROPIC])
@pytest.mark.parametrize("case", TABLE)
def test_bad_input_gets_one_clear_error(appliance: RunningAppliance, case: str, path: str) -> None:
    given, status, code, words = TABLE[case]
    good = {"model": MODEL, "messages": USER, "max_tokens": 1}
    raw = given if isinstance(given, bytes) else json.dumps({**good, **given}).encode()
    reply = appliance.client.post(path, content=raw, headers={"content-type": "application/json"})
    assert reply.status_code == status, reply.text
    document = reply.json()
    assert document["request_id"] == reply.headers["x-request-id"]
    error = document["error"]
    if path == ANTHROPIC:
        assert (document["type"], error["type"]) == ("error", TYPES[status])
    else:
        assert error["code"] == code
    for word in words:
        assert word in error["message"]
    assert appliance.client.post(path, json=good).status_code == 200


def test_paths_and_methods(appliance: RunningAppliance) -> None:
    assert appliance.client.get("/v1/nothing").status_code == 404
    wrong = appliance.client.get("/v1/chat/completions")
    assert (wrong.status_code, set(wrong.headers["allow"].split(", "))) == (405, {"OPTIONS", "POST"})
    text = appliance.client.post("/v1/completions", content=b"hi", headers={"content-type": "text/plain"})
    assert text.status_code == 415
    assert appliance.client.get("/health/live").json() == {"status": "live"}
    assert appliance.client.get("/health/ready").json()["status"] == "ready"


def test_a_full_waiting_room_says_when_to_come_back(appliance: RunningAppliance) -> None:
    body = {"model": MODEL, "prompt": ["hi"] * 8, "n": 8, "max_tokens": 64, "ignore_eos": True}
    refused = appliance.client.post("/v1/completions", json=body)
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["code"] == "overloaded"
    too_many = appliance.client.post("/v1/completions", json=body | {"prompt": ["hi"] * 9})
    assert too_many.status_code == 400
    assert "72 choices" in too_many.json()["error"]["message"]
