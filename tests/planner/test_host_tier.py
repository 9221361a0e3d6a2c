"""The host tier: what is saved before it is overwritten, what comes back instead of being computed, what is lost."""

import pytest

from planner.buckets import Lattice
from planner.host_tier import PAGES_ON_THE_WAY, Fetch, HostTier, TierCounts, TierError
from planner.loading import Loading
from planner.pages import PagePool
from planner.prefixes import PrefixSettings
from planner.schedule import Scheduler
from planner.schedule_values import Batch, SchedulerSettings
from planner.sequence import FinishReason, Sampling, Sequence, Status
from tests.support.scheduler_bench import SchedulerBench

PAGE = 16
LATTICE = Lattice(decode_slots=(4,), prefill_chunks=(64, 128), prefill_slots=8, widths=(64,))


def ids(count: int, salt: int = 0) -> list[int]:
    return [salt * 1000 + place for place in range(count)]


class Bench(SchedulerBench):
    """A scheduler with a tier whose copies end ``late`` steps after they were planned; contents are names."""

    def __init__(
        self, num_pages: int = 8, places: int = 32, at_once: int = 4, late: int = 0, **prefixes: object
    ) -> None:
        settings = SchedulerSettings(128, prefixes=PrefixSettings(**prefixes))  # type: ignore[arg-type]
        super().__init__(Scheduler(LATTICE, PagePool(num_pages, PAGE), settings, HostTier(places, at_once)))
        self.late = late
        self.lost: set[int] = set()
        """Places whose content is damaged."""
        self.under_way: list[tuple[list[bool], list[object | None]]] = []
        self.batches: list[Batch] = []

    @property
    def counts(self) -> TierCounts:
        return self.scheduler.reuse.tier

    def step(self) -> Batch:
        if len(self.under_way) > self.late:
            self.scheduler.moved(*self.under_way.pop(0))
        batch = super().step()
        contents = [None if fetch.place in self.lost else fetch.name for fetch in batch.fetches]
        self.under_way.append(([True] * len(batch.saves), contents))
        self.batches.append(batch)
        return batch

    def settle(self) -> None:
        """Until nothing is left to save either."""
        for _ in range(200):
            idle = not self.scheduler.num_live and not self.unread
            self.step()
            if idle and not any(saved or contents for saved, contents in self.under_way):
                assert self.scheduler.pool.num_free == self.scheduler.pool.num_pages
                return
        raise AssertionError(f"{self.scheduler.num_live} are left")

    def push_out(self, salt: int = 9) -> None:
        """Use the whole pool for something else."""
        pages = self.scheduler.pool.num_pages
        self.run(ids(pages * PAGE - 2, salt), max_tokens=1)


# ---------------------------------------------------------------------- out and in again


@pytest.mark.parametrize("late", [0, 1, 3])
def test_a_prefix_that_was_pushed_out_comes_back_and_only_the_rest_is_computed(late: int) -> None:
    bench = Bench(late=late)
    first = bench.run(ids(70))
    bench.push_out()
    assert all(bench.scheduler.pool.find(name) is None for name in first.chain[:4])
    again = bench.submit(ids(70))
    start = len(bench.batches)
    bench.settle()
    batches = bench.batches[start:]
    assert again.cached_tokens == 64
    assert [(c.start, c.count) for batch in batches for c in batch.prefill if c.sequence is again] == [(64, 6)]
    loads = [load for batch in batches for load in batch.loads]
    assert [load.content for load in loads] == first.chain[:4], "in the order of the chain"
    assert bench.counts.hits == 4
    assert again.created_tokens == 0


def test_what_is_read_is_what_is_going_to_be_overwritten_in_the_same_step() -> None:
    bench = Bench(at_once=8)
    first = bench.submit(ids(70), max_tokens=1)
    while bench.scheduler.num_live:
        bench.step()
    pages = [(name, bench.scheduler.pool.find(name)) for name in first.chain[:4]]
    second = bench.submit(ids(8 * PAGE - 2, salt=1), max_tokens=1)
    batch = bench.step()
    assert [(save.name, save.page) for save in batch.saves] == pages[::-1]
    assert {page for _, page in pages} < set(second.pages)
    assert [(chunk.sequence, chunk.start) for chunk in batch.prefill] == [(second, 0)]
    assert bench.counts.left_out == 0


def test_of_more_pages_than_there_are_places_the_beginnings_of_prefixes_are_saved() -> None:
    bench = Bench(num_pages=16, places=4, at_once=2)  # too small to save ahead more than two
    first = bench.run(ids(15 * PAGE))
    bench.submit(ids(16 * PAGE - 2, salt=1), max_tokens=1)
    while not (batch := bench.step()).entered:
        pass
    assert [save.name for save in batch.saves] == first.chain[3::-1]
    bench.settle()
    assert bench.counts.left_out >= 10
    again = bench.run(ids(15 * PAGE))
    assert 0 < again.cached_tokens <= 4 * PAGE


