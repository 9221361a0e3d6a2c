"""A real nginx with our configuration in front of a scripted application: the same answers, unbuffered, unforgeable."""

import asyncio
import json
import os
import re
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from api.ports import Finished, Tokens
from api.settings import ApiSettings
from appliance.handoff import STALE_S, sweep
from tests.support.api_rig import CHAT, COUNT, MESSAGES, TEXT, Rig, chat, message, prompt
from tests.support.front import Front, Fronted, fronted, needs_nginx, wait_for
from tests.support.scripted_engine import EOS, ScriptedEngine, say

pytestmark = needs_nginx

TRACE = f"00-{'a' * 32}-{'b' * 16}-01"
BIG = 6 << 20
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"


@pytest.fixture(scope="module")
def plain() -> Iterator[Fronted]:
    """One application for all tests that leave it as it is; without TLS, so that raw bytes can be sent."""
    with fronted(Rig(ScriptedEngine(say("Hello there")), context=4 * BIG), tls=False) as made:
        yield made


@pytest.fixture(scope="module")
def secure() -> Iterator[Fronted]:
    with fronted(Rig(ScriptedEngine(say("Hello there"))), proxy={"hsts_s": 3600}) as made:
        yield made


def post(url: str, path: str, body: object, headers: dict[str, str] | None = None) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body, ensure_ascii=False).encode()
    return httpx.post(url + path, content=content, headers={"content-type": "application/json", **(headers or {})})


def same(body: bytes) -> bytes:
    """A body without what differs from one answer to the next."""
    body = re.sub(rb'"(req_|msg_|chatcmpl-|cmpl-)[0-9a-f]+"', rb'"\1"', body)
    return re.sub(rb'"created":\d+', b'"created":0', body)


