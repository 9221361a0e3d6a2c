"""The load of the bench chaos: requests whose right answers are known, sent again and again by clients that retry.

Owns the requests, what each of them gives undisturbed, and the judgement of every exchange. A request is lost if it
hangs or if its answer looks finished and is not the right one; a typed error and a connection that breaks are not lost,
since the client knows.

Which requests share a step depends on the kills, and sums of another order may decide a near tie otherwise. So a right
answer is learnt with the places where its two likeliest ids were closer than ``NEAR_TIE``; an answer that parts from it
at such a place is counted apart and is not lost.
"""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product, takewhile
from typing import Any, Literal

import httpx

from tests.bench.soak_load import prose

HANG_S = 30.0
"""An exchange that takes longer counts as hung; undisturbed ones take seconds."""
NEAR_TIE = 0.01
"""Difference of two log-probabilities below which either id is right."""
RETRY_S = 0.2
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/messages")
ROUNDS = 3
"""Different requests of each endpoint and kind."""

Verdict = Literal[
    "finished", "near tie", "typed error", "broken connection", "refused", "hang", "false finish", "unexpected"
]
LOST: tuple[Verdict, ...] = ("hang", "false finish", "unexpected")

Answer = tuple[str, str]
"""Text and reason of the end."""


@dataclass(frozen=True, slots=True)
class Right:
    """What a request gives undisturbed; ``ties`` are the characters of ids that nearly were others, [first, end)."""

    answer: Answer
    ties: tuple[tuple[int, int], ...]

    def is_near(self, other: Answer) -> bool:
        """Whether another answer parts from this one at a near tie."""
        pairs = zip(self.answer[0], other[0], strict=False)
        parted = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        return any(first <= parted < end for first, end in self.ties)


@dataclass(frozen=True, slots=True)
class Ask:
    """One request at temperature 0."""

    path: str
    body: dict[str, Any]
    stream: bool


def make_asks(model: str, seed: int) -> tuple[Ask, ...]:
    """Requests to the three endpoints, as streams and as wholes, with prompts and lengths drawn from ``seed``."""
    draw = random.Random(seed)
    asks: list[Ask] = []
    for path, stream, _ in product(PATHS, (True, False), range(ROUNDS)):
        body: dict[str, Any] = {
            "model": model, "temperature": 0, "max_tokens": draw.randint(4, 40), "stream": stream,
        }  # fmt: skip
        text = prose(draw, 200)
        body |= {"prompt": text} if path == "/v1/completions" else {"messages": [{"role": "user", "content": text}]}
        asks.append(Ask(path, body, stream))
    return tuple(asks)


class Load:
    """Sends requests and judges what comes back: ``verdicts`` counts exchanges, ``details`` tells of lost ones."""

    def __init__(self, asks: tuple[Ask, ...], seed: int) -> None:
        """Prepare to send ``asks``; ``learn`` must come first."""
        self.verdicts: Counter[Verdict] = Counter()
        self.details: list[str] = []
        self._asks = asks
        self._seed = seed
        self._right: dict[int, Right] = {}

    @property
    def lost(self) -> int:
        """Requests that were lost."""
        return sum(self.verdicts[verdict] for verdict in LOST)

    async def learn(self, http: httpx.AsyncClient) -> None:
        """Send every request once, undisturbed, and keep its answer as the right one.

        Raises:
            httpx.HTTPError: a request fails.
        """
        for index, ask in enumerate(self._asks):
            async with http.stream("POST", ask.path, json=ask.body) as reply:
                answer, error = await _read(ask, reply.raise_for_status())
            if answer is None:
                raise httpx.DecodingError(f"no whole answer from {ask.path}: {error}")
            self._right[index] = Right(answer, await _near_ties(http, ask, answer[0]))

    async def client(self, http: httpx.AsyncClient, number: int, going: Callable[[], bool]) -> None:
        """Send one request after the other while ``going()``, each until it is not refused."""
        draw = random.Random(f"{self._seed}-{number}")
        while going():
            index = draw.randrange(len(self._asks))
            while (verdict := await self._judge(http, index)) == "refused" and going():
                self.verdicts[verdict] += 1
                await asyncio.sleep(RETRY_S)
            self.verdicts[verdict] += 1

    async def _judge(self, http: httpx.AsyncClient, index: int) -> Verdict:
        ask, began = self._asks[index], False
        try:
            async with asyncio.timeout(HANG_S), http.stream("POST", ask.path, json=ask.body) as reply:
                began = True
                if reply.status_code in (429, 503):
                    return "refused"
                answer, error = await _read(ask, reply)
        except TimeoutError:
            return self._lost("hang", ask, f"no end after {HANG_S:g} s")
        except httpx.TransportError:
            return "broken connection" if began else "refused"
        if error:
            return "typed error" if answer is None else self._lost("false finish", ask, f"an end beside {error}")
        if reply.status_code != 200:
            return self._lost("unexpected", ask, f"status {reply.status_code} without an error body")
        if answer is None:
            return "broken connection"
        right = self._right[index]
        if answer == right.answer:
            return "finished"
        if right.is_near(answer):
            return "near tie"
        return self._lost("false finish", ask, f"{answer!r} instead of {right.answer!r}")

    def _lost(self, verdict: Verdict, ask: Ask, detail: str) -> Verdict:
        self.details.append(f"{verdict} of {ask.path}{', stream' if ask.stream else ''}: {detail}")
        return verdict


