"""Keys, cross-origin rules, request ids, limits and the probes."""

import asyncio
import logging
import re
from typing import Any

import msgspec
import pytest

from api.edge import MODEL_ROUTE, OTHER_ROUTE, ROUTES, route_label
from api.errors import NotReadyError, OverloadedError, RateLimitError
from api.ports import EngineStatus, Finished, Tenant
from api.settings import ApiSettings
from tests.support.api_rig import CHAT, COUNT, MESSAGES, MODEL, TEXT, Rig, chat, message, prompt
from tests.support.scripted_engine import EOS, ScriptedEngine, tokens

KEY_A, KEY_B, ADMIN = b"zk-a-CANARY-123", b"zk-b", b"zk-admin"
KEYS = {
    KEY_A: Tenant(name="a", key_id="ka"),
    KEY_B: Tenant(name="b", key_id="kb"),
    ADMIN: Tenant(name="ops", key_id="ko", admin=True),
}
COUNTED = {key: value for key, value in message().items() if key != "max_tokens"}
ENDPOINTS = [
    ("POST", CHAT, chat()),
    ("POST", TEXT, prompt()),
    ("POST", MESSAGES, message()),
    ("POST", COUNT, COUNTED),
    ("GET", "/v1/models", b""),
    ("GET", f"/v1/models/{MODEL}", b""),
]


def call(rig: Rig, endpoint: tuple[str, str, Any], headers: Any) -> Any:
    method, path, body = endpoint
    return asyncio.run(rig.call(method, path, body, headers))


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda endpoint: endpoint[1])
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"authorization": b"Bearer " + KEY_A}, 200),
        ({"x-api-key": KEY_A}, 200),
        ({"authorization": b"Bearer " + KEY_A, "x-api-key": KEY_A}, 200),
        ({"authorization": b"Bearer wrong", "x-api-key": KEY_A}, 401),
        ({"authorization": b"Bearer " + KEY_A, "x-api-key": b"wrong"}, 401),
        ({"authorization": b"Bearer " + KEY_A, "x-api-key": KEY_B}, 401),
        ({"authorization": b"bearer " + KEY_A}, 200),
        ({"authorization": b"Bearer  " + KEY_A}, 200),
        ({"authorization": b"Basic " + KEY_A}, 401),
        ({"authorization": KEY_A}, 401),
        ({}, 401),
        ({"authorization": b"Bearer "}, 401),
        ({"x-api-key": b""}, 401),
        ({"authorization": "Bearer kľúč".encode()}, 401),
        ({"x-api-key": b"\xff\xfe"}, 401),
    ],
)
def test_bc108_a_key_in_either_header(endpoint: tuple[str, str, Any], headers: Any, status: int) -> None:
    rig = Rig(keys=KEYS)
    reply = call(rig, endpoint, headers)
    assert reply.status == status, reply.body
    if status == 401:
        assert reply.header("www-authenticate") == "Bearer"
        anthropic = endpoint[1].startswith(MESSAGES)
        assert reply.json()["error"]["type"] == ("authentication_error" if anthropic else "invalid_request_error")
        assert reply.json()["error"].get("code", "invalid_api_key") == "invalid_api_key"
        assert not rig.codec.calls


def test_bc108_the_key_comes_before_everything_else() -> None:
    rig = Rig(keys=KEYS, settings=ApiSettings(max_body_bytes=10))
    for body in (b"{", chat(model="no-such-model"), b"x" * 99):
        assert rig.post(CHAT, body, {"content-type": "text/plain"}).status == 401
    assert rig.get("/v1/models/no-such-model").status == 401


def test_the_anthropic_version_header_chooses_the_shape() -> None:
    rig = Rig(keys=KEYS)
    for path in ("/v1/models", CHAT, "/v1/nothing"):
        reply = rig.post(path, b"", {"anthropic-version": "2023-06-01"})
        assert reply.json()["type"] == "error"
        assert reply.header("request-id") == reply.header("x-request-id")