def request_bodies() -> dict[str, tuple[str, object]]:
    text = "größe " * (BIG // 8)
    return {
        "chat": (CHAT, chat("hi")),
        "chat stream": (CHAT, chat("hi", stream=True)),
        "text": (TEXT, prompt("hi", n=2)),
        "text stream": (TEXT, prompt("hi", stream=True)),
        "message": (MESSAGES, message("hi")),
        "message stream": (MESSAGES, message("hi", stream=True)),
        "count": (COUNT, {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}),
        "chat 6 MB": (CHAT, chat(text)),
        "text 6 MB": (TEXT, json.dumps(prompt("hi")).encode() + b" " * BIG),
        "message 6 MB": (MESSAGES, message(text)),
        "empty": (CHAT, b""),
        "no JSON": (MESSAGES, b"{"),
        "odd field": (TEXT, prompt("hi", odd=1)),
        "wrong model": (CHAT, {**chat("hi"), "model": "other"}),
        "nowhere": ("/v1/nowhere", {}),
    }


BODIES = request_bodies()


@pytest.mark.parametrize("name", BODIES)
def test_answers_are_those_of_the_port(plain: Fronted, name: str) -> None:
    path, body = BODIES[name]
    direct, through = (post(url, path, body) for url in (plain.direct, plain.front.url))
    assert through.status_code == direct.status_code
    assert same(through.content) == same(direct.content)
    kept = ("content-type", "cache-control", "x-accel-buffering", "content-encoding", "allow")
    assert [through.headers.get(key) for key in kept] == [direct.headers.get(key) for key in kept]
    if direct.status_code == 200 and path != COUNT:
        last, second = plain.rig.engine.requests[-1], plain.rig.engine.requests[-2]
        assert last.prompt_ids == second.prompt_ids
    assert plain.front.bodies() == []


def test_chunked_bodies_arrive_too(plain: Fronted) -> None:
    content = json.dumps(prompt("hi")).encode()
    parts = (content[i : i + 7] for i in range(0, len(content), 7))
    reply = httpx.post(plain.front.url + TEXT, content=parts)
    assert reply.status_code == 200
    assert same(reply.content) == same(post(plain.direct, TEXT, content).content)


@pytest.mark.parametrize("path", ["/health/live", "/health/ready", "/health", "/v1/models", "/v1/models/org%2Fname"])
def test_paths_without_a_body_are_passed_on(plain: Fronted, path: str) -> None:
    direct, through = (httpx.get(url + path) for url in (plain.direct, plain.front.url))
    assert (through.status_code, same(through.content)) == (direct.status_code, same(direct.content))
    assert through.status_code == 200


def test_ids_are_the_same_in_the_answer_in_both_logs_and_for_the_engine(plain: Fronted) -> None:
    headers = {"x-request-id": "mine-1", "traceparent": TRACE}
    assert post(plain.front.url, TEXT, prompt(), headers).headers["x-request-id"] == "mine-1"
    assert plain.rig.observer.records[-1].request_id == "mine-1"
    record = plain.rig.observer.records[-1]
    assert f"00-{record.trace.trace_id}-{record.trace.parent_id}-01" == TRACE
    assert plain.rig.engine.requests[-1].traceparent == record.trace.traceparent
    made = post(plain.front.url, MESSAGES, message()).headers["x-request-id"]
    assert re.fullmatch(r"req_[0-9a-f]{32}", made)
    assert plain.rig.observer.records[-1].request_id == made
    begun = plain.rig.observer.records[-1].trace
    lines = {line["request_id"]: line for line in map(json.loads, plain.front.log().splitlines())}
    assert lines["mine-1"]["traceparent"] == TRACE
    assert lines[made]["traceparent"] == f"00-{begun.trace_id}-{begun.parent_id}-01"
    line = lines[made]
    assert (line["status"], line["path"], line["worker"]) == ("200", MESSAGES, f"unix:{plain.socket}")


@pytest.mark.parametrize("odd", ["a b", 'a"b', "a\\b", "x" * 129, "00-0"])
def test_ids_of_a_wrong_form_are_replaced(plain: Fronted, odd: str) -> None:
    reply = post(plain.front.url, TEXT, prompt(), {"x-request-id": odd, "traceparent": odd})
    if odd != "00-0":
        assert reply.headers["x-request-id"] != odd
    assert (plain.rig.engine.requests[-1].traceparent or "").startswith("00-")


def test_an_all_zero_trace_is_none(plain: Fronted) -> None:
    for zero in (f"00-{'0' * 32}-{'b' * 16}-01", f"00-{'a' * 32}-{'0' * 16}-01"):
        post(plain.front.url, TEXT, prompt(), {"traceparent": zero})
        found = plain.rig.observer.records[-1].trace
        assert found.trace_id not in ("0" * 32, "a" * 32)
        assert found.parent_id not in ("0" * 16, "b" * 16)


def test_a_forged_header_is_without_effect_at_both_ports(plain: Fronted) -> None:
    decoy = Path(plain.front.config.proxy.body_directory) / "4000000000"
    decoy.write_text(json.dumps(prompt("decoy")))
    forged = {"X-Zccp-Body": str(decoy), "x_zccp_body": str(decoy)}
    for url in (plain.front.url, plain.direct):
        assert post(url, TEXT, prompt("mine"), forged).status_code == 200
        assert bytes(plain.rig.engine.requests[-1].prompt_ids[-4:]) == b"mine"
        assert httpx.get(f"{url}/v1/models", headers=forged).status_code == 200
        bare = httpx.post(url + TEXT, headers={**forged, "content-type": "application/json"})
        assert bare.json()["error"]["code"] == "invalid_json"
    assert decoy.read_text() == json.dumps(prompt("decoy"))
    decoy.unlink()


def test_the_private_socket_takes_no_path_but_nginxs(plain: Fronted) -> None:
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(plain.socket))) as client:
        for path in ("/etc/passwd", f"{plain.front.config.proxy.body_directory}/../cert.pem"):
            reply = client.post("http://worker" + TEXT, headers={"x-zccp-body": path})
            assert reply.status_code == 500
            assert reply.json()["error"]["code"] == "handoff_failed"
            assert path not in reply.text
        own = client.post("http://worker" + TEXT, json=prompt("own"))
        assert own.status_code == 200
    assert plain.socket.stat().st_mode & 0o777 == 0o600