async def _near_ties(http: httpx.AsyncClient, ask: Ask, text: str) -> tuple[tuple[int, int], ...]:
    """Where the answer ``text`` could nearly have gone another way; messages are asked for as a chat."""
    path = "/v1/completions" if ask.path == "/v1/completions" else "/v1/chat/completions"
    wanted: dict[str, Any] = {"logprobs": 2} if path == "/v1/completions" else {"logprobs": True, "top_logprobs": 2}
    reply = await http.post(path, json={**ask.body, **wanted, "stream": False})
    (choice,) = reply.raise_for_status().json()["choices"]
    found = choice.get("logprobs") or {}
    steps = [(step["token"], [top["logprob"] for top in step["top_logprobs"]]) for step in found.get("content", ())]
    both = zip(found.get("tokens", ()), found.get("top_logprobs", ()), strict=True)
    steps += [(token, list(tops.values())) for token, tops in both]
    said = choice["text"] if "text" in choice else choice["message"]["content"]
    if said != text:
        return ()
    ties: list[tuple[int, int]] = []
    at = 0
    for token, tops in steps:
        best, *others = sorted(tops, reverse=True)
        if others and best - others[0] < NEAR_TIE:
            ties.append((at, at + len(token)))
        at += len(token)
    return tuple(ties)


async def _read(ask: Ask, reply: httpx.Response) -> tuple[Answer | None, str]:
    """The answer, if it looks finished, and the message of a typed error, if there is one."""
    if ask.stream and reply.status_code == 200:
        return await _read_stream(reply)
    await reply.aread()
    try:
        document = reply.json()
    except ValueError:
        return None, ""
    if "error" in document:
        return None, str(document["error"]["message"])
    if "content" in document:
        return ("".join(block["text"] for block in document["content"]), str(document["stop_reason"])), ""
    (choice,) = document["choices"]
    return (choice["text"] if "text" in choice else choice["message"]["content"], str(choice["finish_reason"])), ""


async def _read_stream(reply: httpx.Response) -> tuple[Answer | None, str]:
    text, reason, error, ended = "", "", "", False
    async for line in reply.aiter_lines():
        if not line.startswith("data: "):
            continue
        if line == "data: [DONE]":
            ended = True
            continue
        event = json.loads(line[6:])
        ended = ended or event.get("type") == "message_stop"
        if event.get("error"):
            error = str(event["error"]["message"])
        if event.get("delta"):
            text += event["delta"].get("text", "")
            reason = event["delta"].get("stop_reason") or reason
        for choice in event.get("choices", ()):
            text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            reason = choice["finish_reason"] or reason
    return (text, reason) if ended else None, error
