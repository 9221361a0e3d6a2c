"""The official SDKs, unmodified, over a real socket; and raw sockets for what SDKs never do."""

import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from api.errors import ContextLengthError, NotReadyError, OverloadedError
from api.ports import Finished, Tenant
from api.settings import ApiSettings
from tests.support.api_rig import CHAT, CONTEXT, MESSAGES, MODEL, Rig, chat, message
from tests.support.live_server import serving
from tests.support.scripted_engine import EOS, ScriptedEngine, emit, say, tokens

KEY = "zk-test"
USER = [{"role": "user", "content": "hi"}]


class Live:
    """One server for the whole module; the script changes from test to test."""

    def __init__(self) -> None:
        self.engine = ScriptedEngine()
        self.rig = Rig(
            self.engine,
            keys={KEY.encode(): Tenant(name="t", key_id="k")},
            settings=ApiSettings(max_body_bytes=100_000, write_timeout_s=0.5, keepalive_s=0.05),
        )
        self.port = 0

    def connect(self, method: str, path: str, body: Any, *headers: str) -> socket.socket:
        """A request on a raw connection."""
        raw = json.dumps(body).encode()
        lines = [f"{method} {path} HTTP/1.1", "host: x", f"x-api-key: {KEY}", f"content-length: {len(raw)}", *headers]
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=5)
        connection.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + raw)
        return connection

    def settle(self, condition: Any) -> None:
        """Wait up to two seconds for a condition."""
        deadline = time.monotonic() + 2
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    live = Live()
    with serving(live.rig.app) as live.port:
        yield live


@pytest.fixture
def live(server: Live) -> Live:
    server.engine.script = say("ok")
    server.engine.refusal = None
    server.engine.generations.clear()
    server.engine.requests.clear()
    server.rig.observer.records.clear()
    return server


