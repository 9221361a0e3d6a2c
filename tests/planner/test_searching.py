"""Searches below host memory: what is looked for, who waits for it and for how long, and what it is good for."""

from planner.buckets import Lattice
from planner.host_tier import HostTier
from planner.pages import PagePool
from planner.schedule import Scheduler
from planner.schedule_values import Batch, SchedulerSettings
from planner.searching import Search, Searching
from planner.sequence import Sampling, Sequence, Status

PAGE = 16
LATTICE = Lattice(decode_slots=(4,), prefill_chunks=(128,), prefill_slots=8, widths=(64,))


def ids(count: int, salt: int = 0) -> list[int]:
    return [salt * 1000 + place for place in range(count)]


class Bench:
    """A scheduler with an empty host tier, and one below it that has ``below``; a step takes 0.1 s."""

    def __init__(self, search_s: float = 0.25, places: int = 16) -> None:
        self.scheduler = Scheduler(
            LATTICE, PagePool(64, PAGE), SchedulerSettings(128, search_s=search_s), HostTier(places, 2)
        )
        self.below: set[bytes] = set()
        self.answers = True
        self.searches: list[Search] = []
        self.unread: list[Sequence] = []
        self.made = 0
        self.now_s = 0.0

    def submit(self, prompt: list[int], tenant: str = "t", n: int = 1) -> list[Sequence]:
        choices = [
            Sequence(self.made + i, "r", tenant, list(prompt), len(prompt), Sampling(2), self.now_s) for i in range(n)
        ]
        self.made += n
        assert self.scheduler.submit(choices) is None
        return choices

    def step(self) -> Batch:
        batch = self.scheduler.next_batch(self.now_s)
        self.scheduler.commit(self.unread, [7] * len(self.unread), self.now_s)
        self.unread = [*batch.decode, *(chunk.sequence for chunk in batch.prefill if chunk.samples)]
        self.scheduler.check()
        self.scheduler.moved([True] * (len(batch.saves) + len(batch.stores)), [fetch.name for fetch in batch.fetches])
        self.searches += batch.searches
        for search in batch.searches if self.answers else []:
            found = [name for name in search.names if name in self.below]
            self.scheduler.found(search.number, found)
        self.now_s += 0.1
        return batch

    def settle(self) -> None:
        for _ in range(100):
            if not self.scheduler.num_live and not self.unread:
                assert not self.scheduler.waits_for_tiers
                return
            self.step()
        raise AssertionError("somebody is left")


def chain_of(prompt: list[int]) -> list[bytes]:
    other = Bench(search_s=0.0)
    (sequence,) = other.submit(prompt)
    other.settle()
    return sequence.chain


def test_what_is_found_below_comes_by_way_of_host_memory() -> None:
    bench, chain = Bench(), chain_of(ids(100))
    bench.below = set(chain[:3])
    (sequence,) = bench.submit(ids(100))
    bench.step()
    assert (sequence.status, bench.scheduler.num_waiting, bench.scheduler.waits_for_tiers) == (Status.WAITING, 1, True)
    bench.settle()
    assert [search.names for search in bench.searches] == [tuple(chain[:6])]
    assert sequence.cached_tokens == 48
    assert bench.scheduler.reuse.tier.held >= 3


def test_who_is_not_answered_in_time_computes_and_a_late_answer_is_dropped() -> None:
    bench = Bench()
    bench.answers, bench.below = False, set(chain_of(ids(100)))
    (sequence,) = bench.submit(ids(100))
    for _ in range(3):
        bench.step()
    assert sequence.status is Status.WAITING
    bench.step()
    assert sequence.status is Status.RUNNING
    bench.scheduler.found(bench.searches[0].number, list(bench.searches[0].names))
    bench.settle()
    assert sequence.cached_tokens == 0
    assert bench.scheduler.reuse.tier.held == 0


def test_equal_prompts_wait_for_one_search() -> None:
    bench = Bench()
    bench.below = set(chain_of(ids(100)))
    choices = bench.submit(ids(100), n=2)
    others = bench.submit(ids(90))
    bench.settle()
    assert len(bench.searches) == 1
    assert [s.cached_tokens for s in (*choices, *others)] == [96, 96, 80]


def test_what_the_pool_or_the_host_tier_has_is_not_looked_for() -> None:
    bench = Bench()
    bench.submit(ids(100))
    bench.settle()
    bench.searches.clear()
    (again,) = bench.submit(ids(100))
    bench.settle()
    assert (bench.searches, again.cached_tokens) == ([], 96)
    bench.submit([*ids(64), *ids(40, salt=1)])
    bench.step()
    assert len(bench.searches[0].names) == 2, "what is behind what the pool has"


def test_another_tenant_looks_for_other_names() -> None:
    bench = Bench()
    bench.submit(ids(100), "a")
    bench.submit(ids(100), "b")
    bench.step()
    one, other = bench.searches
    assert not set(one.names) & set(other.names)


def test_one_that_leaves_while_it_is_looked_for_is_gone() -> None:
    bench = Bench()
    bench.answers = False
    (sequence,) = bench.submit(ids(100))
    bench.step()
    bench.scheduler.cancel(sequence.key)
    assert sequence.status is Status.FINISHED
    assert not bench.scheduler.waits_for_tiers
    bench.scheduler.found(bench.searches[0].number, [b"x"])
    bench.scheduler.check()


def test_a_search_is_bounded_and_there_is_none_without_a_tier_or_time() -> None:
    bench = Bench()
    bench.submit(ids(40 * PAGE))
    bench.step()
    assert len(bench.searches[0].names) == 8
    for without in (Bench(search_s=0.0), Bench(places=0)):
        without.submit(ids(100))
        without.settle()
        assert without.searches == []
    assert not Searching(HostTier(4), 0.0).enabled


def test_what_does_not_fit_in_host_memory_is_computed() -> None:
    bench, chain = Bench(places=2), chain_of(ids(100))
    bench.below = set(chain)
    (sequence,) = bench.submit(ids(100))
    bench.settle()
    assert sequence.cached_tokens <= 32