def test_without_keys_any_key_will_do() -> None:
    rig = Rig()
    for headers in ({}, {"authorization": "Bearer x"}, {"x-api-key": "y"}):
        assert rig.post(CHAT, chat(), headers).status == 200
    assert {request.tenant for request in rig.engine.requests} == {"anonymous"}


def test_the_engine_and_the_record_see_the_tenant() -> None:
    rig = Rig(keys=KEYS)
    rig.post(CHAT, chat(), {"x-api-key": KEY_B})
    assert rig.engine.requests[0].tenant == rig.observer.records[0].tenant == "b"


def test_bc111_keys_and_prompts_stay_out_of_everything(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    rig = Rig(keys=KEYS)

    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError

    replies = [
        rig.post(CHAT, chat("CANARY-PROMPT"), {"x-api-key": KEY_A}),
        rig.post(CHAT, b'{"zk-a-CANARY-123', {"authorization": b"Bearer " + KEY_A}),
        rig.post(f"{CHAT}?key=zk-a-CANARY-123", chat(), {"x-api-key": b"CANARY-123"}),
    ]
    rig.codec.encode_chat = broken  # type: ignore[method-assign]
    replies.append(rig.post(CHAT, chat("CANARY-PROMPT"), {"x-api-key": KEY_A}))
    assert [reply.status for reply in replies] == [200, 400, 404, 500]
    seen = caplog.text + repr(rig.observer.records) + repr([reply.headers for reply in replies])
    assert "CANARY" not in seen
    assert all(b"CANARY" not in reply.body for reply in (replies[0], replies[1], replies[3]))


def test_metrics_need_an_admin_key_where_keys_are_needed() -> None:
    rig = Rig(keys=KEYS)
    assert rig.get("/metrics").status == 401
    assert rig.get("/metrics", {"x-api-key": KEY_A}).status == 403
    reply = rig.get("/metrics", {"x-api-key": ADMIN})
    assert (reply.status, reply.body) == (200, b"zccp_up 1\n")
    assert reply.header("content-type") == "text/plain; version=0.0.4"
    assert Rig().get("/metrics").status == 200


ORIGIN = "http://localhost:5173"
ASKED = "authorization,content-type,x-api-key,anthropic-version,x-stainless-os"
PREFLIGHT = {"origin": ORIGIN, "access-control-request-method": "POST", "access-control-request-headers": ASKED}


@pytest.mark.parametrize("allowed", [(ORIGIN,), ("*",)])
def test_bc109_preflight_needs_no_key_and_answers_carry_the_origin(allowed: tuple[str, ...]) -> None:
    rig = Rig(keys=KEYS, settings=ApiSettings(cors_origins=allowed))
    origin = "*" if allowed == ("*",) else ORIGIN
    reply = asyncio.run(rig.call("OPTIONS", CHAT, headers=PREFLIGHT))
    assert reply.status == 204
    assert reply.header("access-control-allow-origin") == origin
    assert "POST" in (reply.header("access-control-allow-methods") or "")
    assert reply.header("access-control-allow-headers") == ASKED
    for body, key, status in ((chat(), KEY_A, 200), (chat(stream=True), KEY_A, 200), (chat(), b"bad", 401)):
        real = rig.post(CHAT, body, {"origin": ORIGIN, "x-api-key": key})
        assert (real.status, real.header("access-control-allow-origin")) == (status, origin)
        assert "x-request-id" in (real.header("access-control-expose-headers") or "")


@pytest.mark.parametrize("allowed", [(), ("https://app.example",)])
def test_other_origins_get_no_permission(allowed: tuple[str, ...]) -> None:
    rig = Rig(settings=ApiSettings(cors_origins=allowed))
    assert asyncio.run(rig.call("OPTIONS", CHAT, headers=PREFLIGHT)).header("access-control-allow-origin") is None
    assert rig.post(CHAT, chat(), {"origin": ORIGIN}).header("access-control-allow-origin") is None


@pytest.mark.parametrize("sane", ["abc-1", "x" * 128, "!~"])
def test_a_sane_request_id_is_taken_over(sane: str) -> None:
    rig = Rig()
    reply = rig.post(CHAT, chat(), {"x-request-id": sane})
    assert reply.header("x-request-id") == sane
    assert rig.engine.requests[0].request_id == rig.observer.records[0].request_id == sane
    again = rig.post(CHAT, chat(), {"x-request-id": sane})
    assert sane not in (reply.json()["id"], again.json()["id"])
    assert reply.json()["id"] != again.json()["id"]


@pytest.mark.parametrize("odd", ["", "a b", "x" * 129, "\u00e9", 'a"b', "a\\b"])
def test_other_request_ids_are_replaced(odd: str) -> None:
    made = Rig().post(CHAT, chat(), {"x-request-id": odd.encode()}).header("x-request-id") or ""
    assert re.fullmatch(r"req_[0-9a-f]{24}", made)


def test_the_trace_context_reaches_the_engine_and_the_record() -> None:
    rig = Rig()
    rig.post(CHAT, chat(), {"traceparent": f"00-{'a' * 32}-{'b' * 16}-00"})
    rig.post(CHAT, chat(), {"traceparent": "nonsense"})
    first, second = rig.observer.records
    assert (first.trace.trace_id, first.trace.parent_id, first.trace.flags) == ("a" * 32, "b" * 16, 0)
    assert second.trace.trace_id not in ("a" * 32, "0" * 32)
    assert (second.trace.parent_id, second.trace.flags) == ("", 1)
    told = [request.traceparent for request in rig.engine.requests]
    assert told == [first.trace.traceparent, second.trace.traceparent]


def test_a_record_has_the_phases_of_its_request() -> None:
    ends = Finished(0, "stop", EOS, queue_s=1.0, prefill_s=2.0, decode_s=4.0)
    rig = Rig(ScriptedEngine(lambda request: [tokens(request, 0, *b"ok"), ends]))
    rig.post(CHAT, chat(stream=True))
    rig.post(CHAT, {**chat(), "temperature": "hot"})
    record, refused = rig.observer.records
    names = [phase.name for phase in record.phases]
    assert names == ["receive", "tokenise", "queue", "prefill", "decode", "stream"]
    receive, tokenise, queue, prefill, decode, stream = record.phases
    assert 0 <= receive.began_s <= tokenise.began_s <= queue.began_s
    assert (queue.took_s, prefill.took_s, decode.took_s) == (1.0, 2.0, 4.0)
    assert prefill.began_s - queue.began_s == pytest.approx(1.0)
    assert decode.began_s - prefill.began_s == pytest.approx(2.0)
    assert stream.began_s + stream.took_s == pytest.approx(record.duration_s)
    assert record.model == "tiny"
    assert [phase.name for phase in refused.phases] == ["receive"]


LIMITED = {b"k": Tenant(name="t", key_id="k1", requests_per_minute=2, tokens_per_minute=40)}


def test_limits_are_told_and_kept() -> None:
    rig = Rig(keys=LIMITED)
    first = rig.post(CHAT, chat(), {"x-api-key": b"k"})
    told = {name: value for name, value in first.headers if name.startswith("x-ratelimit")}
    assert told == {
        "x-ratelimit-limit-requests": "2",
        "x-ratelimit-remaining-requests": "1",
        "x-ratelimit-reset-requests": "12.500s",
        "x-ratelimit-limit-tokens": "40",
        "x-ratelimit-remaining-tokens": "34",
        "x-ratelimit-reset-tokens": "12.500s",
    }
    assert rig.quota.tokens == {"k1": 8}
    rig.post(CHAT, chat(), {"x-api-key": b"k"})
    refused = rig.post(CHAT, b"not even parsed", {"x-api-key": b"k"})
    assert (refused.status, refused.header("retry-after")) == (429, "13")
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert "2 requests a minute" in refused.json()["error"]["message"]
    assert refused.header("x-ratelimit-remaining-requests") == "0"
    anthropic = rig.post(MESSAGES, b"", {"x-api-key": b"k"})
    assert anthropic.json()["error"]["type"] == "rate_limit_error"
    assert anthropic.header("anthropic-ratelimit-requests-limit") == "2"
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", anthropic.header("anthropic-ratelimit-requests-reset") or ""
    )