def test_forwarding_headers_of_clients_do_not_get_through(plain: Fronted) -> None:
    seen: list[dict[bytes, bytes]] = []
    inner = plain.rig.app.asgi_handler

    async def spy(scope, receive, send):
        seen.append(dict(scope["headers"]))
        await inner(scope, receive, send)

    plain.rig.app.asgi_handler = spy
    try:
        forged = {
            "x-forwarded-for": "1.2.3.4", "x-forwarded-proto": "gopher", "x-forwarded-host": "evil",
            "forwarded": "for=1.2.3.4", "tracestate": "a=b", "connection": "x-key", "x-key": "1",
        }  # fmt: skip
        post(plain.front.url, TEXT, prompt(), forged)
        post(plain.front.url, TEXT, prompt(), {"traceparent": TRACE, "tracestate": "a=b"})
    finally:
        plain.rig.app.asgi_handler = inner
    first, second = seen
    assert first[b"x-forwarded-for"] == b"127.0.0.1"
    assert first[b"x-forwarded-proto"] == b"http"
    assert not {b"x-forwarded-host", b"forwarded", b"content-length", b"transfer-encoding", b"tracestate"} & set(first)
    assert second[b"tracestate"] == b"a=b"


def gated() -> tuple[ScriptedEngine, asyncio.Event]:
    gate = asyncio.Event()
    steps = [Tokens(0, (104,)), gate, Tokens(0, (105,)), Finished(0, "stop", EOS, 0)]
    return ScriptedEngine(lambda _request: list(steps)), gate


@pytest.mark.parametrize(("path", "body"), [(CHAT, chat(stream=True)), (MESSAGES, message(stream=True))])
def test_bc_186_the_first_event_comes_before_the_last_is_made(path: str, body: dict) -> None:
    engine, gate = gated()
    with fronted(Rig(engine)) as made:
        trust = ssl.create_default_context(cafile=made.front.certificate)
        with (
            httpx.Client(verify=trust, headers={"accept-encoding": "gzip, br"}) as client,
            client.stream("POST", made.front.url + path, json=body) as reply,
        ):
            assert "content-encoding" not in reply.headers
            assert reply.headers["x-accel-buffering"] == "no"
            lines = reply.iter_lines()
            assert any('"h"' in line for line in lines)
            made.soon(gate.set)
            rest = list(lines)
        assert any('"i"' in line for line in rest)
        assert rest[-2:-1] == ["data: [DONE]"] or "message_stop" in rest[-2]


def test_a_stream_over_http2_is_not_held_back() -> None:
    engine, gate = gated()
    with fronted(Rig(engine)) as made:
        command = [
            "curl", "--silent", "--no-buffer", "--http2", "--cacert", made.front.certificate, "--json",
            json.dumps(chat(stream=True)), "--write-out", "%{http_version}", made.front.url + CHAT,
        ]  # fmt: skip
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
            assert client.stdout is not None
            assert any('"h"' in line for line in client.stdout)
            made.soon(gate.set)
            rest = client.stdout.read()
        assert '"i"' in rest
        assert rest.endswith("data: [DONE]\n\n2")


