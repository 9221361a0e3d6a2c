"""Decisions of the scheduler, step by step; the ids are made up by the test."""

import pytest

from planner.buckets import Lattice
from planner.pages import PagePool
from planner.schedule import Scheduler
from planner.schedule_values import Batch, SchedulerSettings
from planner.sequence import FinishReason, Sampling, Sequence, Status

LATTICE = Lattice(decode_slots=(2, 4, 8), prefill_chunks=(16, 64), prefill_slots=3, widths=(4, 64))


class Bench:
    """A scheduler whose steps are committed one step late, as the engine does it."""

    def __init__(self, num_pages: int = 64, lattice: Lattice = LATTICE, **bounds: int) -> None:
        self.scheduler = Scheduler(
            lattice, PagePool(num_pages, 16), SchedulerSettings(**{"prefill_budget": 64, **bounds})
        )
        self.unread: list[Sequence] = []
        self.made = 0
        self.now_s = 0.0

    def sequence(self, length: int, max_tokens: int = 10, tenant: str = "t", **sampling: object) -> Sequence:
        self.made += 1
        ids = [self.made] + [1] * (length - 1)  # no two begin alike
        return Sequence(self.made, f"r{self.made}", tenant, ids, length, Sampling(max_tokens, **sampling), self.now_s)  # type: ignore[arg-type]

    def submit(self, length: int, max_tokens: int = 10, tenant: str = "t", **sampling: object) -> Sequence:
        sequence = self.sequence(length, max_tokens, tenant, **sampling)
        assert self.scheduler.submit([sequence]) is None
        return sequence

    def step(self, new_id: int = 7) -> Batch:
        batch = self.scheduler.next_batch(self.now_s)
        self.scheduler.check()
        self.scheduler.commit(self.unread, [new_id] * len(self.unread), self.now_s)
        self.scheduler.check()
        self.unread = [*batch.decode, *(chunk.sequence for chunk in batch.prefill if chunk.samples)]
        self.now_s += 1.0
        return batch

    def until_empty(self, most: int = 1000) -> int:
        for steps in range(most):
            if not self.scheduler.num_live and not self.unread:
                assert self.scheduler.pool.num_free == self.scheduler.pool.num_pages
                return steps
            self.step()
        raise AssertionError(f"still {self.scheduler.num_live} after {most} steps")


def chunks(batch: Batch) -> list[tuple[int, int, int, bool]]:
    return [(chunk.sequence.key, chunk.start, chunk.count, chunk.samples) for chunk in batch.prefill]


def test_a_sequence_from_submit_to_length():
    bench = Bench()
    sequence = bench.submit(20, 3)
    assert (sequence.status, bench.scheduler.num_waiting, bench.scheduler.num_waiting_tokens) == (Status.WAITING, 1, 20)
    batch = bench.step()
    assert batch.entered == [sequence]
    assert (chunks(batch), batch.decode) == ([(1, 0, 20, True)], [])
    assert (sequence.slot, sequence.pages, sequence.computed, sequence.in_flight) == (0, [0, 1], 20, 1)
    assert bench.step().decode == [sequence]
    assert sequence.ids[20:] == [7]
    assert bench.step().decode == [sequence]
    batch = bench.step()
    assert not batch
    assert (sequence.finish_reason, sequence.ids[20:]) == (FinishReason.LENGTH, [7, 7, 7])
    assert bench.scheduler.take_finished() == [sequence]
    assert bench.scheduler.take_finished() == []
    assert bench.until_empty() == 0


def test_stop_id_frees_everything_at_commit_and_drops_the_wasted_row():
    bench = Bench()
    sequence = bench.submit(5, 10, stop_ids=frozenset({7}))
    bench.step()
    assert bench.step().decode == [sequence]  # dispatched before the stop id is read
    assert (sequence.finish_reason, sequence.stop_id, sequence.completion_len) == (FinishReason.STOP, 7, 0)
    assert bench.scheduler.pool.num_free == 64
    bench.step(new_id=8)
    assert (sequence.ids, sequence.in_flight) == ([1] * 5, 0)
    assert bench.scheduler.take_finished() == [sequence]


def test_lowest_slot_first():
    bench = Bench()
    sequences = [bench.submit(4) for _ in range(4)]
    bench.step()
    bench.step()
    assert [s.slot for s in sequences] == [0, 1, 2, 3]
    bench.scheduler.cancel(sequences[1].key)
    bench.scheduler.cancel(sequences[2].key)
    late = bench.submit(4)
    bench.step()
    assert late.slot == 1


def test_decode_rows_come_before_prompt_ids_in_the_budget():
    bench = Bench(prefill_budget=40)
    for _ in range(3):
        bench.submit(4, 50)
    bench.step()
    assert len(bench.step().decode) == 3
    bench.submit(200)
    batch = bench.step()
    assert len(batch.decode) == 3
    assert chunks(batch) == [(4, 0, 32, False)]  # 37 of 40 are left, rounded down to the alignment