def test_prompt_tokens_count_before_the_engine_is_asked() -> None:
    rig = Rig(keys={b"k": msgspec.structs.replace(LIMITED[b"k"], tokens_per_minute=5)})
    reply = rig.post(CHAT, chat(), {"x-api-key": b"k"})
    assert reply.status == 429
    assert "5 tokens a minute, 5 left, 6 asked for" in reply.json()["error"]["message"]
    assert not rig.engine.requests


@pytest.mark.parametrize(
    ("error", "status", "openai", "anthropic"),
    [
        (OverloadedError("32 requests wait", retry_after_s=1.2), 429, "rate_limit_error", "rate_limit_error"),
        (NotReadyError("the engine is lost"), 503, "server_error", "overloaded_error"),
        (RateLimitError("x", retry_after_s=0.0), 429, "rate_limit_error", "rate_limit_error"),
    ],
)
def test_what_the_engine_refuses(error: Any, status: int, openai: str, anthropic: str) -> None:
    engine = ScriptedEngine()
    engine.refusal = error
    rig = Rig(engine)
    for stream in (False, True):
        reply = rig.post(CHAT, chat(stream=stream))
        assert (reply.status, reply.header("retry-after")) == (
            status,
            {429: "2", 503: "2"}[status] if error.retry_after_s else "1",
        )
        assert reply.json()["error"]["type"] == openai
        assert rig.post(MESSAGES, message(stream=stream)).json()["error"]["type"] == anthropic
    assert rig.observer.records[0].finish_reason == ("refused" if status == 429 else "error")


