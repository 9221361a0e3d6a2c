"""Scheduler against a naive model: what every page holds, position by position, and what each sequence must become."""

import struct
from collections import deque
from hashlib import sha256
from itertools import takewhile

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from planner.buckets import Lattice, Phase, round_up
from planner.host_tier import Fetch, HostTier, Save, Store
from planner.pages import PagePool
from planner.prefixes import PrefixSettings
from planner.schedule import Scheduler
from planner.schedule_values import Batch, SchedulerSettings
from planner.searching import Search
from planner.sequence import FinishReason, Sampling, Sequence, Status

LATTICE = Lattice(decode_slots=(1, 2, 3), prefill_chunks=(4, 12), prefill_slots=2, widths=(2, 5))
PAGE_SIZE, NUM_PAGES, ALIGN, BUDGET = 4, 7, 2, 7
CAPACITY = 5 * PAGE_SIZE
STOP = 0


def made_up(lineage: int, position: int) -> int:
    """The id that a choice has at a position; some are stop ids."""
    return (lineage * 7 + position * position) % 13


class ScheduleMachine(RuleBasedStateMachine):
    """Requests come, are cancelled and time out; steps are committed one late. Prompts begin alike more often than not.

    ``cells`` is the model of the pool: page and offset to the ids up to there that were written there last, in the
    order of dispatch, with the tenant where tenants share nothing. ``first`` is the same for the first positions, which
    belong to slots where there is a lead.
    """

    search_s = 0.0

    @staticmethod
    def pool() -> PagePool:
        return PagePool(NUM_PAGES, PAGE_SIZE)

    @staticmethod
    def tier() -> HostTier | None:
        return None

    def __init__(self) -> None:
        super().__init__()
        self.cells: dict[tuple[int, int], tuple[object, ...]] = {}
        self.first: dict[tuple[int, int], tuple[object, ...]] = {}
        self.all: list[Sequence] = []
        self.finished: list[Sequence] = []
        self.unread: list[Sequence] = []
        self.cancelled: set[int] = set()
        self.now_s = 0.0
        self.key = 0

    @initialize(lead=st.sampled_from([0, 0, ALIGN]), warm_up=st.booleans(), all_tenants=st.booleans())
    def begin(self, lead: int, warm_up: bool, all_tenants: bool) -> None:
        self.lead, self.all_tenants = lead, all_tenants
        bounds = SchedulerSettings(
            BUDGET, max_waiting=6, max_waiting_tokens=60, max_overtakes=2, chunk_align=ALIGN, search_s=self.search_s,
            prefixes=PrefixSettings(lead=lead, warm_up=warm_up, all_tenants=all_tenants),
        )  # fmt: skip
        self.scheduler = Scheduler(LATTICE, self.pool(), bounds, self.tier())

    @rule(
        length=st.integers(1, 21),
        parts_at=st.integers(0, 21),
        goes_on=st.sampled_from([0, 1, 1, 2, 5]),
        precious=st.booleans(),
        max_tokens=st.integers(1, 25),
        n=st.sampled_from([1, 1, 2, 3]),
        tenant=st.sampled_from("ab"),
        patience=st.none() | st.integers(1, 30),
        expected=st.none() | st.floats(),
    )
    def submit(
        self,
        length: int,
        parts_at: int,
        goes_on: int,
        precious: bool,
        max_tokens: int,
        n: int,
        tenant: str,
        patience: int | None,
        expected: float | None,
    ) -> None:
        """``goes_on``: the prompt begins with ids of a late sequence, 1 the newest, as the next turn of a chat does."""
        before_it = list(self.all[-min(goes_on, len(self.all))].ids) if goes_on and self.all else [99] * 21
        prompt = (before_it[:parts_at] + [100 + self.key % 3] * 21)[:length]
        request = f"r{self.key}"
        deadline_s = None if patience is None else self.now_s + patience
        sampling = Sampling(max_tokens, stop_ids=frozenset({STOP}))
        choices = [
            Sequence(self.key + i, request, tenant, list(prompt), length, sampling, self.now_s, deadline_s)
            for i in range(n)
        ]
        for choice in choices:
            choice.expected_len, choice.precious = expected, precious
        self.key += n
        before = self.scheduler.num_waiting, self.scheduler.num_waiting_tokens
        refusal = self.scheduler.submit(choices)
        if length >= CAPACITY:
            expected = "too_long"
        elif before[0] and (before[0] + n > 6 or before[1] + n * length > 60):
            expected = "overloaded"
        else:
            expected = None
        assert (refusal.kind if refusal else None) == expected
        if refusal:
            assert before == (self.scheduler.num_waiting, self.scheduler.num_waiting_tokens)
        else:
            self.all += choices

    @precondition(lambda self: self.all)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.all))
        if sequence.status is not Status.FINISHED:
            self.cancelled.add(sequence.key)
        self.scheduler.cancel(sequence.key)
        assert sequence.status is Status.FINISHED

    @rule(steps=st.integers(1, 4))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self._step()

    def _step(self) -> None:
        running = sorted((s for s in self.all if s.status is Status.RUNNING), key=lambda s: s.order)
        batch = self.scheduler.next_batch(self.now_s)
        self._check_batch(batch)
        self._move(batch)
        if running and running[0].status is not Status.FINISHED:
            assert running[0].status is Status.RUNNING, "the oldest keeps its place"
        for sequence in batch.decode:
            self._read(sequence, sequence.computed - 1)
        for sequence in batch.decode:
            self._write(sequence, sequence.computed - 1, 1)
        for chunk in batch.prefill:
            self._read(chunk.sequence, chunk.start)  # of a launch, what was there before it
        for chunk in batch.prefill:
            self._write(chunk.sequence, chunk.start, chunk.count)
        # in the order of dispatch: the ids of the step before are applied after this one is planned
        unread, self.unread = self.unread, [*batch.decode, *(c.sequence for c in batch.prefill if c.samples)]
        lengths = [len(s.ids) for s in unread]
        ids = [made_up(s.key, len(s.ids)) for s in unread]
        accepted = self.scheduler.commit(unread, ids, self.now_s)
        for index, (sequence, length) in enumerate(zip(unread, lengths, strict=True)):
            assert len(sequence.ids) == length + (index in accepted)
        self.now_s += 1.0

    def _move(self, batch: Batch) -> None:
        assert not batch.saves
        assert not batch.loads
        assert not batch.fetches

    def _check_batch(self, batch: Batch) -> None:
        assert len({s.key for s in batch.decode} | {c.sequence.key for c in batch.prefill}) == (
            len(batch.decode) + len(batch.prefill)
        ), "a sequence has one row"
        assert len(batch.prefill) <= LATTICE.prefill_slots
        tokens = sum(chunk.count for chunk in batch.prefill)
        if batch.decode:
            pages = max(len(s.pages) for s in batch.decode)
            round_up(LATTICE, Phase.DECODE, max(s.slot for s in batch.decode) + 1, 0, pages)
            assert tokens <= max(BUDGET - len(batch.decode), ALIGN)
        if batch.prefill:
            pages = max(-(-chunk.end // PAGE_SIZE) for chunk in batch.prefill)
            round_up(LATTICE, Phase.PREFILL, len(batch.prefill), tokens, pages)
        for chunk in batch.prefill:
            assert chunk.start % ALIGN == 0
            assert chunk.samples == (chunk.end == len(chunk.sequence.ids))
        for sequence in batch.decode:
            assert sequence.scheduled_len <= sequence.max_len <= CAPACITY

    def _lineage(self, sequence: Sequence, position: int) -> tuple[object, ...]:
        """Every id up to a position, those that are still in flight included."""
        prompt = sequence.ids[: sequence.prompt_len]
        later = [made_up(sequence.key, place) for place in range(sequence.prompt_len, position + 1)]
        return "" if self.all_tenants else sequence.tenant, *[*prompt, *later][: position + 1]

    def _write(self, sequence: Sequence, start: int, count: int) -> None:
        for position in range(start, start + count):
            if position < self.lead:
                self.first[sequence.slot, position] = self._lineage(sequence, position)
                continue
            page = sequence.pages[position // PAGE_SIZE]
            assert [s for s in self.all if page in s.pages] == [sequence], "nobody writes a shared page"
            self.cells[page, position % PAGE_SIZE] = self._lineage(sequence, position)

    def _read(self, sequence: Sequence, end: int) -> None:
        for position in range(end):
            if position < self.lead:
                found = self.first[sequence.slot, position]
            else:
                found = self.cells[sequence.pages[position // PAGE_SIZE], position % PAGE_SIZE]
            assert found == self._lineage(sequence, position), "every position is where the table says"

    @invariant()
    def holds(self) -> None:
        self.scheduler.check()
        self._check_names()
        self.finished += self.scheduler.take_finished()
        assert len({s.key for s in self.finished}) == len(self.finished), "one finish each"
        assert {s.key for s in self.finished} == {s.key for s in self.all if s.status is Status.FINISHED}

    def _check_names(self) -> None:
        """What has a name holds what the name says, whoever computed it."""
        for name, page in self.scheduler.pool.named():
            tenant, *ids = self.cells[page, PAGE_SIZE - 1]
            chain = b"" if self.all_tenants else sha256(str(tenant).encode()).digest()
            for start in range(0, len(ids), PAGE_SIZE):
                chain = sha256(chain + struct.pack(f"<{PAGE_SIZE}i", *ids[start : start + PAGE_SIZE])).digest()
            assert chain == name

    def teardown(self) -> None:
        """Everything ends in a bounded number of steps, as it would have ended alone."""
        waiting = sum(s.max_len for s in self.all if s.status is not Status.FINISHED)
        for _ in range(4 * waiting + 10):
            if not self.scheduler.num_live and not self.unread:
                break
            self._step()
            self.scheduler.check()
        self.holds()
        assert self.scheduler.num_live == 0
        assert self.scheduler.pool.num_free == self.scheduler.pool.num_pages
        for sequence in self.all:
            assert 0 <= sequence.cached_tokens < sequence.prompt_len
            assert sequence.cached_tokens + sequence.created_tokens <= sequence.prompt_len
            self._check_end(sequence)

    def _check_end(self, sequence: Sequence) -> None:
        expected: list[int] = []
        while (new_id := made_up(sequence.key, sequence.prompt_len + len(expected))) != STOP:
            expected.append(new_id)
            if sequence.prompt_len + len(expected) == min(sequence.max_len, CAPACITY):
                break
        ids = sequence.ids[sequence.prompt_len :]
        if sequence.key in self.cancelled:
            assert sequence.finish_reason is FinishReason.CANCELLED
            assert ids == expected[: len(ids)]
        elif sequence.finish_reason is FinishReason.ERROR:
            assert sequence.deadline_s is not None
            assert ids == expected[: len(ids)]
        else:
            stopped = new_id == STOP
            assert ids == expected
            assert sequence.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
            assert sequence.stop_id == (STOP if stopped else None)


ScheduleMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40)
TestScheduleMachine = ScheduleMachine.TestCase


class SpreadScheduleMachine(ScheduleMachine):
    """The same over two devices that each hold less than the longest sequence."""

    @staticmethod
    def pool() -> PagePool:
        return PagePool(8, PAGE_SIZE, devices=2, shard_pages=2)


SpreadScheduleMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40)
TestSpreadScheduleMachine = SpreadScheduleMachine.TestCase


class TieredScheduleMachine(ScheduleMachine):
    """The same with a host tier and one below it, whose copies end late, fail, and give back other bytes than given.

    ``memory`` is the model of the host tier: place to name and to what the page held when it was read; ``below`` has
    what was there before. ``copies`` and ``searches`` are under way.
    """

    search_s = 3.5

    @staticmethod
    def tier() -> HostTier | None:
        return HostTier(4, at_once=2)

    def __init__(self) -> None:
        super().__init__()
        self.memory: dict[int, tuple[bytes, object]] = {}
        self.below: dict[bytes, object] = {}
        self.copies: deque[tuple[Save | Store | Fetch, object]] = deque()
        self.searches: deque[Search] = deque()
        self.fails, self.pace = 0, 99

    @rule(pace=st.sampled_from([0, 1, 2, 99, 99]), fails=st.sampled_from([0, 0, 0, 1]))
    def change(self, pace: int, fails: int) -> None:
        """From now on so many copies end a step; ``fails``: one of three does not do what it should."""
        self.pace, self.fails = pace, fails

    def _step(self) -> None:
        saved: list[bool] = []
        contents: list[object | None] = []
        for number in range(min(self.pace, len(self.copies))):
            copy, content = self.copies.popleft()
            well = not (self.fails and number % 3 == 0)
            if isinstance(copy, Fetch):
                contents.append(self.memory[copy.place][1] if well else None)
                continue
            if copy.place in self.memory:
                name, old = self.memory.pop(copy.place)
                self.below[name] = old
            if well:
                self.memory[copy.place] = copy.name, content
            saved.append(well)
        self.scheduler.moved(saved, contents)
        for _ in range(min(self.pace, len(self.searches))):
            search = self.searches.popleft()
            found = list(takewhile(lambda content: content is not None, map(self.below.get, search.names)))
            self.scheduler.found(search.number, found)
        super()._step()

    def _move(self, batch: Batch) -> None:
        held = [page for sequence in self.all for page in sequence.pages]
        assert len(batch.saves) <= 6
        assert len(batch.loads) <= 2
        assert len({page for page, _ in batch.loads}) == len(batch.loads)
        self.copies.extend((store, store.content) for store in batch.stores)
        for save in batch.saves:
            self.copies.append((save, [self.cells.get((save.page, place)) for place in range(PAGE_SIZE)]))
        for page, content in batch.loads:
            assert held.count(page) == 1, "nobody else reads it yet"
            for place, cell in enumerate(content):
                self.cells[page, place] = cell
        self.copies.extend((fetch, None) for fetch in batch.fetches)
        under_way = [copy for copy, _ in self.copies if not isinstance(copy, Store)]
        assert len(under_way) <= 4, "what is under way is bounded"
        self.searches.extend(batch.searches)

    def teardown(self) -> None:
        self.pace, self.fails = 99, 0
        super().teardown()
        while self.copies:
            self._step()
        self.scheduler.check()
        assert not self.scheduler.waits_for_tiers


TieredScheduleMachine.TestCase.settings = settings(max_examples=300, stateful_step_count=40)
TestTieredScheduleMachine = TieredScheduleMachine.TestCase
