"""Answers that are kept: given again to the same request and to no other, as they came, until they are forgotten."""

import asyncio
import re
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from api.ports import Finished, GenerationRequest, SamplingParams, Tenant, TokenLogprob, Tokens
from appliance.reuse.answers import KeptAnswers, Marks, is_repeatable, key_of
from appliance.telemetry import Metrics
from tests.support.api_rig import CHAT, MESSAGES, TEXT, Rig, chat, message, prompt
from tests.support.scripted_engine import ScriptedEngine, Step, say

GREEDY = SamplingParams(max_tokens=8, temperature=0)


def asked(*ids: int, tenant: str = "t", choices: int = 1, sampling: SamplingParams = GREEDY) -> GenerationRequest:
    return GenerationRequest(
        request_id="r", model="m", tenant=tenant, prompt_ids=array("i", ids), sampling=sampling, num_choices=choices
    )


class Kept:
    """A cache over a scripted engine, with a clock that a test turns."""

    def __init__(self, folder: Path, engine: ScriptedEngine, most_bytes: int = 1 << 20) -> None:
        self.now_s, self.engine = 0.0, engine
        self.registry = CollectorRegistry()
        counted = Metrics(self.registry).answers
        self.answers = KeptAnswers(most_bytes, 60.0, Marks(folder), lambda: self.now_s, counted)
        self.generator = self.answers.over(engine)

    def ask(self, request: GenerationRequest) -> list[Tokens | Finished]:
        async def run() -> list[Tokens | Finished]:
            return [event async for event in await self.generator.submit(request)]

        return asyncio.run(run())

    def counts(self) -> dict[str, float]:
        found = {
            name: self.registry.get_sample_value("zccp_answers_total", {"result": name})
            for name in ("hit", "miss", "no")
        }
        return {name: value for name, value in found.items() if value}


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    return Kept(tmp_path / "marks", ScriptedEngine(say("Paris")))


def texts(events: Sequence[Tokens | Finished]) -> list[Tokens]:
    return [event for event in events if isinstance(event, Tokens)]


def test_the_same_request_is_answered_without_the_engine(kept: Kept) -> None:
    first, second = kept.ask(asked(1, 2)), kept.ask(asked(1, 2))
    assert texts(first) == texts(second) != []
    assert second[-1] == Finished(0, first[-1].reason, first[-1].stop_token_id, cached_tokens=2)  # type: ignore[union-attr]
    assert len(kept.engine.requests) == 1
    assert kept.counts() == {"hit": 1, "miss": 1}


@pytest.mark.parametrize(
    "other",
    [
        asked(1, 2, tenant="u"),
        asked(1, 3),
        asked(1, 2, 0),
        asked(1),
        asked(1, 2, choices=2),
        asked(1, 2, sampling=SamplingParams(max_tokens=9, temperature=0)),
        asked(1, 2, sampling=SamplingParams(max_tokens=8, temperature=0, top_logprobs=0)),
        asked(1, 2, sampling=SamplingParams(max_tokens=8, temperature=0, seed=1)),
        asked(1, 2, sampling=SamplingParams(max_tokens=8, temperature=0, stop_token_ids=(7,))),
        asked(1, 2, sampling=SamplingParams(max_tokens=8, temperature=0, logit_bias=((7, 1.0),))),
    ],
)
def test_what_differs_in_anything_is_asked_of_the_engine(kept: Kept, other: GenerationRequest) -> None:
    kept.ask(asked(1, 2))
    kept.ask(other)
    assert len(kept.engine.requests) == 2


@given(
    st.lists(st.integers(0, 2**31 - 1), max_size=4),
    st.lists(st.integers(0, 2**31 - 1), max_size=4),
    st.text(),
    st.text(),
)
def test_digests_are_equal_only_for_equal_requests(one: list[int], two: list[int], a: str, b: str) -> None:
    same = one == two and a == b
    assert (key_of(asked(*one, tenant=a)) == key_of(asked(*two, tenant=b))) == same


