"""What the benches of a checkout compute, on made-up measurements and fake contestants."""

import asyncio
import json
import math
import os
from collections.abc import Sequence

import httpx
import numpy as np
import pytest

from tests.bench import english, parity, peers, soak, soak_load
from tests.bench.english import Prompt
from tests.bench.peers import FLOAT32, LLAMA, TRANSFORMERS, ZCCP, Measure
from tests.bench.scoring import Scores, score

ONE, MANY = Measure("prefill", 1, 2048, 1), Measure("streams8", 8, 64, 128)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class FakeContestant:
    """Takes ``second_per_id`` for every id it makes, on a fake clock."""

    def __init__(self, clock: Clock, second_per_id: float, order: list[str], name: str) -> None:
        self.clock, self.cost, self.order, self.name = clock, second_per_id, order, name
        self.asked: list[list[Prompt]] = []

    def answer(self, prompts: Sequence[Prompt], new_tokens: int) -> int:
        self.order.append(self.name)
        self.asked.append(list(prompts))
        self.clock.now_s += self.cost * new_tokens * len(prompts)
        return new_tokens * len(prompts)


def test_contestants_take_turns_on_equal_prompts_and_the_first_round_does_not_count() -> None:
    clock, order = Clock(), []
    contestants = {name: FakeContestant(clock, cost, order, name) for name, cost in ((ZCCP, 0.25), (LLAMA, 0.5))}
    prompts = iter([Prompt([n], str(n)) for n in range(27)])
    speeds = peers.take_turns(contestants, [ONE, MANY], prompts, 2, clock, lambda *_: None)
    assert speeds == {
        ("prefill", ZCCP): [8192.0] * 2,
        ("prefill", LLAMA): [4096.0] * 2,
        ("streams8", ZCCP): [4.0] * 2,
        ("streams8", LLAMA): [2.0] * 2,
    }
    assert order == [ZCCP, LLAMA, ZCCP, LLAMA, LLAMA, ZCCP, LLAMA, ZCCP, ZCCP, LLAMA, ZCCP, LLAMA]
    assert contestants[ZCCP].asked == contestants[LLAMA].asked
    assert [len(asked) for asked in contestants[ZCCP].asked] == [1, 8, 1, 8, 1, 8]
    ids = [prompt.ids for asked in contestants[ZCCP].asked for prompt in asked]
    assert ids == [[n] for n in range(27)], "no prompt comes twice"


def test_ratios_targets_and_what_is_missing() -> None:
    speeds = {
        ("prefill", ZCCP): [8.0, 10.0, 12.0],
        ("prefill", FLOAT32): [4.0, 5.0, 6.0],
        ("prefill", TRANSFORMERS): [2.0, 2.5, 4.0],
    }
    results, missing = peers.compare(speeds, [ONE], fast_isa=True)
    by_name = {result.name: result for result in results}
    ratio = by_name["prefill_vs_transformers"]
    assert (ratio.value, ratio.spread, ratio.target, ratio.met) == (4.0, (3.0, 4.0), 3.0, True)
    worst = by_name["float32_worst_ratio"]
    assert (worst.value, worst.spread, worst.target, worst.met) == (2.0, (1.5, 2.0), 1.0, True)
    assert (by_name["prefill_zccp"].value, by_name["prefill_zccp"].unit) == (204_800.0, "ms")
    assert "prefill_vs_llamacpp: not measured, since llamacpp did not run prefill" in missing
    assert "single_vs_transformers: not measured, since zccp did not run single" in missing


def test_without_int8_products_ratios_are_reported() -> None:
    speeds = {("single", ZCCP): [2.0], ("single", TRANSFORMERS): [4.0]}
    results, missing = peers.compare(speeds, [Measure("single", 1, 64, 128)], fast_isa=False)
    assert next((r.name, r.value, r.met) for r in results) == ("single_vs_transformers", 0.5, None)
    assert missing[-1] == "this CPU has neither AMX-int8 nor VNNI: ratios are reported without targets"
    assert any(note.startswith("float32_worst_ratio: not measured") for note in missing)


def test_pinning_is_undone() -> None:
    before = os.sched_getaffinity(0)
    with peers.pinned(1) as cores:
        assert cores == len(os.sched_getaffinity(0)) == 1
    assert os.sched_getaffinity(0) == before


def test_following_the_likeliest_ids_with_ties() -> None:
    logits = np.array([[0.0, 5.0, 1.0], [3.0, 3.0005, 0.0], [3.0, 3.002, 0.0]], np.float32)
    assert parity.follows(logits, [1, 1, 1])
    assert parity.follows(logits, [1, 0, 1]), "closer than the tie"
    assert not parity.follows(logits, [1, 1, 0]), "further apart than the tie"
    assert not parity.follows(logits, [1, 2, 1]), "not among the two likeliest"