@pytest.mark.parametrize(
    ("state", "reason"), [("starting", "loading weights"), ("lost", "no heartbeat"), ("draining", "stop asked for")]
)
def test_bc178_ready_only_when_warm(state: Any, reason: str) -> None:
    engine = ScriptedEngine()
    engine.state = EngineStatus(state=state, reason=reason)
    rig = Rig(engine)
    assert rig.get("/health/live").status == 200
    ready = rig.get("/health/ready")
    assert (ready.status, ready.json()) == (503, {"status": state, "reason": reason})
    assert ready.header("retry-after")
    assert rig.get("/health").status == 503
    for path, body in ((CHAT, chat()), (TEXT, prompt()), (MESSAGES, message())):
        reply = rig.post(path, body)
        assert (reply.status, reply.header("retry-after")) == (503, "2")
        assert reason in reply.json()["error"]["message"]
    engine.state = EngineStatus(state="ready")
    assert rig.get("/health/ready").status == 200
    assert rig.post(CHAT, chat()).status == 200


def test_causes_reach_clients_without_the_folders_of_the_host() -> None:
    engine = ScriptedEngine()
    engine.state = EngineStatus(
        state="lost", reason="exit code 1: /srv/my models/w.gguf: no such file ('/etc/a/b.yaml')"
    )
    rig, told = Rig(engine), "exit code 1: my w.gguf: no such file ('b.yaml')"
    assert rig.get("/health/ready").json()["reason"] == rig.get("/health").json()["reason"] == told
    for path, body in ((CHAT, chat()), (TEXT, prompt()), (MESSAGES, message())):
        assert told in rig.post(path, body).json()["error"]["message"]
    rig = Rig(
        ScriptedEngine(lambda _: [Finished(0, "error", None, 0, error="cannot read /srv/store/key.zst: damaged")])
    )
    for path, make in ((CHAT, chat), (TEXT, prompt), (MESSAGES, message)):
        for stream in (False, True):
            answer = rig.post(path, make(stream=stream)).body.decode()
            assert "cannot read key.zst: damaged" in answer
            assert "/srv" not in answer
    asked = rig.get("/v1/nowhere/at/all").json()["error"]["message"]
    assert "'/v1/nowhere/at/all'" in asked


