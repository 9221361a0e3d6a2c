"""Which pages are shared, what is waited for, who shares with whom, and what goes first when room is needed."""

import pytest

from planner.buckets import Lattice
from planner.idle import IdlePages
from planner.pages import PageError, PagePool
from planner.prefixes import PrefixSettings, identity_of
from planner.schedule import Scheduler
from planner.schedule_values import Batch, SchedulerSettings
from planner.sequence import FinishReason, Sampling, Sequence, Status
from tests.support.scheduler_bench import SchedulerBench

PAGE = 16
LATTICE = Lattice(decode_slots=(4, 16), prefill_chunks=(64, 128), prefill_slots=8, widths=(64,))


def ids(count: int, salt: int = 0) -> list[int]:
    return [salt * 1000 + place for place in range(count)]


class Bench(SchedulerBench):
    """With the settings of prefixes."""

    def __init__(self, num_pages: int = 64, lattice: Lattice = LATTICE, **prefixes: object) -> None:
        settings = SchedulerSettings(prefill_budget=128, prefixes=PrefixSettings(**prefixes))  # type: ignore[arg-type]
        super().__init__(Scheduler(lattice, PagePool(num_pages, PAGE), settings))


def chunks(batch: Batch) -> list[tuple[int, int, int]]:
    return [(chunk.sequence.key, chunk.start, chunk.count) for chunk in batch.prefill]


# ---------------------------------------------------------------------- what is shared


