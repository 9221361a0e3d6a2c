"""Admission with predictions: fewer preemptions when they are good, nothing lost when they are absurd."""

import math
import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.buckets import Lattice
from planner.pages import PagePool
from planner.schedule import Scheduler
from planner.schedule_values import SchedulerSettings
from planner.sequence import FinishReason, Sampling, Sequence, Status

STOP = 0
ABSURD = [None, math.nan, math.inf, -math.inf, -1e308, 1e308, -5.0, 0.0, 1.0]


@dataclass(frozen=True, slots=True)
class Request:
    """One request: when it comes, how long it is and will get, and what is predicted."""

    arrival: int
    prompt: int
    completion: int
    max_tokens: int
    expected: float | None = None
    choices: int = 1


@dataclass(slots=True)
class Outcome:
    """What a run took."""

    sequences: list[Sequence]
    steps: int = 0
    preemptions: int = 0
    prompt_ids: int = 0
    refusals: int = 0


def serve(
    requests: list[Request], num_pages: int, page_size: int = 16, slots: int = 32, *, check: bool = True, **bounds: int
) -> Outcome:
    """Serve requests to the end, the ids of a step committed one step late; ``check`` every invariant at every step."""
    lattice = Lattice(decode_slots=(slots,), prefill_chunks=(256,), prefill_slots=4, widths=(num_pages,))
    pool = PagePool(num_pages, page_size)
    scheduler = Scheduler(lattice, pool, SchedulerSettings(prefill_budget=256, **bounds))
    outcome, pending, wanted = Outcome([]), sorted(requests, key=lambda r: r.arrival)[::-1], dict[int, int]()
    unread: list[Sequence] = []
    most = 10 * sum(r.choices * (r.prompt + r.max_tokens + 8) for r in requests) + max(r.arrival for r in requests)
    while pending or scheduler.num_live or unread:
        while pending and pending[-1].arrival <= outcome.steps:
            request = pending.pop()
            sampling = Sampling(request.max_tokens, stop_ids=frozenset({STOP}))
            choices = [
                Sequence(
                    len(wanted) + i, "r", "t", [len(wanted)] + [1] * (request.prompt - 1), request.prompt, sampling, 0.0
                )
                for i in range(request.choices)
            ]
            for choice in choices:
                choice.expected_len = request.expected
                wanted[choice.key] = request.completion
            if scheduler.submit(choices) is None:
                outcome.sequences += choices
            else:
                outcome.refusals += 1
        batch = scheduler.next_batch(float(outcome.steps))
        if check:
            scheduler.check()
        assert batch or unread or not scheduler.num_live, "somebody waits and nothing can run"
        outcome.preemptions += batch.preempted
        outcome.prompt_ids += sum(chunk.count for chunk in batch.prefill)
        old, unread = unread, [*batch.decode, *(chunk.sequence for chunk in batch.prefill if chunk.samples)]
        scheduler.commit(old, [STOP if s.completion_len >= wanted[s.key] else 1 for s in old], float(outcome.steps))
        outcome.steps += 1
        assert outcome.steps < most, f"{scheduler.num_live} sequences do not come to an end"
    assert pool.num_free == num_pages
    for sequence in outcome.sequences:
        assert sequence.status is Status.FINISHED
        assert sequence.completion_len == min(wanted[sequence.key], sequence.sampling.max_tokens)
        assert sequence.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
    return outcome


def test_good_predictions_save_preemptions_and_cost_no_time() -> None:
    """Half of the answers are short and half long. Three policies: no prediction, one quantile for all, the truth."""
    rng, arrival, requests = random.Random(1), 0.0, []
    for _ in range(90):
        arrival += rng.expovariate(0.1)
        completion = rng.gauss(20, 3) if rng.random() < 0.5 else rng.gauss(200, 20)
        requests.append((int(arrival), rng.randint(7, 70), max(1, int(completion))))
    quantile = float(sorted(c for _, _, c in requests)[72])
    blind, same, good = (
        serve(
            [Request(a, p, c, 600, predicted(c)) for a, p, c in requests], 344, page_size=4, chunk_align=4, check=False
        )
        for predicted in (lambda _: None, lambda _: quantile, float)
    )
    assert blind.preemptions > 60
    assert same.preemptions < 0.5 * blind.preemptions
    assert good.preemptions < 0.5 * blind.preemptions
    assert good.prompt_ids < 0.8 * blind.prompt_ids
    assert good.steps < 1.05 * blind.steps