def test_a_step_saves_three_launches_less_what_is_on_its_way_and_of_more_the_beginnings_of_prefixes() -> None:
    bench = Bench(num_pages=32, places=32, at_once=2, late=5)
    first = bench.run(ids(12 * PAGE))
    bench.settle()
    saved_ahead = bench.counts.saved
    bench.submit(ids(32 * PAGE - 2, salt=1), max_tokens=1)
    while not (batch := bench.step()).entered:
        pass
    assert (saved_ahead, [save.name for save in batch.saves]) == (0, first.chain[5::-1])
    assert bench.step().saves == []
    assert bench.counts.left_out == 12 - 6


def test_what_comes_next_is_saved_ahead_so_that_nothing_is_lost_when_much_is_given_up_at_once() -> None:
    bench = Bench(num_pages=16, at_once=2)
    first = bench.run(ids(8 * PAGE - 2))
    assert bench.counts.saved == 0, "there is room"
    second = bench.run(ids(6 * PAGE - 2, salt=1))
    for _ in range(12):
        bench.step()
    assert bench.counts.saved == 6, "what would go if 8 pages were needed, of which 2 are empty"
    bench.run(ids(10 * PAGE - 2, salt=2), max_tokens=1)
    assert bench.counts.left_out == 0
    assert bench.run(ids(8 * PAGE - 2)).cached_tokens == 7 * PAGE
    assert (first.cached_tokens, second.cached_tokens) == (0, 0)


def test_a_page_that_came_back_is_not_saved_again() -> None:
    bench = Bench()
    bench.run(ids(70))
    bench.push_out(8)
    bench.run(ids(70))
    saved = bench.counts.saved
    bench.push_out(8)
    assert bench.run(ids(70)).cached_tokens == 64
    assert bench.counts.saved == saved


def test_without_a_tier_nothing_is_planned() -> None:
    bench = Bench(places=0)
    for salt in (0, 1, 0):
        bench.run(ids(120, salt))
    assert not any(batch.saves or batch.loads or batch.fetches for batch in bench.batches)
    assert (bench.counts, bench.scheduler.pages_at_once) == (TierCounts(), 0)


# ---------------------------------------------------------------------- faults


@pytest.mark.parametrize(("place", "cached"), [(0, 0), (1, 16), (3, 48)])
def test_what_is_behind_a_damaged_page_is_computed(place: int, cached: int) -> None:
    bench = Bench(late=1)
    first = bench.run(ids(70))
    bench.push_out()
    tier = bench.scheduler._tier
    bench.lost = {tier._held[first.chain[place]]}
    again = bench.run(ids(70))
    assert (again.cached_tokens, again.finish_reason) == (cached, FinishReason.LENGTH)
    assert again.created_tokens == 64 - cached
    assert bench.counts.damaged == 1
    bench.lost = set()
    bench.push_out(8)
    assert bench.run(ids(70)).cached_tokens == 64, "it was computed, and saved again"


@pytest.mark.parametrize("how", ["cancel", "deadline"])
def test_one_that_ends_while_it_is_loaded_leaves_nothing_behind(how: str) -> None:
    bench = Bench(num_pages=16, late=3)
    bench.run(ids(15 * PAGE))
    bench.push_out()
    again = bench.submit(ids(15 * PAGE), deadline_s=bench.now_s + 3.5 if how == "deadline" else None)
    while not bench.scheduler.num_loading:
        bench.step()
    if how == "cancel":
        bench.scheduler.cancel(again.key)
    bench.settle()
    assert again.status is Status.FINISHED
    assert bench.scheduler.num_loading == 0
    assert sum(bench.scheduler._tier._readers) == 0
    assert bench.run(ids(15 * PAGE)).cached_tokens == 14 * PAGE


def test_one_that_is_preempted_while_it_is_loaded_starts_over() -> None:
    bench = Bench(num_pages=12, at_once=1, late=6)
    bench.run(ids(100))
    bench.push_out()
    old = bench.submit(ids(40, salt=1), max_tokens=140)
    bench.step()
    new = bench.submit(ids(100), max_tokens=2)
    while not new.preemptions and new.status is not Status.FINISHED:
        bench.step()
    bench.settle()
    assert (old.completion_len, new.completion_len) == (140, 2)


def test_a_place_that_is_read_is_not_given_to_another() -> None:
    bench = Bench(num_pages=8, places=4, at_once=2, late=4)
    bench.run(ids(4 * PAGE))
    bench.push_out(1)
    kept = list(bench.scheduler._tier._held)
    again = bench.submit(ids(4 * PAGE))
    for salt in range(2, 6):
        bench.submit(ids(3 * PAGE, salt))
        bench.step()
    bench.settle()
    assert again.finish_reason is FinishReason.LENGTH
    assert kept


def test_an_end_that_nobody_planned_is_a_fault() -> None:
    tier = HostTier(2)
    with pytest.raises(TierError, match="a save has ended that was not planned"):
        tier.saved([True])
    with pytest.raises(TierError, match="a fetch has ended that was not planned"):
        tier.fetched(well=True)


