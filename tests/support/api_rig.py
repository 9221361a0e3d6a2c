"""An app over scripts, and a client that speaks ASGI to it directly: every message is seen, every moment is chosen."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from api.app import create_app
from api.ports import Answers, Generator, ModelCard, QuotaState, RequestRecord, Tenant
from api.settings import ApiSettings
from tests.support.scripted_engine import VOCAB, ScriptedCodec, ScriptedEngine

MODEL, ALIAS, CONTEXT = "tiny", "gpt-alias", 64


class Keys:
    """A key ring from a dictionary; open when it is empty."""

    def __init__(self, keys: Mapping[bytes, Tenant] | None = None) -> None:
        self.keys = dict(keys or {})

    @property
    def open(self) -> bool:
        return not self.keys

    def find(self, key: bytes) -> Tenant | None:
        return self.keys.get(key)


class CountingQuota:
    """Requests and tokens of one endless minute."""

    def __init__(self) -> None:
        self.requests: dict[str, int] = {}
        self.tokens: dict[str, int] = {}

    def take(self, tenant: Tenant, *, requests: int, tokens: int) -> QuotaState:
        used = self.requests.get(tenant.key_id, 0), self.tokens.get(tenant.key_id, 0)
        allowed = (not tenant.requests_per_minute or used[0] + requests <= tenant.requests_per_minute) and (
            not tenant.tokens_per_minute or used[1] + tokens <= tenant.tokens_per_minute
        )
        if allowed:
            used = used[0] + requests, used[1] + tokens
            self.requests[tenant.key_id], self.tokens[tenant.key_id] = used
        return QuotaState(
            allowed=allowed,
            limit_requests=tenant.requests_per_minute,
            remaining_requests=max(0, tenant.requests_per_minute - used[0]),
            limit_tokens=tenant.tokens_per_minute,
            remaining_tokens=tenant.tokens_per_minute - used[1],
            reset_s=12.5,
        )

    def add_tokens(self, tenant: Tenant, tokens: int) -> None:
        self.tokens[tenant.key_id] = self.tokens.get(tenant.key_id, 0) + tokens


class ListObserver:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.records: list[RequestRecord] = []

    def request_started(self, route: str) -> None:
        self.started.append(route)

    def request_finished(self, record: RequestRecord) -> None:
        self.records.append(record)

    def exposition(self) -> tuple[str, bytes]:
        return "text/plain; version=0.0.4", b"zccp_up 1\n"


@dataclass
class Reply:
    """A whole response. ``chunks`` are the body messages as they came; ``ended`` whether the last one was marked so."""

    status: int = 0
    headers: list[tuple[str, str]] = field(default_factory=list)
    chunks: list[bytes] = field(default_factory=list)
    ended: bool = False

    @property
    def body(self) -> bytes:
        return b"".join(self.chunks)

    def json(self) -> Any:
        return json.loads(self.body)

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key == name), None)

    def events(self) -> list[tuple[str | None, Any]]:
        """Server-sent events as (name, data); data is parsed unless it is the end mark. Comments are left out."""
        events: list[tuple[str | None, Any]] = []
        for block in self.body.decode().removesuffix("\n\n").split("\n\n"):
            name, payload = None, None
            for line in block.split("\n"):
                if line.startswith("event: "):
                    name = line.removeprefix("event: ")
                elif line.startswith("data: "):
                    assert payload is None, block
                    payload = line.removeprefix("data: ")
                else:
                    assert line.startswith(":"), line
            if payload is not None:
                events.append((name, payload if payload == "[DONE]" else json.loads(payload)))
        return events

    def data(self) -> list[Any]:
        """The payloads of a stream without names."""
        assert all(name is None for name, _ in self.events())
        return [payload for _, payload in self.events()]


Hook = Callable[["Caller", bytes], Awaitable[None]]


async def until(condition: Callable[[], Any]) -> None:
    """Let the loop run until a condition holds.

    Raises:
        TimeoutError: it did not within two seconds.
    """
    async with asyncio.timeout(2):
        while not condition():  # noqa: ASYNC110 - the condition is about code that knows of no event
            await asyncio.sleep(0)


class Caller:
    """One request in the making: ``leave`` is the client closing its connection."""

    def __init__(self, parts: list[bytes], on_chunk: Hook | None, *, stalls: bool) -> None:
        self.reply = Reply()
        self._stalls = stalls
        self._parts = parts
        self._on_chunk = on_chunk
        self._left = asyncio.Event()

    def leave(self) -> None:
        self._left.set()

    async def receive(self) -> Any:
        if self._parts:
            part = self._parts.pop(0)
            return {"type": "http.request", "body": part, "more_body": bool(self._parts) or self._stalls}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            assert not self.reply.status
            self.reply.status = message["status"]
            self.reply.headers = [(name.decode(), value.decode()) for name, value in message["headers"]]
            return
        assert not self.reply.ended
        self.reply.chunks.append(message.get("body", b""))
        if self._on_chunk is not None:
            await self._on_chunk(self, self.reply.chunks[-1])
        self.reply.ended = not message.get("more_body", False)


class Rig:
    """An app and its scripted surroundings."""

    def __init__(
        self,
        engine: ScriptedEngine | None = None,
        *,
        keys: Mapping[bytes, Tenant] | None = None,
        settings: ApiSettings | None = None,
        context: int = CONTEXT,
        has_chat_template: bool = True,
        over: Callable[[Generator], Generator] = lambda generator: generator,
        answers: Answers | None = None,
    ) -> None:
        self.engine = engine or ScriptedEngine()
        self.codec = ScriptedCodec()
        self.keys = Keys(keys)
        self.quota = CountingQuota()
        self.observer = ListObserver()
        self.settings = settings or ApiSettings()
        self.card = ModelCard(
            name=MODEL,
            aliases=(ALIAS, "org/name"),
            created=1_700_000_000,
            context=context,
            vocab=VOCAB,
            has_chat_template=has_chat_template,
        )
        self.app = create_app(
            over(self.engine), self.codec, self.card, self.keys, self.quota, self.observer, self.settings, None, answers
        )

    async def call(
        self,
        method: str,
        path: str,
        body: Any = b"",
        headers: Mapping[str, str | bytes] | None = None,
        *,
        on_chunk: Hook | None = None,
        callers: list[Caller] | None = None,
        stalls: bool = False,
    ) -> Reply:
        """One request; ``body`` is bytes, a list of parts, or anything that JSON can hold.

        ``on_chunk`` runs in the app's write, ``callers`` takes the request's handle, ``stalls`` leaves the body open.
        """
        parts = body if isinstance(body, list) and body and isinstance(body[0], bytes) else [body]
        parts = [part if isinstance(part, bytes) else json.dumps(part).encode() for part in parts]
        caller = Caller(parts, on_chunk, stalls=stalls)
        if callers is not None:
            callers.append(caller)
        raw = [
            (name.lower().encode(), value if isinstance(value, bytes) else value.encode())
            for name, value in (headers or {}).items()
        ]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": raw,
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }
        await self.app(scope, caller.receive, caller.send)
        return caller.reply

    def get(self, path: str, headers: Mapping[str, str | bytes] | None = None) -> Reply:
        """A GET on its own event loop."""
        return asyncio.run(self.call("GET", path, headers=headers))

    def post(self, path: str, body: Any, headers: Mapping[str, str | bytes] | None = None) -> Reply:
        """A POST on its own event loop."""
        return asyncio.run(self.call("POST", path, body, headers))


def chat(text: str = "hi", **fields: Any) -> dict[str, Any]:
    """Body of a chat completion."""
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}


def message(text: str = "hi", **fields: Any) -> dict[str, Any]:
    """Body of an Anthropic message."""
    return {"max_tokens": 32, **chat(text), **fields}


def prompt(text: Any = "hi", **fields: Any) -> dict[str, Any]:
    """Body of a text completion."""
    return {"model": MODEL, "prompt": text, **fields}


CHAT, TEXT, MESSAGES, COUNT = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/messages/count_tokens"