@pytest.fixture
def claude(live: Live) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=f"http://127.0.0.1:{live.port}", api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture
def gpt(live: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{live.port}/v1", api_key=KEY, max_retries=0) as client:
        yield client


def test_anthropic_message(live: Live, claude: anthropic.Anthropic) -> None:
    live.engine.script = say("Salut END", cached=2)
    answer = claude.messages.create(
        model=MODEL, max_tokens=30, messages=USER, system="Be brief.", stop_sequences=["END"]
    )
    assert [block.text for block in answer.content if block.type == "text"] == ["Salut "]
    assert (answer.stop_reason, answer.stop_sequence, answer.role) == ("stop_sequence", "END", "assistant")
    assert (answer.usage.input_tokens, answer.usage.cache_read_input_tokens, answer.usage.output_tokens) == (15, 2, 9)
    assert answer._request_id
    assert answer._request_id.startswith("req_")


def test_anthropic_stream(live: Live, claude: anthropic.Anthropic) -> None:
    live.engine.script = say("H\u00e9llo \U0001f9ff", pause=0.06)
    with claude.messages.stream(model=MODEL, max_tokens=30, messages=USER) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == "H\u00e9llo \U0001f9ff"  # type: ignore[union-attr]
    assert (final.stop_reason, final.usage.output_tokens) == ("end_turn", 11)
    kinds = [event.type for event in claude.messages.create(model=MODEL, max_tokens=1, messages=USER, stream=True)]
    assert kinds == [
        "message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta",
        "message_stop",
    ]  # fmt: skip


def test_anthropic_counts_and_models(claude: anthropic.Anthropic) -> None:
    assert claude.messages.count_tokens(model=MODEL, messages=USER).input_tokens == 6
    assert [model.id for model in claude.models.list()] == [MODEL, "gpt-alias", "org/name"]
    assert claude.models.retrieve(MODEL).max_input_tokens == CONTEXT - 1


@pytest.mark.parametrize(
    ("refusal", "kind"),
    [
        (OverloadedError("busy", retry_after_s=1), anthropic.RateLimitError),
        (NotReadyError("starting"), anthropic.InternalServerError),
        (ContextLengthError("too long"), anthropic.BadRequestError),
    ],
)
def test_anthropic_errors(
    live: Live, claude: anthropic.Anthropic, refusal: Any, kind: type[anthropic.APIStatusError]
) -> None:
    live.engine.refusal = refusal
    with pytest.raises(kind, match=refusal.message) as caught:
        claude.messages.create(model=MODEL, max_tokens=5, messages=USER)
    assert caught.value.body["error"]["type"] == refusal.anthropic_type  # type: ignore[index]
    assert caught.value.request_id


def test_anthropic_wrong_key_model_and_mid_stream_failure(live: Live, claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.AuthenticationError):
        claude.with_options(api_key="wrong").messages.create(model=MODEL, max_tokens=5, messages=USER)
    with pytest.raises(anthropic.NotFoundError, match="no-such"):
        claude.messages.create(model="no-such", max_tokens=5, messages=USER)
    live.engine.script = lambda request: [tokens(request, 0, 65), Finished(0, "error", error="engine lost")]
    with (
        pytest.raises(anthropic.APIError, match="engine lost"),
        claude.messages.stream(model=MODEL, max_tokens=5, messages=USER) as stream,
    ):
        stream.until_done()


def test_openai_chat(live: Live, gpt: openai.OpenAI) -> None:
    live.engine.script = emit(263, 264, *b"!")
    answer = gpt.chat.completions.create(
        model=MODEL, messages=USER, n=2, logprobs=True, top_logprobs=1, seed=3, temperature=0.5  # type: ignore[arg-type]
    )  # fmt: skip
    assert [choice.message.content for choice in answer.choices] == ["\U0001fae0!"] * 2
    assert [choice.finish_reason for choice in answer.choices] == ["stop"] * 2
    content = answer.choices[1].logprobs.content  # type: ignore[union-attr]
    assert bytes(b for entry in content or () for b in entry.bytes or ()).decode() == "\U0001fae0!"
    assert answer.usage
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (6, 6)
    assert answer._request_id


def test_openai_stream(live: Live, gpt: openai.OpenAI) -> None:
    live.engine.script = say("one two", pause=0.06)
    chunks = list(
        gpt.chat.completions.create(
            model=MODEL, messages=USER, stream=True, stream_options={"include_usage": True}  # type: ignore[arg-type]
        )
    )  # fmt: skip
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "one two"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage
    assert chunks[-1].usage.completion_tokens == 7
    with gpt.chat.completions.stream(model=MODEL, messages=USER) as stream:  # type: ignore[arg-type]
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "one two"


def test_openai_text_completions(live: Live, gpt: openai.OpenAI) -> None:
    live.engine.script = say("xyz")
    answer = gpt.completions.create(model=MODEL, prompt=["a", "b"], max_tokens=2, echo=True)
    assert [choice.text for choice in answer.choices] == ["axy", "bxy"]
    streamed = gpt.completions.create(model=MODEL, prompt="a", stream=True, logprobs=1)
    parts = [chunk.choices[0] for chunk in streamed]
    assert "".join(part.text for part in parts) == "xyz"
    assert [part.logprobs.tokens for part in parts if part.logprobs] == [["x"], ["y"], ["z"]]
    assert [model.id for model in gpt.models.list()] == [MODEL, "gpt-alias", "org/name"]
    assert gpt.models.retrieve("org/name").id == "org/name"


@pytest.mark.parametrize(
    ("refusal", "kind"),
    [
        (OverloadedError("busy", retry_after_s=1), openai.RateLimitError),
        (NotReadyError("starting"), openai.InternalServerError),
        (ContextLengthError("too long"), openai.BadRequestError),
    ],
)
def test_openai_errors(live: Live, gpt: openai.OpenAI, refusal: Any, kind: type[openai.APIStatusError]) -> None:
    live.engine.refusal = refusal
    with pytest.raises(kind, match=refusal.message) as caught:
        gpt.chat.completions.create(model=MODEL, messages=USER, stream=True)  # type: ignore[call-overload]
    assert (caught.value.code, caught.value.type) == (refusal.code, refusal.openai_type)
    assert caught.value.request_id


def test_openai_wrong_key_field_body_and_mid_stream_failure(live: Live, gpt: openai.OpenAI) -> None:
    with pytest.raises(openai.AuthenticationError):
        gpt.with_options(api_key="wrong").models.list()
    with pytest.raises(openai.BadRequestError) as caught:
        gpt.chat.completions.create(model=MODEL, messages=USER, extra_body={"guided_regex": "a"})  # type: ignore[arg-type]
    assert caught.value.param == "guided_regex"
    with pytest.raises(openai.APIStatusError) as large:
        gpt.completions.create(model=MODEL, prompt="x" * 200_000)
    assert (large.value.status_code, large.value.code) == (413, "body_too_large")
    live.engine.script = lambda request: [tokens(request, 0, 65), Finished(0, "error", error="engine lost")]
    with pytest.raises(openai.APIError, match="engine lost"):
        list(gpt.chat.completions.create(model=MODEL, messages=USER, stream=True))  # type: ignore[call-overload]


def test_closing_a_stream_cancels(live: Live, gpt: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    live.engine.script = say("x" * 50, pause=0.05)
    with gpt.chat.completions.create(model=MODEL, messages=USER, stream=True) as stream:  # type: ignore[call-overload]
        next(iter(stream))
    live.settle(lambda: live.engine.cancels == [[None]])
    with claude.messages.create(model=MODEL, max_tokens=50, messages=USER, stream=True) as events:
        next(iter(events))
    live.settle(lambda: live.engine.cancels == [[None], [None]])
    live.settle(lambda: live.engine.running == 0)


@pytest.mark.parametrize("body", [chat(), chat(stream=True)], ids=["whole", "stream"])
def test_bc092_closing_the_socket_cancels(live: Live, body: Any) -> None:
    live.engine.script = lambda request: [tokens(request, 0, 65), 60.0]
    connection = live.connect("POST", CHAT, body)
    live.settle(lambda: live.engine.generations and live.engine.generations[0].emitted)
    connection.close()
    live.settle(lambda: live.engine.cancels == [[None]] and live.engine.running == 0)
    live.settle(lambda: [record.status for record in live.rig.observer.records] == [499])


def test_bc096_a_socket_that_is_not_read_is_dropped_without_a_clean_end(live: Live) -> None:
    live.engine.script = lambda request: [*[tokens(request, 0, 266)] * 400, Finished(0, "stop", EOS)]
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(5)
    connection.connect(("127.0.0.1", live.port))
    raw = json.dumps(chat(stream=True)).encode()
    connection.sendall(
        f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nx-api-key: {KEY}\r\ncontent-length: {len(raw)}\r\n\r\n".encode()
    )
    connection.sendall(raw)
    live.settle(lambda: live.engine.cancels == [[None]])
    assert live.rig.observer.records[0].error == "client does not read"
    tail = b""
    while part := connection.recv(1 << 20):
        tail = (tail + part)[-64:]
    connection.close()
    assert b"[DONE]" not in tail
    assert not tail.endswith(b"0\r\n\r\n")


@pytest.mark.parametrize("rest", [b"zz\r\n{}\r\n0\r\n\r\n", b"-5\r\n{}\r\n", b"2\r\n{", b"2\r\n{}\r\n"])
def test_badly_framed_and_half_sent_bodies_are_the_clients_fault(live: Live, rest: bytes) -> None:
    with socket.create_connection(("127.0.0.1", live.port), timeout=5) as connection:
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nx-api-key: {KEY}\r\ntransfer-encoding: chunked\r\n\r\n"
        connection.sendall(head.encode() + rest)
        connection.shutdown(socket.SHUT_WR)
        answer = connection.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"the body broke off or is badly framed after " in answer
    live.settle(lambda: [record.status for record in live.rig.observer.records] == [400])


@pytest.mark.parametrize(
    ("path", "key", "status"), [(CHAT, KEY, 413), (MESSAGES, KEY, 413), (CHAT, "wrong", 401), ("/v1/nothing", KEY, 404)]
)
def test_a_connection_serves_on_after_a_large_body_was_refused(live: Live, path: str, key: str, status: int) -> None:
    raw = json.dumps(chat("x" * 190_000)).encode()
    with socket.create_connection(("127.0.0.1", live.port), timeout=5) as connection:
        for _ in range(5):
            head = f"POST {path} HTTP/1.1\r\nhost: x\r\nx-api-key: {key}\r\ncontent-length: {len(raw)}\r\n\r\n"
            connection.sendall(head.encode() + raw)
            assert connection.recv(65536).startswith(f"HTTP/1.1 {status} ".encode())
        small = json.dumps(chat()).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nx-api-key: {KEY}\r\ncontent-length: {len(small)}\r\n\r\n"
        connection.sendall(head.encode() + small)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("sent", [b"", b"x" * 1000])
def test_a_refused_body_that_does_not_end_closes_the_connection(live: Live, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", live.port), timeout=5) as connection:
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nx-api-key: {KEY}\r\ncontent-length: 50000000\r\n\r\n"
        connection.sendall(head.encode() + sent)
        answer = connection.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"connection: close" in answer.lower()


def test_keep_alive_expect_and_early_refusal(live: Live) -> None:
    connection = live.connect("POST", MESSAGES, message())
    assert connection.recv(65536).startswith(b"HTTP/1.1 200")
    raw = json.dumps(chat()).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nx-api-key: {KEY}\r\nexpect: 100-continue\r\n"
    connection.sendall(f"{head}content-length: {len(raw)}\r\n\r\n".encode())
    assert connection.recv(65536).startswith(b"HTTP/1.1 100")
    connection.sendall(raw)
    assert connection.recv(65536).startswith(b"HTTP/1.1 200")
    connection.sendall(f"{head}content-length: 50000000\r\n\r\n".encode())
    assert connection.recv(65536).startswith(b"HTTP/1.1 413")
    connection.close()
