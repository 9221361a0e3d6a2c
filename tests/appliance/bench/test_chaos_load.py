"""How the bench chaos judges an exchange: against servers that answer, err, cut, refuse or say nothing."""

import asyncio
import json

import httpx
import pytest

from tests.bench import chaos_load

ASKS = chaos_load.make_asks("m", 3)


def server(answer: str = "right", reason: str = "length", *, cut: bool = False, error: str = "", ties: str = ""):
    """A server whose answers to all endpoints, streamed or not, hold ``answer``."""

    def whole(path: str) -> dict:
        if path == "/v1/messages":
            return {"content": [{"type": "text", "text": answer}], "stop_reason": reason}
        choice = {"text": answer} if path == "/v1/completions" else {"message": {"content": answer}}
        steps = [(letter, 0.5 * (letter not in ties)) for letter in answer]
        if path == "/v1/completions":
            choice["logprobs"] = {
                "tokens": [letter for letter, _ in steps],
                "top_logprobs": [{letter: -1.0, "other": -1.0 - margin} for letter, margin in steps],
            }
        else:
            choice["logprobs"] = {"content": [
                {"token": letter, "top_logprobs": [{"logprob": -1.0}, {"logprob": -1.0 - margin}]}
                for letter, margin in steps
            ]}  # fmt: skip
        return {"choices": [{**choice, "finish_reason": reason}]}

    def events(path: str) -> list[str]:
        if path == "/v1/messages":
            steps = [
                {"type": "content_block_delta", "delta": {"type": "text_delta", "text": letter}} for letter in answer
            ]
            steps.append({"type": "message_delta", "delta": {"stop_reason": reason}})
            last = json.dumps({"type": "message_stop"})
        else:
            content = (
                (lambda letter: {"text": letter})
                if path == "/v1/completions"
                else (lambda letter: {"delta": {"content": letter}})
            )
            steps = [{"choices": [{**content(letter), "finish_reason": None}]} for letter in answer]
            steps.append({"choices": [{**content(""), "finish_reason": reason}]})
            last = "[DONE]"
        tail = [json.dumps({"error": {"message": error}})] if error else [] if cut else [last]
        return [*map(json.dumps, steps), *tail]

    def reply(request: httpx.Request) -> httpx.Response:
        path, body = request.url.path, json.loads(request.content)
        if body["stream"]:
            return httpx.Response(200, text="".join(f"data: {event}\n\n" for event in events(path)))
        if error or cut:
            return httpx.Response(500, json={"error": {"message": error or "gone"}})
        return httpx.Response(200, json=whole(path))

    return reply


def chaos_of(answer, learnt=None, turns: int = 30) -> chaos_load.Load:
    """What the load finds at a server after it has learnt from a right one."""

    async def both() -> chaos_load.Load:
        load, left = chaos_load.Load(ASKS, 1), iter(range(2 * turns))
        async with httpx.AsyncClient(base_url="http://x", transport=httpx.MockTransport(learnt or server())) as http:
            await load.learn(http)
        async with httpx.AsyncClient(base_url="http://x", transport=httpx.MockTransport(answer)) as http:
            await load.client(http, 0, lambda: next(left, None) is not None)
        return load

    return asyncio.run(both())


def test_the_load_of_chaos_covers_every_endpoint_in_both_ways() -> None:
    kinds = {(ask.path, ask.stream) for ask in ASKS}
    assert len(kinds) == 6
    assert all(ask.body["temperature"] == 0 for ask in ASKS)
    assert chaos_load.make_asks("m", 3) == ASKS


@pytest.mark.parametrize(
    ("answer", "verdicts"),
    [
        (server(), {"finished"}),
        (server("wrong"), {"false finish"}),
        (server("rig", "length"), {"false finish"}),
        (server(reason="stop"), {"false finish"}),
        (server("ri", cut=True), {"broken connection", "typed error"}),
        (server("ri", error="engine lost"), {"typed error"}),
    ],
)
def test_every_exchange_under_chaos_is_judged(answer, verdicts: set[str]) -> None:
    load = chaos_of(answer)
    assert set(load.verdicts) == verdicts
    assert (load.lost > 0) == ("false finish" in verdicts)
    assert len(load.details) == load.lost


@pytest.mark.parametrize(
    ("answer", "verdicts"),
    [
        ("rift", {"near tie"}),
        ("right", {"finished"}),
        ("riGht", {"near tie"}),
        ("rigid", {"false finish"}),
        ("bright", {"false finish"}),
        ("", {"false finish"}),
    ],
)
def test_an_answer_may_part_from_the_right_one_at_a_near_tie(answer: str, verdicts: set[str]) -> None:
    load = chaos_of(server(answer), server(ties="g"))
    assert set(load.verdicts) == verdicts


def test_what_is_refused_is_sent_again_and_what_breaks_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chaos_load, "RETRY_S", 0.0)
    turns = iter(range(100))

    def unsteady(request: httpx.Request) -> httpx.Response:
        turn = next(turns)
        if turn % 3 == 0:
            return httpx.Response(503, json={"error": {"message": "not ready"}})
        if turn % 3 == 1:
            raise httpx.ConnectError("refused")
        return server()(request)

    load = chaos_of(unsteady)
    assert set(load.verdicts) == {"refused", "finished"}
    assert load.verdicts["refused"] == pytest.approx(2 * load.verdicts["finished"], abs=2)
    assert load.lost == 0


def test_a_hang_is_a_lost_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chaos_load, "HANG_S", 0.01)

    async def never(_: httpx.Request) -> httpx.Response:
        await asyncio.sleep(60)
        raise AssertionError

    load = chaos_of(never, turns=1)
    assert set(load.verdicts) == {"hang"}
    assert load.details[0].startswith("hang of /v1/")
