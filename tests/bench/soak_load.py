"""The load of the bench soak: clients that send right requests, leave others in the middle, and send wrong ones.

Owns the mix and what the right outcome of each kind is. Every client has random numbers of its own from one seed, so
that two runs send the same requests.
"""

import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

Body = dict[str, Any]

_WORDS = (
    "time", "house", "water", "light", "paper", "stone", "river", "music", "green", "small", "open", "north", "bread",
    "cloud", "seven", "letter", "garden", "window", "market", "engine", "story", "number", "summer", "table", "winter",
)  # fmt: skip
_MOST_WORDS = 1500
_LEFT_EARLY_S = 0.05


@dataclass(frozen=True, slots=True)
class Wrong:
    """A request that must be refused: its method, path, content and the status it gets."""

    name: str
    path: str
    content: bytes
    status: int
    method: str = "POST"


def wrong_requests(model: str) -> tuple[Wrong, ...]:
    """Requests with one fault each."""
    chat: Body = {"model": model, "max_tokens": 4, "messages": [{"role": "user", "content": "Hi"}]}

    def made(name: str, path: str, status: int, **changes: Any) -> Wrong:
        return Wrong(name, path, json.dumps({**chat, **changes}).encode(), status)

    return (
        Wrong("invalid JSON", "/v1/chat/completions", b'{"model": ', 400),
        Wrong("invalid UTF-8", "/v1/messages", b'{"model": "\xff\xfe"}', 400),
        Wrong("not a number", "/v1/chat/completions", json.dumps({**chat, "temperature": float("nan")}).encode(), 400),
        Wrong("wrong method", "/v1/messages", b"", 405, "GET"),
        Wrong("unknown path", "/v1/nothing", b"{}", 404),
        made("unknown model", "/v1/chat/completions", 404, model="no-such-model"),
        made("unknown field", "/v1/chat/completions", 400, no_such_field=1),
        made("wrong type", "/v1/messages", 400, max_tokens="four"),
        made("max_tokens 0", "/v1/messages", 400, max_tokens=0),
        made("no messages", "/v1/chat/completions", 400, messages=[]),
        made("temperature out of range", "/v1/chat/completions", 400, temperature=9),
        made(
            "past the context", "/v1/chat/completions", 400, messages=[{"role": "user", "content": "word " * 140_000}]
        ),
    )