def test_http2_and_tls_as_configured(secure: Fronted) -> None:
    done = secure.front.curl(CHAT, "--write-out", "\n%{http_version}", data=json.dumps(chat()).encode())
    answer, version = done.stdout.decode().rsplit("\n", 1)
    assert json.loads(answer)["choices"][0]["message"]["content"] == "Hello there"
    assert version == "2"
    large = secure.front.curl(CHAT, data=json.dumps(chat()).encode() + b" " * BIG)
    assert same(large.stdout) == same(answer.encode())
    for option, works in (("--tls-max", "1.1"), ("--tls-max", "1.2"), ("--tlsv1.3", "")):
        done = secure.front.curl("/health/live", option, *([works] if works else []), "--include")
        assert (done.returncode == 0) is (works != "1.1")
        assert works == "1.1" or b"strict-transport-security: max-age=3600" in done.stdout.lower()
    refused = secure.front.curl("/v1/nowhere", "--include")
    assert b"strict-transport-security" in refused.stdout.lower()
    assert b"nginx/" not in refused.stdout


def error_of(reply: httpx.Response, path: str) -> dict:
    """The error of an answer in the shape of its path, whose request id is the header's."""
    body = reply.json()
    assert reply.headers["content-type"] == "application/json"
    assert body["request_id"] == reply.headers["x-request-id"]
    if path.startswith("/v1/messages"):
        assert set(body) == {"type", "error", "request_id"}
        assert reply.headers["request-id"] == reply.headers["x-request-id"]
    else:
        assert set(body) == {"error", "request_id"}
        assert set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]