def test_a_budget_full_of_decode_rows_still_moves_prompts():
    bench = Bench(prefill_budget=2)
    for _ in range(3):
        bench.submit(4, 50)
    bench.step()
    bench.submit(40)
    assert [chunks(bench.step()) for _ in range(3)] == [[(4, 0, 16, False)], [(4, 16, 16, False)], [(4, 32, 8, True)]]


def test_a_short_prompt_behind_a_long_one_starts_at_once():
    bench = Bench()
    bench.submit(400)
    bench.step()
    bench.submit(20)
    assert chunks(bench.step()) == [(1, 64, 32, False), (2, 0, 20, True)]


def test_a_long_prompt_moves_on_under_a_stream_of_short_ones():
    bench = Bench()
    long = bench.submit(400, 1)
    steps = 0
    while long.finish_reason is None:
        bench.submit(20, 1)
        bench.step()
        steps += 1
        assert steps <= 2 * 400 / 64 + 2


def test_prefill_rows_are_bounded():
    bench = Bench()
    for _ in range(6):
        bench.submit(3)
    assert [len(bench.step().prefill) for _ in range(3)] == [3, 3, 0]


def test_the_newest_is_preempted_and_resumed_behind_nobody():
    bench = Bench(num_pages=5)
    old = bench.submit(15, 40)
    new = bench.submit(30, 30)
    bench.step()
    assert (old.status, new.status) == (Status.RUNNING, Status.RUNNING)
    while not new.preemptions:
        bench.step()
    assert (len(old.pages), bench.scheduler.pool.num_free) == (3, 2)
    assert (new.status, new.pages, new.slot, old.preemptions) == (Status.WAITING, [], -1, 0)
    late = bench.submit(3, 3)
    bench.until_empty()
    assert (old.completion_len, new.completion_len, late.completion_len) == (40, 30, 3)
    assert new.preemptions == 1


def test_pages_of_those_whose_last_id_is_in_flight_are_taken_first():
    bench = Bench(num_pages=8)
    old, ending, new = bench.submit(16, 20), bench.submit(5, 1), bench.submit(5, 20)
    bench.step()
    pool = bench.scheduler.pool
    others = pool.take(pool.num_free)
    batch = bench.scheduler.next_batch(1.0)
    assert (batch.decode, batch.grown, batch.preempted) == ([old, new], [old], 0)
    assert (ending.pages, ending.status, len(old.pages)) == ([], Status.RUNNING, 2)
    bench.scheduler.commit([old, ending, new], [7, 7, 7], 1.0)
    assert ending.finish_reason is FinishReason.LENGTH
    pool.give_back(others)
    bench.unread = batch.decode
    bench.until_empty()


def test_a_preempted_one_is_not_resumed_before_its_id_in_flight_has_come():
    bench = Bench(num_pages=40, lattice=Lattice((8,), (256,), 4, (64,)), prefill_budget=256)
    old, other, large, small = (bench.submit(length, 40) for length in (16, 16, 150, 1))
    sampled = [chunk.sequence for chunk in bench.scheduler.next_batch(0.0).prefill]
    assert sampled == [old, other, large, small]
    pool = bench.scheduler.pool
    others = pool.take(pool.num_free)
    batch = bench.scheduler.next_batch(1.0)  # both old ones need a page: the small one goes, then the large one
    assert (batch.decode, batch.preempted, pool.num_free) == ([old, other], 2, 9)
    assert (batch.entered, small.in_flight) == ([], 1)  # there would be room
    bench.scheduler.commit(sampled, [7] * 4, 1.0)
    assert (small.ids, small.in_flight) == ([small.key, 7], 0)
    assert bench.scheduler.next_batch(2.0).entered == [small]
    pool.give_back(others)
    bench.scheduler.commit([*batch.decode, old, other, small], [7] * 5, 2.0)
    bench.scheduler.check()
    bench.until_empty()
    assert [s.completion_len for s in (old, other, large, small)] == [40] * 4


def test_admission_keeps_a_page_for_everybody_who_may_grow():
    bench = Bench(num_pages=4)
    grows = bench.submit(16, 40)
    bench.step()
    late = bench.submit(48, 4)
    bench.step()
    assert (bench.scheduler.pool.num_free, late.status) == (2, Status.WAITING)
    bench.scheduler.cancel(late.key)
    late = bench.submit(16, 1)
    bench.step()
    assert (bench.scheduler.pool.num_free, late.status) == (1, Status.RUNNING)
    late = bench.submit(16, 1)
    bench.step()
    assert late.status is Status.WAITING  # the last page is for the first one's growth
    bench.until_empty()
    assert grows.preemptions == 0


def crowded(**bounds: int) -> tuple[Bench, Sequence, list[Sequence]]:
    """Three of five pages run, one of nineteen waits, then twenty of one page come."""
    bench = Bench(num_pages=22, **bounds)
    for _ in range(3):
        bench.submit(60, 20)
    bench.step()
    return bench, bench.submit(290, 10), [bench.submit(10, 3) for _ in range(20)]