def test_scores_of_uniform_and_certain_logits() -> None:
    flat = score(np.zeros((3, 4), np.float32), [0, 1, 2])
    assert (flat.loss, flat.predicted) == (pytest.approx(2 * math.log(4)), 2)
    sure = np.full((2, 4), -100.0, np.float32)
    sure[0, 3] = sure[1, 0] = 100.0
    found = score(sure, [1, 3])
    assert (found.loss, found.top.tolist()) == (pytest.approx(0.0), [3, 0])


def test_perplexity_and_agreement_over_windows() -> None:
    theirs = [Scores(10.0, 10, np.array([1, 2])), Scores(30.0, 10, np.array([3, 4]))]
    ours = [Scores(10.0, 10, np.array([1, 2])), Scores(30.2, 10, np.array([3, 0]))]
    assert parity.perplexity_of(theirs) == pytest.approx(math.exp(2))
    assert parity.delta_pct(ours, theirs) == pytest.approx(100 * (math.exp(0.01) - 1))
    assert parity.agreement(ours, theirs) == 0.75


def test_slopes_leave_out_the_time_before() -> None:
    memory = soak.Memory(
        [0.0, 60.0, 120.0, 180.0, 240.0, 300.0, 360.0], {"engine": [9e9] + [n * 2.0**20 for n in range(6)]}
    )
    assert memory.slopes(60.0) == {"engine": pytest.approx(1.0)}
    assert memory.slopes(120.0) == {}, "too few samples"


def test_wrong_requests_have_names_and_refusals() -> None:
    wrong = soak_load.wrong_requests("m")
    assert len({request.name for request in wrong}) == len(wrong)
    assert {request.status for request in wrong} == {400, 404, 405}


async def run_load(answer, kinds: int) -> soak_load.Load:
    load = soak_load.Load("http://x", "m", 1)
    left = iter(range(kinds))
    async with httpx.AsyncClient(base_url="http://x", transport=httpx.MockTransport(answer)) as http:
        await load.client(http, 0, lambda: next(left, None) is not None)
    return load


def right(request: httpx.Request) -> httpx.Response:
    for wrong in soak_load.wrong_requests("m"):
        if (wrong.content, wrong.path, wrong.method) == (request.content, request.url.path, request.method):
            return httpx.Response(wrong.status, json={"error": {"message": "refused"}})
    body = json.loads(request.content)
    assert body["model"] == "m"
    if body.get("stream"):
        return httpx.Response(200, text="data: {}\n\nevent: message_stop\ndata: {}\n\ndata: [DONE]\n\n")
    choices = body.get("n", 1)
    return httpx.Response(200, json={"choices": [{}] * choices, "content": [{}]})


def test_a_right_server_gives_no_unexpected_outcome() -> None:
    load = asyncio.run(run_load(right, 120))
    assert load.unexpected == {}
    assert sum(load.done.values()) == 120
    assert len(load.done) == 9, "every kind came"


def test_a_broken_server_is_counted_by_kind() -> None:
    load = asyncio.run(run_load(lambda _: httpx.Response(500, text="no"), 60))
    assert sum(load.unexpected.values()) == 60
    assert "chat, stream: status 500 no" in load.unexpected
    assert any("status 500, not 4" in kind for kind in load.unexpected)


def test_a_cut_stream_is_unexpected() -> None:
    load = asyncio.run(run_load(lambda _: httpx.Response(200, text="data: {}\n\n"), 60))
    assert load.unexpected["messages, stream: the stream ended without its last event"] > 0


class WordCodec:
    """One id a character."""

    def encode(self, text: str, *, parse_special: bool) -> list[int]:
        assert not parse_special
        return [ord(character) for character in text]

    def decoder(self, prompt_ids: Sequence[int] = ()) -> "WordCodec":
        return self

    def push(self, token: int) -> str:
        return chr(token)

    def flush(self) -> str:
        return ""


def test_fresh_prompts_are_cut_one_after_the_other() -> None:
    prompts = list(english.fresh_prompts(WordCodec(), "abcdefg", [2, 3]))
    assert [(prompt.text, len(prompt.ids)) for prompt in prompts] == [("ab", 2), ("cde", 3)]
    with pytest.raises(english.BenchUseError, match="the text has 7 ids; the prompts of this run need 8"):
        list(english.fresh_prompts(WordCodec(), "abcdefg", [8]))


def test_windows_need_enough_text() -> None:
    assert english.windows_of(WordCodec(), "abcdef", 2, 2) == [[97, 98], [99, 100]]
    with pytest.raises(english.BenchUseError, match="the text has 6 ids; 4 windows of 2 need 8"):
        english.windows_of(WordCodec(), "abcdef", 4, 2)


def test_a_missing_text_is_named(tmp_path) -> None:
    with pytest.raises(english.BenchUseError, match="name a text file in UTF-8"):
        english.text_of(tmp_path / "none.txt")