def test_a_list_of_ids_is_the_same_prompt_as_an_array(kept: Kept) -> None:
    request = asked(1, 2)
    listed = GenerationRequest(
        request_id="r", model="m", tenant="t", prompt_ids=[1, 2], sampling=GREEDY, traceparent="x", whole=True
    )
    assert key_of(request) == key_of(listed)


def test_only_what_must_be_the_same_again_is_kept(kept: Kept) -> None:
    free, seeded = SamplingParams(max_tokens=8), SamplingParams(max_tokens=8, seed=0)
    assert not is_repeatable(asked(1, sampling=free))
    assert is_repeatable(asked(1, sampling=seeded))
    for sampling in (free, free, seeded, seeded):
        kept.ask(asked(1, sampling=sampling))
    assert len(kept.engine.requests) == 3
    assert kept.counts() == {"no": 2, "miss": 1, "hit": 1}


@pytest.mark.parametrize(
    "end", [Finished(0, "error", error="x"), Finished(0, "cancelled", error="x"), RuntimeError("x")]
)
def test_an_answer_that_failed_is_not_kept(tmp_path: Path, end: Step) -> None:
    kept = Kept(tmp_path, ScriptedEngine(lambda _: [Tokens(0, (65,)), end]))
    for _ in range(2):
        try:
            kept.ask(asked(1))
        except RuntimeError:
            continue
    assert len(kept.engine.requests) == 2
    assert len(kept.answers) == 0


def test_one_choice_of_two_that_failed_is_no_answer(tmp_path: Path) -> None:
    steps: list[Step] = [Tokens(0, (65,)), Finished(0, "stop"), Tokens(1, (66,)), Finished(1, "error", error="x")]
    kept = Kept(tmp_path, ScriptedEngine(lambda _: steps))
    kept.ask(asked(1, choices=2))
    assert len(kept.answers) == 0


def test_an_answer_that_was_given_up_is_not_kept(tmp_path: Path) -> None:
    kept = Kept(tmp_path, ScriptedEngine(lambda _: [Tokens(0, (65,)), 60.0, Finished(0, "length")]))

    async def leave() -> None:
        generation = await kept.generator.submit(asked(1))
        assert await anext(aiter(generation)) == Tokens(0, (65,))
        generation.cancel()
        assert not any(isinstance(event, Tokens) for event in [event async for event in generation])

    asyncio.run(leave())
    assert kept.engine.cancels == [[None]]
    assert len(kept.answers) == 0


def test_log_probabilities_and_all_choices_come_again(tmp_path: Path) -> None:
    entries = (TokenLogprob(65, -0.5, ((66, -1.5),)),)
    steps: list[Step] = [
        Tokens(1, (66,)), Tokens(0, (65,), entries), Finished(1, "stop", 257), Finished(0, "length", None, 1),
    ]  # fmt: skip
    kept = Kept(tmp_path, ScriptedEngine(lambda _: steps))
    kept.ask(asked(1, 2, choices=2))
    assert kept.ask(asked(1, 2, choices=2)) == [
        Tokens(1, (66,)), Tokens(0, (65,), entries), Finished(1, "stop", 257), Finished(0, "length", cached_tokens=2),
    ]  # fmt: skip


def test_a_choice_that_is_given_up_gives_no_more_and_ends(tmp_path: Path) -> None:
    steps: list[Step] = [Tokens(0, (65,)), Tokens(1, (66,)), Tokens(0, (67,)), Finished(0, "stop"), Finished(1, "stop")]
    kept = Kept(tmp_path, ScriptedEngine(lambda _: steps))
    kept.ask(asked(1, choices=2))

    async def stop_one() -> list[Any]:
        generation = await kept.generator.submit(asked(1, choices=2))
        seen: list[Any] = [await anext(aiter(generation))]
        generation.cancel(0)
        return [*seen, *[event async for event in generation]]

    assert asyncio.run(stop_one()) == [
        Tokens(0, (65,)), Tokens(1, (66,)), Finished(0, "cancelled", cached_tokens=1), Finished(1, "stop"),
    ]  # fmt: skip