def test_health_shows_what_is_cached_and_how_often_it_was_of_use() -> None:
    engine = ScriptedEngine()
    engine.state = EngineStatus(state="ready", free_pages=7, total_pages=9, cached_pages=4, hit_rate=2 / 3)
    shown = Rig(engine).get("/health").json()
    assert (shown["free_pages"], shown["cached_pages"], shown["prefix_hit_rate"]) == (7, 4, 0.6667)


def test_bc180_draining_refuses_new_work() -> None:
    draining: list[bool] = []
    rig = Rig(settings=ApiSettings(draining=lambda: bool(draining)))
    assert rig.post(CHAT, chat()).status == 200
    draining.append(True)
    assert rig.get("/health/ready").json()["status"] == "draining"
    assert rig.post(CHAT, chat()).status == 503
    assert rig.get("/health/live").status == 200


def test_models_in_both_shapes() -> None:
    rig = Rig()
    openai = rig.get("/v1/models").json()
    assert openai["object"] == "list"
    assert [model["id"] for model in openai["data"]] == ["tiny", "gpt-alias", "org/name"]
    assert openai["data"][0] == {
        "id": "tiny", "object": "model", "created": 1_700_000_000, "owned_by": "zccp", "max_model_len": 64
    }  # fmt: skip
    anthropic = rig.get("/v1/models", {"anthropic-version": "2023-06-01"}).json()
    assert (anthropic["has_more"], anthropic["first_id"], anthropic["last_id"]) == (False, "tiny", "org/name")
    assert anthropic["data"][0]["created_at"] == "2023-11-14T22:13:20Z"
    assert rig.get("/v1/models/org/name").json()["id"] == "org/name"
    assert rig.get("/v1/models/tiny", {"anthropic-version": "2023-06-01"}).json()["type"] == "model"
    missing = rig.get("/v1/models/no/such")
    assert (missing.status, missing.json()["error"]["code"]) == (404, "model_not_found")


def test_bc182_route_labels_are_bounded() -> None:
    paths = [f"/v1/models/{i}" for i in range(200)] + [f"/{i}/x" for i in range(200)] + ["/v1//models/", "/health/"]
    assert {route_label(path) for path in paths} <= {*ROUTES, OTHER_ROUTE}
    assert route_label("/v1/models/a/b") == MODEL_ROUTE
    rig = Rig()
    for index in range(20):
        rig.post(CHAT, chat(model=f"m{index}", user=f"u{index}"), {"x-api-key": f"k{index}"})
        rig.get(f"/v1/models/{index}")
    records = rig.observer.records
    assert {(record.route, record.tenant, record.status) for record in records} == {
        (CHAT, "anonymous", 404),
        (MODEL_ROUTE, "anonymous", 404),
    }


def test_records_are_complete_and_probes_leave_none() -> None:
    rig = Rig()
    rig.post(CHAT, chat(max_tokens=2))
    record = rig.observer.records[0]
    assert (record.status, record.finish_reason, record.error, record.stream) == (200, "length", "", False)
    assert (record.prompt_tokens, record.completion_tokens) == (6, 2)
    assert record.time_to_first_token_s is not None
    assert record.time_per_output_token_s is not None
    for path in ("/health", "/health/live", "/health/ready", "/metrics"):
        rig.get(path)
    assert len(rig.observer.records) == len(rig.observer.started) == 1


@pytest.mark.parametrize("name", ["max_body_bytes", "keepalive_s", "write_timeout_s", "max_choices"])
def test_settings_refuse_what_makes_no_sense(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is 0; it must be above 0"):
        ApiSettings(**{name: 0})


@pytest.mark.parametrize("endpoint", ENDPOINTS[:4], ids=lambda endpoint: endpoint[1])
def test_text_is_encoded_for_the_tenant_who_sent_it(endpoint: tuple[str, str, Any]) -> None:
    """What a codec keeps of a text must not become known to others."""
    rig = Rig(keys=KEYS)
    for key in (KEY_A, KEY_B):
        assert call(rig, endpoint, {"x-api-key": key}).status == 200
    assert set(rig.codec.tenants) == {"a", "b"}