def test_bc_191_a_body_over_the_bound_is_refused_in_the_clients_shape() -> None:
    with fronted(Rig(settings=ApiSettings(max_body_bytes=1 << 20)), tls=False, max_body_mb=1) as made:
        for path in (CHAT, MESSAGES):
            fits = post(made.front.url, path, b" " * (1 << 20))
            assert fits.status_code == 400
            reply = post(made.front.url, path, b" " * ((1 << 20) + 1), {"x-request-id": "big"})
            assert (reply.status_code, reply.headers["x-request-id"]) == (413, "big")
            error = error_of(reply, path)
            assert error["type"] == ("request_too_large" if path == MESSAGES else "invalid_request_error")
            assert "1048576 bytes" in error["message"]
        reply = post(made.front.url, CHAT, b" " * ((1 << 20) + 1), {"anthropic-version": "2023-06-01"})
        assert error_of(reply, MESSAGES)["type"] == "request_too_large"
        with socket.create_connection(("127.0.0.1", made.front.port)) as client:
            client.sendall(b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 999999999\r\n\r\n")
            assert client.recv(100).startswith(b"HTTP/1.1 413 ")  # before a byte of it was sent
        chunks = httpx.post(made.front.url + CHAT, content=(b" " * 65536 for _ in range(20)))
        assert chunks.status_code == 413
        wait_for(lambda: made.front.bodies() == [])
        assert made.rig.observer.records[-1].status == 400


def test_bc_191_what_is_no_http_gets_json(plain: Fronted, secure: Fronted) -> None:
    def raw(front: Front, data: bytes) -> bytes:
        with socket.create_connection(("127.0.0.1", front.port), timeout=20) as client:
            client.sendall(data)
            client.shutdown(socket.SHUT_WR)
            answer = b""
            while part := client.recv(65536):
                answer += part
            return answer

    long = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n" + b"".join(b"x-%d: %s\r\n" % (i, b"y" * 1000) for i in range(40))
    for front, data, status, code in (
        (plain.front, long + b"\r\n", b" 431 ", "headers_too_large"),
        (plain.front, b"GET /v1/models HTTP/1.1\r\n\r\n", b" 400 ", "invalid_value"),
        (plain.front, b"GARBAGE\r\n\r\n", b"", "invalid_value"),
        (plain.front, b"GET /" + b"x" * 40_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", b" 414 ", "path_too_long"),
        (plain.front, b"TRACE / HTTP/1.1\r\nHost: x\r\n\r\n", b" 405 ", "method_not_allowed"),
        (plain.front, b"GET /.zccp/400 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", b" 404 ", "not_found"),
        (secure.front, b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n", b" 400 ", "invalid_value"),
    ):
        answer = raw(front, data)
        assert status in answer.splitlines()[0] + b" "
        assert json.loads(answer.rpartition(b"\r\n\r\n")[2])["error"]["code"] == code
        assert b"<html" not in answer


@pytest.mark.parametrize(
    "path",
    ["/metrics", "/metrics/", "//metrics", "/metrics//", "/./metrics", "/v1/../metrics", "/%6detrics", "/metrics%2F",
     "/metrics?a=b", "/metrics/?a", "///metrics///"],
)  # fmt: skip
def test_metrics_are_for_those_who_are_named(plain: Fronted, path: str) -> None:
    assert plain.front.curl("/metrics").stdout == b"zccp_up 1\n"
    with fronted(Rig(), tls=False, proxy={"metrics_from": ["192.0.2.0/24"]}) as made:
        done = made.front.curl(path, "--path-as-is", "--write-out", "\n%{http_code}")
        body, status = done.stdout.decode().rsplit("\n", 1)
        assert status in ("403", "404"), body
        assert "zccp_up" not in body
        assert path not in ("/metrics", "/metrics/") or json.loads(body)["error"]["code"] == "insufficient_permissions"


def test_bc_191_no_worker_is_a_503_in_json() -> None:
    with fronted(Rig(), tls=False, workers=2) as made:
        made.socket.rename(made.socket.with_suffix(".away"))
        for path in (TEXT, MESSAGES):
            reply = post(made.front.url, path, b"{}", {"x-request-id": "lost"})
            assert (reply.status_code, reply.headers["x-request-id"]) == (503, "lost")
            assert reply.headers["retry-after"] == "2"
            error = error_of(reply, path)
            assert error["type"] == ("overloaded_error" if path == MESSAGES else "server_error")
            wait_for(lambda: made.front.bodies() == [])
        made.socket.with_suffix(".away").rename(made.socket)
        assert post(made.front.url, TEXT, prompt()).status_code == 200  # at once: a dead worker is not remembered


def test_a_dead_worker_costs_no_request_where_another_lives() -> None:
    with fronted(Rig(), tls=False, workers=3) as made:
        with socket.socket(socket.AF_UNIX) as stale:
            stale.bind(str(made.socket.with_name("worker-1.sock")))  # refuses; worker-2 has no socket at all
        answers = [post(made.front.url, TEXT, prompt()) for _ in range(12)]
        assert {reply.status_code for reply in answers} == {200}
        assert len(made.rig.engine.requests) == 12
        assert made.front.bodies() == []


def test_a_request_that_a_worker_took_is_not_sent_again() -> None:
    heads: list[bytes] = []

    def die_with(listener: socket.socket) -> None:
        with socket.socket() as _, listener:
            while True:
                peer, _ = listener.accept()
                with peer:
                    heads.append(peer.recv(65536))

    with fronted(Rig(), tls=False, workers=3) as made:
        made.socket.rename(made.socket.with_suffix(".away"))
        for worker in (0, 1, 2):
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(str(made.socket.with_name(f"worker-{worker}.sock")))
            listener.listen()
            threading.Thread(target=die_with, args=(listener,), daemon=True).start()
        reply = post(made.front.url, MESSAGES, message())
        assert reply.status_code == 502
        assert error_of(reply, MESSAGES)["message"].startswith("the worker that may have had the request")
        (head,) = heads
        (named,) = re.findall(rb"(?im)^x-zccp-body: (.*)\r$", head)
        assert named.startswith(made.front.config.proxy.body_directory.encode())
        assert head.endswith(b"\r\n\r\n")  # and no body
        wait_for(lambda: made.front.bodies() == [])
        made.socket.unlink()
        made.socket.with_suffix(".away").rename(made.socket)


def test_bc_188_a_worker_that_stays_silent_is_a_504_and_its_request_is_cancelled() -> None:
    engine, _gate = gated()

    def impatient(text: str) -> str:
        return re.sub(r"proxy_read_timeout \d+s;", "proxy_read_timeout 200ms;", text)

    with fronted(Rig(engine), tls=False, change=impatient) as made:
        reply = post(made.front.url, MESSAGES, message())
        assert reply.status_code == 504
        assert error_of(reply, MESSAGES)["type"] == "timeout_error"
        wait_for(lambda: engine.cancels and engine.cancels[0])
        assert engine.running == 0


def test_bc_188_pings_keep_a_silent_stream_alive() -> None:
    engine, gate = gated()

    def impatient(text: str) -> str:
        return re.sub(r"proxy_read_timeout \d+s;", "proxy_read_timeout 1s;", text)

    with (
        fronted(Rig(engine, settings=ApiSettings(keepalive_s=0.1)), tls=False, change=impatient) as made,
        httpx.Client() as client,
        client.stream("POST", made.front.url + CHAT, json=chat(stream=True)) as reply,
    ):
        lines = reply.iter_lines()
        pings = (line for line in lines if line.startswith(":"))
        for _ in range(15):  # longer than nginx would wait in silence
            next(pings)
        made.soon(gate.set)
        assert "data: [DONE]" in list(lines)


def test_a_client_that_leaves_ends_its_generation_and_leaves_no_file() -> None:
    engine, _gate = gated()
    with fronted(Rig(engine), tls=False) as made:
        for stream in (False, True):
            with socket.create_connection(("127.0.0.1", made.front.port)) as client:
                body = json.dumps(chat(stream=stream)).encode()
                client.sendall(HEAD % len(body) + body)
                wait_for(lambda: engine.running == 1)
                assert made.front.bodies() == []
            wait_for(lambda: engine.running == 0)
        with socket.create_connection(("127.0.0.1", made.front.port)) as client:
            client.sendall(HEAD % 999_999)
            client.sendall(b" " * 500_000)
            wait_for(lambda: len(made.front.bodies()) == 1)
        wait_for(lambda: made.front.bodies() == [])
        assert len(engine.requests) == 2


def test_a_body_whose_nginx_was_killed_is_swept() -> None:
    with fronted(Rig(), tls=False) as made, socket.create_connection(("127.0.0.1", made.front.port)) as client:
        client.sendall(HEAD % 999_999)
        client.sendall(b" " * 500_000)
        wait_for(lambda: len(made.front.bodies()) == 1)
        master = made.front.process.pid
        children = Path(f"/proc/{master}/task/{master}/children").read_text().split()
        for pid in (master, *map(int, children)):
            os.kill(pid, 9)
        made.front.process.wait(20)
        with suppress(ConnectionResetError):  # what nginx had not read yet turns the end into a reset
            assert client.recv(1) == b""
        proxy = made.front.config.proxy
        written = proxy.bodies.joinpath(*made.front.bodies()).stat().st_mtime
        assert sweep(proxy, written + STALE_S) == 0
        assert sweep(proxy, written + STALE_S + 1) == 1
        assert made.front.bodies() == []


def test_a_body_that_nginx_cannot_keep_is_an_internal_error_in_json(plain: Fronted) -> None:
    bodies = plain.front.config.proxy.bodies
    bodies.rename(bodies.with_suffix(".away"))
    try:
        reply = post(plain.front.url, TEXT, prompt())
    finally:
        bodies.with_suffix(".away").rename(bodies)
    assert reply.status_code == 500
    assert error_of(reply, TEXT)["code"] == "internal_error"
    assert post(plain.front.url, TEXT, prompt()).status_code == 200


def test_no_secret_and_no_query_is_logged(plain: Fronted) -> None:
    headers = {"authorization": "Bearer CANARY", "x-api-key": "CANARY", "user-agent": "CANARY"}
    post(plain.front.url, f"{TEXT}?key=CANARY", prompt("CANARY"), headers)
    assert "CANARY" not in plain.front.log()
    assert "CANARY" not in plain.front.log("error.log")