def test_a_save_that_failed_gives_its_place_back() -> None:
    pool, tier = PagePool(2, PAGE), HostTier(2)
    pages = pool.take(2)
    for page, name in zip(pages, (b"a", b"b"), strict=True):
        pool.keep(page, name)
    pool.give_back(pages)
    pool.take(1)
    (save,) = tier.plan_saves(pool)
    assert (save.page, save.name) == (1, b"b")
    tier.saved([False])
    tier.check(0)
    assert (tier.counts.held, tier.counts.saved, tier.reserve([b"b"])) == (0, 0, [])


# ---------------------------------------------------------------------- with others


def test_others_wait_for_what_is_loaded_and_it_is_loaded_once() -> None:
    bench = Bench(late=2)
    bench.run(ids(70))
    bench.push_out()
    both = [bench.submit(ids(70)), bench.submit(ids(68))]
    bench.settle()
    assert [sequence.cached_tokens for sequence in both] == [64, 64]
    assert bench.counts.hits == 4


def test_who_decodes_goes_on_while_others_are_loaded() -> None:
    bench = Bench(num_pages=12, late=5)
    bench.run(ids(70))
    bench.push_out()
    running = bench.submit(ids(20, salt=2), max_tokens=40)
    bench.step()
    bench.submit(ids(70))
    batches = [bench.step() for _ in range(5)]
    assert bench.scheduler.num_loading == 1
    assert all(running in batch.decode for batch in batches[1:])
    bench.settle()


def test_another_tenant_never_gets_what_the_tier_has() -> None:
    for all_tenants, cached in ((False, 0), (True, 64)):
        bench = Bench(all_tenants=all_tenants)
        bench.run(ids(70), tenant="a")
        bench.push_out()
        assert bench.run(ids(70), tenant="b").cached_tokens == cached


def test_first_positions_of_a_slot_are_computed_behind_loaded_pages_too() -> None:
    bench = Bench(lead=16)
    bench.run(ids(70))
    bench.push_out()
    start = len(bench.batches)
    again = bench.run(ids(70))
    chunks = [(c.start, c.count) for batch in bench.batches[start:] for c in batch.prefill if c.sequence is again]
    assert chunks == [(0, 16), (64, 6)]
    assert again.cached_tokens == 48


def test_tokens_that_are_not_computed_are_not_charged() -> None:
    bench = Bench(late=1)
    bench.run(ids(70), max_tokens=1)
    bench.push_out()
    before = bench.scheduler._waiting._served["t"]
    bench.run(ids(70), max_tokens=1)
    assert bench.scheduler._waiting._served["t"] - before == 6
    assert bench.scheduler.reuse.reused_tokens == 64


# ---------------------------------------------------------------------- bounds


def test_what_is_on_the_way_is_bounded_whatever_is_wanted() -> None:
    bench = Bench(num_pages=64, places=64, at_once=2, late=3)
    for salt in range(3):
        bench.run(ids(16 * PAGE, salt))
    bench.push_out()
    for salt in range(3):
        bench.submit(ids(16 * PAGE, salt))
    on_the_way = 0
    while bench.scheduler.num_live:
        batch = bench.step()
        fetched = sum(len(contents) for _, contents in bench.under_way)
        saved = sum(len(saves) for saves, _ in bench.under_way)
        on_the_way = max(on_the_way, fetched + saved + 2 * len(batch.loads))
        assert len(batch.saves) <= 6
        assert len(batch.loads) <= 2
    assert 2 < on_the_way <= PAGES_ON_THE_WAY * 2
    assert bench.counts.held <= 64
    bench.settle()


def test_the_content_used_longest_ago_goes_first_and_of_a_chain_its_end() -> None:
    tier = HostTier(3)
    pool = PagePool(3, PAGE)
    for name in (b"a0", b"a1", b"b0"):
        page = pool.take(1)
        pool.keep(page[0], name)
        pool.give_back(page)
        pool.give_back(pool.take(3))
        assert [save.name for save in tier.plan_saves(pool)] == [name]
        tier.saved([True])
    reserved = tier.reserve([b"a0", b"a1", b"a2"])
    assert [fetch.name for fetch in reserved] == [b"a0", b"a1"]
    assert (tier.counts.misses, tier.counts.held) == (1, 3)
    tier.release(reserved)
    assert list(tier._held) == [b"b0", b"a1", b"a0"]
    tier.check(0)


def test_loading_is_nothing_without_contents() -> None:
    tier = HostTier(2)
    loading = Loading(tier)
    sequence = Sequence(1, "r", "t", ids(40), 40, Sampling(1), 0.0)
    assert not loading.begin(sequence, 0, [b"a", b"b"])
    assert (len(loading), loading.plan()) == (0, ([], [], []))
    assert sequence not in loading
    assert tier.counts.misses == 2
    assert Fetch(0, b"a").name == b"a"