@pytest.mark.parametrize(("same", "cached"), [(0, 0), (15, 0), (16, 16), (47, 32), (48, 48), (64, 48)])
def test_full_pages_up_to_the_first_difference_are_shared_but_never_all_ids(same: int, cached: int) -> None:
    bench = Bench()
    first = bench.run(ids(64))
    assert (first.cached_tokens, first.created_tokens) == (0, 64)
    second = bench.run((ids(same) + ids(64, salt=1))[:64])
    assert second.cached_tokens == cached
    assert second.created_tokens == 64 - max(cached, same // PAGE * PAGE)
    assert bench.scheduler.reuse.hit_rate == cached / 128


def test_the_next_turn_of_a_chat_finds_prompt_and_answer() -> None:
    bench = Bench()
    first = bench.run(ids(20), max_tokens=30)
    assert len(first.ids) == 50
    assert bench.run([*first.ids, *ids(5, salt=3)]).cached_tokens == 48


def test_the_last_id_of_an_answer_is_never_computed_and_its_page_not_shared() -> None:
    bench = Bench()
    first = bench.run(ids(20), max_tokens=12)
    assert len(first.ids) == 32
    assert bench.run([*first.ids, 5, 6]).cached_tokens == 16


def test_the_choices_of_a_request_compute_its_prompt_once() -> None:
    bench = Bench()
    choices = [Sequence(key, "r", "t", ids(70), 70, Sampling(5), 0.0) for key in range(5)]
    assert bench.scheduler.submit(choices) is None
    assert chunks(bench.step()) == [(0, 0, 70)]
    assert chunks(bench.step()) == [(key, 64, 6) for key in range(1, 5)]
    bench.settle()
    assert [choice.cached_tokens for choice in choices] == [0, 64, 64, 64, 64]
    assert bench.scheduler.reuse.joins == 4


def test_tenants_share_only_if_told_to() -> None:
    for all_tenants, cached in ((False, 0), (True, 48)):
        bench = Bench(all_tenants=all_tenants)
        bench.run(ids(60), tenant="a")
        assert bench.run(ids(60), tenant="b").cached_tokens == cached
        assert bench.run(ids(60), tenant="a").cached_tokens == 48


def test_nothing_is_shared_when_reuse_is_off() -> None:
    bench = Bench(reuse=False)
    for _ in range(2):
        sequence = bench.run(ids(60))
        assert (sequence.cached_tokens, sequence.created_tokens, sequence.chain) == (0, 0, [])
    assert bench.scheduler.pool.num_cached == 0


def test_names_depend_on_every_part_of_the_identity_and_where_it_ends() -> None:
    made = [identity_of(*parts) for parts in (("ab", "c"), ("a", "bc"), ("ab", "c", ""), ("ab", "d"))]
    assert len(set(made)) == 4
    chains = []
    for identity in made[:2]:
        bench = Bench(identity=identity)
        chains.append(bench.run(ids(40)).chain)
    assert not set(chains[0]) & set(chains[1])


def test_first_positions_of_a_slot_are_computed_again_and_then_it_goes_on_behind_the_shared_pages() -> None:
    bench = Bench(lead=16)
    bench.run(ids(70))
    again = bench.submit(ids(70))
    assert chunks(bench.step()) == [(2, 0, 16)]
    assert again.in_flight == 0
    assert chunks(bench.step()) == [(2, 64, 6)]
    bench.settle()
    assert again.cached_tokens == 48
    assert bench.run(ids(17)).cached_tokens == 0  # a page that holds no more than these saves nothing


# ---------------------------------------------------------------------- joining what is being computed


def long_one() -> tuple[Bench, Sequence]:
    """A prompt of 400 ids of which the first 128 are computed."""
    bench = Bench()
    first = bench.submit(ids(400), 5)
    bench.step()
    assert first.computed == 128
    return bench, first


def test_one_that_begins_alike_waits_for_the_part_in_common_and_computes_the_rest() -> None:
    bench, _ = long_one()
    other = bench.submit(ids(260) + ids(40, salt=1))
    assert chunks(bench.step()) == [(1, 128, 128)]  # up to where they part
    assert (other.status, bench.scheduler.num_waiting) == (Status.WAITING, 1)
    batch = bench.step()
    assert (2, 256, 44) in chunks(batch)
    bench.settle()
    assert other.cached_tokens == 256


def test_what_is_awaited_comes_before_the_rest() -> None:
    bench, _ = long_one()
    bench.submit(ids(180))
    assert chunks(bench.step()) == [(1, 128, 48)]


@pytest.mark.parametrize("how", ["cancel", "deadline"])
def test_when_the_first_is_gone_the_next_takes_over_and_the_others_wait_for_it(how: str) -> None:
    bench = Bench()
    first = bench.submit(ids(400), deadline_s=1.5 if how == "deadline" else None)
    bench.step()
    others = [bench.submit(ids(399 - n)) for n in range(3)]
    bench.step()
    assert [s.status for s in others] == [Status.WAITING] * 3
    if how == "cancel":
        bench.scheduler.cancel(first.key)
        bench.scheduler.check()
    bench.step()
    assert first.status is Status.FINISHED
    assert [s.status for s in others] == [Status.RUNNING, Status.WAITING, Status.WAITING]
    bench.settle()
    assert [s.finish_reason for s in others] == [FinishReason.LENGTH] * 3
    assert others[0].cached_tokens >= 128
    assert [s.cached_tokens for s in others[1:]] == [384, 384]


def test_a_deadline_counts_while_waiting_for_another() -> None:
    bench, _ = long_one()
    other = bench.submit(ids(390), deadline_s=1.5)
    bench.step()
    bench.step()
    assert other.finish_reason is FinishReason.ERROR
    bench.settle()


def test_those_who_wait_for_another_hold_nobody_up() -> None:
    bench, _ = long_one()
    for _ in range(20):
        bench.submit(ids(400))
    unlike = bench.submit(ids(30, salt=2))
    bench.step()
    assert unlike.status is Status.RUNNING
    bench.settle()


def test_a_tenth_of_a_long_prompt_is_computed_first_if_wanted() -> None:
    bench = Bench(warm_up=True)
    bench.submit(ids(400))
    assert chunks(bench.step()) == [(1, 0, 32)]
    assert chunks(bench.step()) == [(1, 32, 128)]
    bench.settle()
    bench.submit(ids(120))
    assert chunks(bench.step()) == [(2, 112, 8)]
    bench.submit(ids(120, salt=1))
    assert chunks(bench.step()) == [(3, 0, 120)]  # not long


# ---------------------------------------------------------------------- what goes first


def test_a_preempted_one_goes_on_from_its_own_pages() -> None:
    bench = Bench(num_pages=7, lattice=Lattice((4,), (64,), 4, (8,)))
    old, new = bench.submit(ids(20), 60), bench.submit(ids(33, salt=1), 40)
    while not new.preemptions:
        bench.step()
    computed = 0
    while new.finish_reason is None:
        computed += sum(chunk.count for chunk in bench.step().prefill if chunk.sequence is new)
    assert (old.completion_len, new.completion_len) == (60, 40)
    assert computed < 33
    bench.settle()


def test_the_pages_left_longest_ago_go_first_and_the_end_of_a_prefix_before_its_beginning() -> None:
    bench = Bench(num_pages=8)
    bench.run(ids(49))
    bench.run(ids(49, salt=1))
    assert bench.scheduler.pool.num_cached == 6
    bench.run(ids(60, salt=2))
    assert bench.scheduler.reuse.evictions == 2
    first = bench.submit(ids(49))
    bench.step()
    assert first.cached_tokens == 16
    bench.settle()


def test_what_was_asked_to_be_kept_and_what_was_used_again_outlives_the_rest() -> None:
    bench = Bench(num_pages=16)
    bench.run(ids(33), precious=True)
    bench.run(ids(33, salt=1))
    bench.run(ids(33, salt=1))
    for salt in range(2, 12):
        bench.run(ids(60, salt=salt))
    assert bench.run(ids(33)).cached_tokens == 32
    assert bench.run(ids(33, salt=1)).cached_tokens == 32
    assert bench.run(ids(60, salt=2)).cached_tokens == 0


def test_the_precious_are_half_of_the_pages_at_most() -> None:
    idle = IdlePages(2)
    for page in range(4):
        idle.add(page, precious=True)
    idle.add(9, precious=False)
    assert (len(idle), list(idle)) == (5, [0, 1, 9, 2, 3])
    idle.remove(1)
    idle.remove(2)
    assert [idle.give_up() for _ in range(3)] == [0, 9, 3]
    with pytest.raises(KeyError):
        idle.give_up()


# ---------------------------------------------------------------------- the pool


def test_names_are_given_once() -> None:
    pool = PagePool(4, PAGE)
    first, second = pool.take(2)
    assert pool.keep(first, b"a")
    assert pool.keep(first, b"a")
    assert not pool.keep(second, b"a")  # the same content twice: one of them stays nameless
    with pytest.raises(PageError, match="cannot name page 0 twice"):
        pool.keep(first, b"b")
    pool.give_back([first, second])
    assert (pool.num_cached, pool.num_free, pool.find(b"a")) == (1, 4, first)
    with pytest.raises(PageError, match="cannot name page 0: it is free"):
        pool.keep(first, b"a")
    pool.share([first])
    pool.check([[first]])
    with pytest.raises(PageError, match="cannot share page 1"):
        pool.share([second])


def test_cached_pages_are_taken_only_when_no_empty_one_is_left_and_lose_their_name() -> None:
    pool = PagePool(3, PAGE)
    pages = pool.take(2)
    pool.keep(pages[0], b"a")
    pool.keep(pages[1], b"b")
    pool.give_back(pages)
    assert pool.take(1) == [2]
    assert pool.take(1) == [1]
    assert (pool.find(b"a"), pool.find(b"b"), pool.evictions) == (0, None, 1)
    pool.check([[2], [1]])


def test_a_chain_counts_on_the_device_where_its_turn_is() -> None:
    pool = PagePool(8, PAGE, devices=2, shard_pages=1)
    pages = pool.take(2, home=1)
    assert pages == [4, 0]
    assert [pool.fits_behind([4], page) for page in (0, 5)] == [True, False]
    pool.keep(4, b"a")
    pool.give_back(pages)
    blocked = pool.take(3, home=1) + pool.take(3, home=0)
    assert (pool.free_on(0), pool.free_on(1)) == (1, 1)
    assert pool.home_for([4], 1, [0, 0], reserve=False) == 1
    assert pool.home_for([4], 3, [0, 0], reserve=False) is None  # the cached page itself is the free one
    pool.check([blocked[:3], blocked[3:]])