def test_long_prompts_are_computed_once() -> None:
    """Where a preemption is expensive, exact predictions all but end it."""
    rng = random.Random(3)
    requests = [(40 * i, rng.randint(750, 1250), rng.randint(250, 350)) for i in range(40)]
    blind, good = (
        serve([Request(a, p, c, 700, known(c)) for a, p, c in requests], num_pages=512, check=False)
        for known in (lambda _: None, float)
    )
    assert blind.preemptions >= 10
    assert good.preemptions <= 1
    assert good.steps < 1.05 * blind.steps


a_request = st.builds(
    Request,
    arrival=st.integers(0, 60),
    prompt=st.integers(1, 60),
    completion=st.integers(0, 60),
    max_tokens=st.integers(1, 60),
    expected=st.sampled_from(ABSURD) | st.floats(),
    choices=st.integers(1, 3),
)


@settings(max_examples=60)
@given(st.lists(a_request, min_size=1, max_size=12), st.integers(8, 30))
def test_nothing_is_lost_whatever_is_predicted(requests: list[Request], num_pages: int) -> None:
    outcome = serve(requests, num_pages=num_pages, slots=4)
    assert outcome.refusals == 0


@pytest.mark.parametrize("expected", ABSURD)
def test_everybody_is_served_if_all_predictions_are_the_same_nonsense(expected: float | None) -> None:
    outcome = serve([Request(i, 30, 40, 200, expected) for i in range(40)], num_pages=32, slots=8, max_overtakes=2)
    assert (outcome.refusals, len(outcome.sequences)) == (0, 40)


def test_a_first_sequence_enters_whatever_is_predicted() -> None:
    outcome = serve([Request(0, 100, 5, 5000, math.inf)], num_pages=16)
    assert outcome.sequences[0].first_scheduled_s == 0.0


class Held:
    """One sequence runs and has used 16 of 32 pages; another asks, which the prediction says does not fit."""

    def __init__(self, deadline_s: float | None = None, **bounds: int) -> None:
        lattice = Lattice(decode_slots=(8,), prefill_chunks=(256,), prefill_slots=4, widths=(32,))
        self.scheduler = Scheduler(lattice, PagePool(32, 16), SchedulerSettings(prefill_budget=256, **bounds))
        self.made = 0
        self.unread: list[Sequence] = []
        self.add(length=250)
        self.step(0.0)
        self.asks = self.add(length=100, deadline_s=deadline_s)

    def add(self, length: int, deadline_s: float | None = None, expected: float | None = 300.0) -> Sequence:
        self.made += 1
        sequence = Sequence(
            self.made, "r", "t", [self.made] + [1] * (length - 1), length, Sampling(400), 0.0, deadline_s
        )
        sequence.expected_len = expected
        assert self.scheduler.submit([sequence]) is None
        return sequence

    def step(self, now_s: float) -> None:
        batch = self.scheduler.next_batch(now_s)
        old, self.unread = self.unread, [*batch.decode, *(c.sequence for c in batch.prefill if c.samples)]
        self.scheduler.commit(old, [1] * len(old), now_s)
        self.scheduler.check()

    def enters(self, now_s: float = 1.0) -> bool:
        self.step(now_s)
        return self.asks.status is Status.RUNNING


def test_a_prediction_holds_back_what_will_not_fit() -> None:
    held = Held()
    assert not held.enters()
    held.scheduler.cancel(1)
    assert held.enters()


def test_without_a_prediction_of_its_own_nobody_is_held_back() -> None:
    held = Held()
    held.asks.expected_len = None
    assert held.enters()


def test_advice_is_set_aside_when_half_of_a_deadline_has_passed() -> None:
    held = Held(deadline_s=10.0)
    assert not held.enters(now_s=5.0)
    assert held.enters(now_s=5.5)


@pytest.mark.parametrize("bounds", [{"max_waiting": 5}, {"max_waiting_tokens": 1000}])
def test_advice_is_set_aside_when_half_of_the_queue_is_full(bounds: dict[str, int]) -> None:
    held = Held(**bounds)
    held.add(length=200)
    assert not held.enters()
    held.add(length=250)
    assert held.enters()
