"""Mixed traffic: many clients at once, some of which leave or send nonsense, and what is left afterwards."""

import asyncio
import random
from typing import Any

import httpx
import pytest

from tests.support.running_appliance import RunningAppliance

pytestmark = pytest.mark.system

MODEL = "smollm2-135m"
WORDS = (
    "the",
    "sea",
    "is",
    "calm",
    "tonight",
    "and",
    "people",
    "walk",
    "along",
    "a",
    "shore",
    "while",
    "children",
    "play",
)
NUM_REQUESTS = 48
AT_ONCE = 12


def bodies(seed: int) -> list[tuple[str, dict[str, Any], str]]:
    """(path, body, what the client does) of every request; the same for the same seed."""
    dice = random.Random(seed)
    made: list[tuple[str, dict[str, Any], str]] = []
    for _ in range(NUM_REQUESTS):
        text = " ".join(dice.choices(WORDS, k=dice.choice((3, 20, 60, 200, 700))))
        sampling = {"temperature": dice.choice((0, 0.7, 1.0)), "max_tokens": dice.choice((1, 5, 16, 40))}
        kind = dice.choice(("read", "read", "read", "leave", "leave early", "nonsense"))
        path = dice.choice(("/v1/chat/completions", "/v1/messages", "/v1/completions"))
        body: dict[str, Any] = {"model": MODEL, **sampling, "stream": kind.startswith("leave") or dice.random() < 0.5}
        if path == "/v1/completions":
            body |= {"prompt": text, "n": dice.choice((1, 2)), "frequency_penalty": dice.choice((0, 0.5))}
        else:
            body |= {"messages": [{"role": "user", "content": text}]}
        if kind == "leave":
            body |= {"max_tokens": 400}
        if kind == "nonsense":
            body |= {"max_tokens": -5}
        made.append((path, body, kind))
    return made


async def send(client: httpx.AsyncClient, path: str, body: dict[str, Any], kind: str) -> None:
    """One client's request; checks what it gets."""
    if kind == "nonsense":
        assert (await client.post(path, json=body)).status_code == 400
        return
    if not body["stream"]:
        reply = await client.post(path, json=body)
        assert reply.status_code == 200, reply.text
        assert reply.json()["usage"]
        return
    async with client.stream("POST", path, json=body) as reply:
        assert reply.status_code == 200
        if kind == "leave early":
            return
        text = ""
        async for piece in reply.aiter_text():
            text += piece
            if kind == "leave" and len(text) > 600:
                return
    assert '"error"' not in text
    assert text.rstrip().endswith("[DONE]") or "message_stop" in text


async def crowd(url: str, requests: list[tuple[str, dict[str, Any], str]]) -> None:
    room = asyncio.Semaphore(AT_ONCE)
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:

        async def one(path: str, body: dict[str, Any], kind: str) -> None:
            async with room:
                await send(client, path, body, kind)

        await asyncio.gather(*(one(*request) for request in requests))


def test_mixed_traffic_leaves_nothing_behind_and_compiles_nothing(appliance: RunningAppliance) -> None:
    requests = bodies(20260)
    before = appliance.settled()
    asyncio.run(crowd(appliance.url, requests))
    after = appliance.settled()
    assert after["zccp_compilations_total"] == 0
    assert after["zccp_generated_tokens_total"] > before["zccp_generated_tokens_total"]

    def num_requests(metrics: dict[str, float]) -> float:
        return sum(value for name, value in metrics.items() if name.startswith("zccp_requests_total{"))

    assert num_requests(after) - num_requests(before) == NUM_REQUESTS


def test_clients_that_leave_while_waiting_or_computing_free_everything(appliance: RunningAppliance) -> None:
    async def leave_at_once() -> None:
        async with httpx.AsyncClient(base_url=appliance.url, timeout=60) as client:

            async def one(delay_s: float) -> None:
                body = {"model": MODEL, "prompt": "sea " * 1500, "max_tokens": 500, "ignore_eos": True}
                task = asyncio.create_task(client.post("/v1/completions", json=body))
                await asyncio.sleep(delay_s)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

            await asyncio.gather(*(one(0.05 * place) for place in range(24)))

    before = appliance.settled()
    asyncio.run(leave_at_once())
    after = appliance.settled()
    label = 'zccp_requests_finished_total{reason="cancelled"}'
    assert after.get(label, 0) > before.get(label, 0)
    text = appliance.client.post("/v1/completions", json={"model": MODEL, "prompt": "hi", "max_tokens": 1})
    assert text.status_code == 200