def test_answers_grow_old(kept: Kept) -> None:
    kept.ask(asked(1))
    kept.now_s = 59.9
    kept.ask(asked(1))
    assert len(kept.engine.requests) == 1
    kept.now_s = 60.0
    kept.ask(asked(1))
    assert len(kept.engine.requests) == 2


def test_memory_is_bounded_and_what_was_used_longest_ago_goes_first(tmp_path: Path) -> None:
    kept = Kept(tmp_path, ScriptedEngine(say("x")), most_bytes=2200)
    for first in (1, 2, 3, 1, 4, 1, 2):
        kept.ask(asked(first))
        assert kept.answers.num_bytes <= 2200
    assert [request.prompt_ids[0] for request in kept.engine.requests] == [1, 2, 3, 4, 2]
    small = Kept(tmp_path, ScriptedEngine(say("x")), most_bytes=100)
    small.ask(asked(1))
    assert (len(small.answers), small.answers.num_bytes) == (0, 0)


def test_what_a_tenant_forgets_no_worker_gives_again(tmp_path: Path) -> None:
    one, other = (Kept(tmp_path / "marks", ScriptedEngine(say("x"))) for _ in range(2))
    for kept in (one, other):
        kept.ask(asked(1))
        kept.ask(asked(1, tenant="u"))
    one.answers.forget("t")
    for kept in (one, other):
        kept.ask(asked(1))
        kept.ask(asked(1, tenant="u"))
        assert [request.tenant for request in kept.engine.requests] == ["t", "u", "t"]


def test_an_answer_that_was_under_way_is_forgotten_as_well(tmp_path: Path) -> None:
    gate = asyncio.Event()
    kept = Kept(tmp_path, ScriptedEngine(lambda _: [Tokens(0, (65,)), gate, Finished(0, "stop")]))

    async def run() -> None:
        generation = await kept.generator.submit(asked(1))
        await anext(aiter(generation))
        kept.answers.forget("t")
        gate.set()
        assert [event async for event in generation] == [Finished(0, "stop")]

    asyncio.run(run())
    kept.ask(asked(1))
    assert len(kept.engine.requests) == 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [(CHAT, chat), (TEXT, prompt), (MESSAGES, message)],
    ids=["chat", "text", "messages"],
)
def test_clients_get_the_same_text_again_and_are_charged_for_it(
    tmp_path: Path, path: str, body: Any, stream: bool
) -> None:
    kept = Kept(tmp_path, ScriptedEngine(say("Hello there")))
    tenant = Tenant(name="t", key_id="k1", requests_per_minute=99, tokens_per_minute=9999)
    rig = Rig(kept.engine, keys={b"k": tenant}, over=kept.answers.over, answers=kept.answers)
    replies = [rig.post(path, body(stream=stream, temperature=0), {"x-api-key": b"k"}) for _ in range(2)]
    charged = rig.quota.tokens["k1"]
    assert len(kept.engine.requests) == 1
    assert [reply.status for reply in replies] == [200, 200]
    for reply in replies:
        pieces = re.findall(rb'"(?:content|text)":"(.*?)"', b"".join(reply.chunks))
        assert b"".join(pieces) == b"Hello there"
    one, two = (record.completion_tokens for record in rig.observer.records)
    assert one == two > 0
    assert charged == 2 * (rig.observer.records[0].prompt_tokens + one)
    assert rig.observer.records[1].cached_tokens == rig.observer.records[1].prompt_tokens
    assert rig.post("/v1/answers/forget", b"").status == 401
    assert rig.post("/v1/answers/forget", b"", {"x-api-key": b"k"}).json() == {
        "kept": True,
        "object": "answers.forgotten",
    }
    rig.post(path, body(stream=stream, temperature=0), {"x-api-key": b"k"})
    assert len(kept.engine.requests) == 2


def test_forgetting_where_nothing_is_kept_is_no_error() -> None:
    assert Rig().post("/v1/answers/forget", b"").json() == {"kept": False, "object": "answers.forgotten"}
