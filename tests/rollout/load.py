"""Clients of a fleet that send again what was refused or broke off, as the README asks clients to.

Run as ``python -m tests.rollout.load URL CA KEY``; ends when its standard input does and prints one
JSON line. A request has failed if it was not answered in full after all tries: status 200, all tokens, and for a stream
its last event.
"""

import asyncio
import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import httpx

CLIENTS = 4
TRIES = 8
TOKENS = 12
PAUSE_S = 0.2
AGAIN = frozenset({429, 502, 503, 504})


class BrokenError(Exception):
    """An answer that is not whole; the message says how it was seen."""


@dataclass(slots=True)
class Tally:
    """What all clients have seen."""

    requests: int = 0
    failed: list[str] = field(default_factory=list)
    again: Counter[str] = field(default_factory=Counter)
    longest_s: float = 0.0
    seconds: list[float] = field(default_factory=list)


async def ask(client: httpx.AsyncClient, number: int, *, stream: bool) -> None:
    """One try of one request.

    Raises:
        BrokenError: there is no whole answer.
        httpx.TransportError: the connection broke.
    """
    body = {
        "model": "smollm2-135m",
        "prompt": f"Request {number}: write down the numbers from one to ten.",
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "temperature": 0,
        "stream": stream,
    }
    if not stream:
        answer = await client.post("/v1/completions", json=body)
        if answer.status_code != 200:
            raise BrokenError(f"status {answer.status_code}")
        if answer.json()["usage"]["completion_tokens"] != TOKENS:
            raise BrokenError("too few tokens")
        return
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            raise BrokenError(f"status {answer.status_code}")
        text = "".join([part async for part in answer.aiter_text()])
    if not text.rstrip().endswith("data: [DONE]"):
        raise BrokenError("no last event")


async def one(client: httpx.AsyncClient, tally: Tally, number: int) -> None:
    """One request, sent again until it is answered or all tries are used."""
    began, cause = time.monotonic(), ""
    tally.requests += 1
    for attempt in range(TRIES):
        try:
            await ask(client, number, stream=number % 2 == 0)
        except (BrokenError, httpx.TransportError) as error:
            cause = str(error) or type(error).__name__
            if cause.startswith("status ") and int(cause.split()[1]) not in AGAIN:
                break
            tally.again[cause] += 1
            await asyncio.sleep(0.25 * 2**attempt * random.uniform(0.8, 1.2))
        else:
            tally.seconds.append(time.monotonic() - began)
            tally.longest_s = max(tally.longest_s, tally.seconds[-1])
            return
    tally.failed.append(f"request {number}: {cause}")


async def main(url: str, authority: str, key: str) -> None:
    """Send requests until standard input ends, then print the tally."""
    tally, ended = Tally(), asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), ended.set)

    async def client(index: int) -> None:
        headers = {"authorization": f"Bearer {key}"}
        context = httpx.create_ssl_context(verify=authority)
        async with httpx.AsyncClient(base_url=url, headers=headers, verify=context, timeout=60.0) as session:
            number = index
            while not ended.is_set():
                await one(session, tally, number)
                number += CLIENTS
                await asyncio.sleep(PAUSE_S)

    await asyncio.gather(*(client(index) for index in range(CLIENTS)))
    seconds = sorted(tally.seconds) or [0.0]
    report = {
        "requests": tally.requests,
        "failed": tally.failed,
        "again": dict(tally.again),
        "p50_s": round(seconds[len(seconds) // 2], 3),
        "longest_s": round(tally.longest_s, 3),
    }
    sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], Path(sys.argv[3]).read_text().strip()))