def test_small_ones_pass_one_that_does_not_fit():
    bench, large, small = crowded()
    for _ in range(18):
        bench.step()
    assert large.status is Status.WAITING
    assert sum(s.status is Status.FINISHED for s in small) >= 15
    bench.until_empty()
    assert large.completion_len == 10


def test_one_that_does_not_fit_is_passed_a_bounded_number_of_times():
    bench, large, small = crowded(max_overtakes=5)
    for _ in range(18):
        bench.step()
    assert large.status is Status.WAITING
    assert sum(s.status is Status.FINISHED for s in small) == 5
    steps = 0
    while large.first_scheduled_s is None:
        bench.submit(10, 3)  # a steady flow of small ones
        bench.step()
        steps += 1
        assert steps < 15
    bench.until_empty()
    assert (large.completion_len, large.preemptions) == (10, 0)


def test_a_blocked_one_that_is_cancelled_blocks_nobody():
    bench = Bench(num_pages=16, max_overtakes=0)
    bench.submit(60, 40)
    bench.step()
    large = bench.submit(250, 5)
    small = bench.submit(10, 3)
    bench.step()
    assert small.status is Status.WAITING
    bench.scheduler.cancel(large.key)
    bench.step()
    assert small.status is Status.RUNNING
    bench.until_empty()


def test_tenants_share_the_slots_by_tokens():
    bench = Bench(lattice=Lattice((2,), (64,), 2, (4,)))
    greedy = [bench.submit(30, 5, tenant="greedy") for _ in range(20)]
    bench.step()
    modest = [bench.submit(30, 5, tenant="modest") for _ in range(5)]
    while any(s.finish_reason is None for s in modest):
        bench.step()
    done = sum(s.finish_reason is not None for s in greedy)
    assert 4 <= done <= 9  # not after all twenty
    bench.until_empty()


def test_overload_bounds():
    bench = Bench(max_waiting=2, max_waiting_tokens=100)
    assert bench.scheduler.submit([bench.sequence(10) for _ in range(5)]) is None  # alone, any request is taken
    refusal = bench.scheduler.submit([bench.sequence(1)], tokens_per_s=25.0)
    assert refusal is not None
    assert (refusal.kind, refusal.retry_after_s) == ("overloaded", 2.0)
    assert refusal.message == "5 sequences wait and 2 may; try again later"
    bench.until_empty()
    bench = Bench(max_waiting_tokens=100)
    bench.submit(60)
    refusal = bench.scheduler.submit([bench.sequence(41)])
    assert refusal is not None
    assert refusal.message == "prompts of 60 ids wait and 100 may; try again later"
    bench.submit(40)
    bench.until_empty()


@pytest.mark.parametrize(("rate", "wait_s"), [(0.0, 1.0), (1e9, 1.0), (0.001, 60.0), (12.0, 5.0)])
def test_time_to_come_back_is_bounded(rate: float, wait_s: float):
    bench = Bench(max_waiting=1)
    bench.submit(60)
    refusal = bench.scheduler.submit([bench.sequence(1)], tokens_per_s=rate)
    assert refusal is not None
    assert refusal.retry_after_s == wait_s


def test_fail_all_ends_everybody_once():
    bench = Bench()
    sequences = [bench.submit(30) for _ in range(12)]
    bench.step()
    bench.scheduler.fail_all("broken")
    bench.scheduler.fail_all("broken again")
    bench.scheduler.check()
    finished = bench.scheduler.take_finished()
    assert finished == sequences
    assert {(s.finish_reason, s.error) for s in finished} == {(FinishReason.ERROR, "broken")}


def test_finished_sequences_do_not_pile_up_behind_their_deadlines():
    bench = Bench()
    for _ in range(400):
        sequence = bench.sequence(3, 1)
        sequence.deadline_s = 1e9
        assert bench.scheduler.submit([sequence]) is None
        bench.until_empty()
    assert len(bench.scheduler._deadlines) < 80


@pytest.mark.parametrize("name", ["prefill_budget", "max_waiting", "max_waiting_tokens", "chunk_align"])
def test_settings_are_checked(name: str):
    with pytest.raises(ValueError, match=f"{name} is 0; it must be above 0"):
        SchedulerSettings(**{"prefill_budget": 1, name: 0})


def test_settings_must_fit_each_other():
    with pytest.raises(ValueError, match="max_overtakes is -1"):
        SchedulerSettings(prefill_budget=1, max_overtakes=-1)
    with pytest.raises(ValueError, match="page_size 24 is no multiple of the chunk alignment of 16"):
        Scheduler(LATTICE, PagePool(4, 24), SchedulerSettings(prefill_budget=1))
    with pytest.raises(ValueError, match="the largest prefill bucket holds 8 ids; at least 16"):
        Scheduler(Lattice((1,), (8,), 1, (4,)), PagePool(4, 16), SchedulerSettings(prefill_budget=1))