class Load:
    """Sends requests and counts outcomes: ``done`` by kind of request, ``unexpected`` by kind and what happened."""

    def __init__(self, url: str, model: str, seed: int) -> None:
        """Load the appliance at ``url``."""
        self.done: Counter[str] = Counter()
        self.unexpected: Counter[str] = Counter()
        self._url = url
        self._model = model
        self._seed = seed
        self._wrong = wrong_requests(model)

    async def client(self, http: httpx.AsyncClient, number: int, going: Callable[[], bool]) -> None:
        """Send one request after the other while ``going()``."""
        draw = random.Random(f"{self._seed}-{number}")
        kinds: list[tuple[int, str, Callable[[httpx.AsyncClient, random.Random], Awaitable[str]]]] = [
            (6, "chat, whole", self._chat_whole),
            (6, "chat, stream", self._chat_stream),
            (3, "completion, n and log-probabilities", self._choices),
            (3, "completion, penalties", self._penalties),
            (5, "messages, whole", self._messages_whole),
            (5, "messages, stream", self._messages_stream),
            (3, "stream left in the middle", self._left_in_stream),
            (2, "request left before its answer", self._left_waiting),
            (5, "wrong request", self._wrong_request),
        ]
        weights = [weight for weight, _, _ in kinds]
        while going():
            _, kind, send = draw.choices(kinds, weights)[0]
            try:
                problem = await send(http, draw)
            except httpx.HTTPError as error:
                problem = type(error).__name__
            self.done[kind] += 1
            if problem:
                self.unexpected[f"{kind}: {problem}"] += 1

    # ------------------------------------------------------------------ right requests

    async def _chat_whole(self, http: httpx.AsyncClient, draw: random.Random) -> str:
        return await self._whole(http, "/v1/chat/completions", self._chat(draw), "choices")

    async def _messages_whole(self, http: httpx.AsyncClient, draw: random.Random) -> str:
        return await self._whole(http, "/v1/messages", self._chat(draw), "content")

    async def _choices(self, http: httpx.AsyncClient, draw: random.Random) -> str:
        body = self._completion(draw) | {"n": draw.randint(2, 4), "logprobs": draw.randint(0, 5)}
        return await self._whole(http, "/v1/completions", body, "choices")

    async def _penalties(self, http: httpx.AsyncClient, draw: random.Random) -> str:
        body = self._completion(draw) | {
            "repetition_penalty": draw.uniform(1.0, 1.4),
            "presence_penalty": draw.uniform(-1, 1),
            "frequency_penalty": draw.uniform(-1, 1),
            "logit_bias": {str(draw.randrange(20, 300)): draw.uniform(-5, 5)},
        }
        return await self._whole(http, "/v1/completions", body, "choices")

    async def _chat_stream(self, http: httpx.AsyncClient, draw: random.Random) -> str:
        return await self._stream(http, "/v1/chat/completions", self._chat(draw), "data: [DONE]")

    async def _messages_stream(self, http: httpx.AsyncClient, draw: random.Random) -> str:
        return await self._stream(http, "/v1/messages", self._chat(draw), "event: message_stop")

    # ------------------------------------------------------------------ clients that leave, wrong requests

    async def _left_in_stream(self, http: httpx.AsyncClient, draw: random.Random) -> str:
        path = draw.choice(("/v1/chat/completions", "/v1/messages"))
        body = self._chat(draw) | {"stream": True, "max_tokens": 400}
        lines = draw.randint(1, 30)
        async with http.stream("POST", path, json=body) as answer:
            if answer.status_code != 200:
                return await _refusal(answer)
            async for _ in answer.aiter_lines():
                lines -= 1
                if lines <= 0:
                    return ""
        return ""

    async def _left_waiting(self, http: httpx.AsyncClient, draw: random.Random) -> str:
        patience = httpx.Timeout(300, read=draw.uniform(0.001, _LEFT_EARLY_S))
        try:
            answer = await http.post(
                "/v1/completions", json=self._completion(draw) | {"max_tokens": 300}, timeout=patience
            )
        except httpx.ReadTimeout:
            return ""
        return "" if answer.status_code == 200 else await _refusal(answer)

    async def _wrong_request(self, http: httpx.AsyncClient, draw: random.Random) -> str:
        wrong = draw.choice(self._wrong)
        headers = {"content-type": "application/json"}
        answer = await http.request(wrong.method, wrong.path, content=wrong.content, headers=headers)
        if answer.status_code != wrong.status:
            return f"{wrong.name}: status {answer.status_code}, not {wrong.status}"
        if wrong.method == "POST" and not _names_error(answer):
            return f"{wrong.name}: status {answer.status_code} without an error body"
        return ""

    # ------------------------------------------------------------------ one exchange

    async def _whole(self, http: httpx.AsyncClient, path: str, body: Body, field: str) -> str:
        answer = await http.post(path, json=body)
        if answer.status_code != 200:
            return await _refusal(answer)
        wanted = body.get("n", 1)
        found = _document(answer).get(field)
        return "" if isinstance(found, list) and len(found) == wanted else f"{field} has not {wanted} entries"

    async def _stream(self, http: httpx.AsyncClient, path: str, body: Body, last: str) -> str:
        ended = False
        async with http.stream("POST", path, json=body | {"stream": True}) as answer:
            if answer.status_code != 200:
                return await _refusal(answer)
            async for line in answer.aiter_lines():
                if line.startswith(("event: error", 'data: {"error"')):
                    return "an error event in the stream"
                ended = ended or line == last
        return "" if ended else "the stream ended without its last event"

    def _chat(self, draw: random.Random) -> Body:
        turns = [{"role": "user", "content": prose(draw)}]
        body: Body = {"model": self._model, "max_tokens": draw.randint(1, 120), "messages": turns}
        if draw.random() < 0.5:
            body["temperature"] = draw.choice((0, 0.7, 1))
        return body

    def _completion(self, draw: random.Random) -> Body:
        seed = draw.randrange(1 << 30)
        return {"model": self._model, "prompt": prose(draw), "max_tokens": draw.randint(1, 80), "seed": seed}


def prose(draw: random.Random, most_words: int = _MOST_WORDS) -> str:
    """Text of a length that is often short and now and then long."""
    count = int(most_words ** draw.random())
    return " ".join(draw.choices(_WORDS, k=max(1, count)))


async def _refusal(answer: httpx.Response) -> str:
    content = await answer.aread()
    return f"status {answer.status_code} {content[:160].decode(errors='replace')}"


def _names_error(answer: httpx.Response) -> bool:
    error = _document(answer).get("error")
    return isinstance(error, dict) and bool(error.get("message"))


def _document(answer: httpx.Response) -> Mapping[str, Any]:
    """The JSON object of an answer, empty where it is none."""
    try:
        document: Any = answer.json()
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}
