"""Scheduler: which sequences run in the next step, with which slots and pages.

Owns the decisions and, through ``PagePool``, ``Prefixes``, ``HostTier``, ``Loading``, ``RunningLines`` and
``WaitingLines``, the pages and everybody's place. Reads no clock and touches no array: times and sampled ids come in as
arguments.

A step, in the order of ``next_batch``:

1. Sequences past their deadline finish with an error.
2. Every running sequence whose prompt is computed gets a decode row, oldest first. One that starts a new page takes it;
   when no page is free (of the device whose turn it is, where contexts are spread over several) the newest running
   sequence is preempted: it gives its pages and its slot back and waits, to be resumed by computing its prompt and its
   completion so far. The oldest is never preempted for another, so there is
   always progress.
3. Waiting sequences are admitted, in the turn of ``WaitingLines``, while there are free slots, pages for all their ids
   and one page more for everybody who may still grow. One shares the pages of its longest chain that is there
   (``Prefixes``) and computes the rest; one whose next page a running sequence is about to compute is parked until that
   has happened, outside of the line, so that it holds nobody up and loses no place. One with a predicted length also
   waits while the needs predicted for all who run and for itself pass the pool (``outlook``), unless waiting could cost
   it its answer. One that does not fit is overtaken by smaller ones a bounded number of times; then nobody else is
   admitted until it fits.
4. What the pool gives up is saved in host memory, and pages of sequences that entered come from there (``host_tier``,
   ``loading``); both are carried out before the launches of the step. Nobody takes a page in this step from here on.
5. The prompts being computed share the prefill budget (``chunks``), as far as somebody waits for them before the rest.
   The last chunk of a prompt yields an id. Pages that are full after this step can be shared from the next one on.
6. What is planned counts as computed; its ids are in flight until ``commit``.

``commit`` takes the ids that a step sampled. It comes one step late, after the next batch was planned, hence three
rules: a sequence whose last possible id is in flight is not planned again; one that ends by a stop id has wasted at
most one row, whose result is dropped; a preempted one is not resumed before its id in flight has come. Pages and slots
of a finished sequence are free at once: programs run in the order of dispatch, so whoever takes a page writes it after
the last wasted row has.

Where slots keep first positions beside the pages (``lead``), one that shares pages computes these in a chunk of their
own and goes on behind the shared pages. Choices of one request are like any sequences with equal prompts: one computes,
the others join it. Waiting sequences hold no pages; a preempted one finds its own again if nobody has taken them.
"""

from collections.abc import Sequence as Many
from dataclasses import replace

from planner.batch import NUM_SUPPRESSED
from planner.buckets import Lattice
from planner.chunks import share_budget
from planner.deadlines import Deadlines
from planner.host_tier import HostTier, Store
from planner.loading import Loading
from planner.outlook import Outlook, candidate_need, need, outlook_of
from planner.pages import PagePool
from planner.prefixes import Prefixes, ReuseCounts
from planner.refusals import Bounds, Refusal, refuse
from planner.running import RunningLines
from planner.schedule_values import Batch, SchedulerSettings
from planner.searching import Searching
from planner.sequence import Chunk, FinishReason, Sequence, Status
from planner.waiting import WaitingLines


class Scheduler:
    """Continuous batching over one page pool; see the module for the walk.

    Args:
        lattice: the buckets there are; its largest decode bucket is the number of slots.
        pool: the pages, all free.
        settings: the bounds.
        tier: the host memory for pages, empty; None = there is none.

    Raises:
        ValueError: the page size is no multiple of the chunk alignment, or the largest prefill bucket is below it.
    """

    def __init__(
        self,
        lattice: Lattice,
        pool: PagePool,
        settings: SchedulerSettings,
        tier: HostTier | None = None,
    ) -> None:
        align = settings.chunk_align
        if pool.page_size % align:
            raise ValueError(f"page_size {pool.page_size} is no multiple of the chunk alignment of {align} positions")
        if lattice.prefill_chunks[-1] < align:
            raise ValueError(
                f"the largest prefill bucket holds {lattice.prefill_chunks[-1]} ids; at least {align} needed"
            )
        self.pool = pool
        self.lattice = lattice
        self._settings = settings
        self._prefixes = Prefixes(pool, settings.prefixes)
        self._tier = HostTier() if tier is None else tier
        self._loading = Loading(self._tier)
        self._searching = Searching(self._tier, settings.search_s)
        self._stores: list[Store] = []
        self._running = RunningLines(lattice.decode_slots[-1])
        self._waiting = WaitingLines()
        self._live: dict[int, Sequence] = {}
        self._deadlines = Deadlines()
        self._finished: list[Sequence] = []
        self._submitted = 0
        self._blocked: Sequence | None = None
        self._overtakes = 0

    # ------------------------------------------------------------------ what there is

    @property
    def capacity(self) -> int:
        """Most ids, prompt and completion together, that one sequence can hold."""
        return min(self.pool.longest, self.lattice.widths[-1]) * self.pool.page_size

    @property
    def num_live(self) -> int:
        """Sequences that wait or run."""
        return len(self._live)

    @property
    def num_running(self) -> int:
        """Sequences in slots."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences without a slot."""
        return len(self._waiting)

    @property
    def num_waiting_tokens(self) -> int:
        """Ids of the waiting sequences."""
        return self._waiting.num_tokens

    @property
    def num_loading(self) -> int:
        """Sequences in slots whose pages are on their way from the host tier."""
        return len(self._loading)

    @property
    def waits_for_tiers(self) -> bool:
        """Whether somebody waits for what tiers have."""
        return bool(self._loading or self._searching)

    @property
    def pages_at_once(self) -> int:
        """Pages that a step moves to the host tier at most, and from there; 0 without one."""
        return self._tier.at_once if self._tier.places else 0

    @property
    def reuse(self) -> ReuseCounts:
        """What reuse has brought so far."""
        return replace(self._prefixes.counts, evictions=self.pool.evictions, tier=self._tier.counts)

    # ------------------------------------------------------------------ coming and going

    def submit(self, choices: Many[Sequence], tokens_per_s: float = 0.0) -> Refusal | None:
        """Take a request, or say why not; a refusal leaves no trace.

        A sequence whose ``max_tokens`` pass the capacity is taken all the same and ends with ``length`` when it holds
        as many ids as fit.

        Args:
            choices: the sequences of the request, at least one; all have the same prompt.
            tokens_per_s: recent throughput, for the estimate of when to come back; 0 = unknown.
        """
        settings, stale = self._settings, [sequence.key for sequence in choices if sequence.key in self._live]
        bounds = Bounds(self.capacity, settings.max_waiting, settings.max_waiting_tokens)
        refusal = refuse(choices, stale, self._waiting, bounds, tokens_per_s)
        if refusal is not None:
            return refusal
        self._prefixes.submitted(choices)
        for sequence in choices:
            self._register(sequence)
            self._waiting.add(sequence)
            if self._searching.enabled:
                first = len(self._prefixes.resident(sequence))
                if self._searching.add(sequence, self._prefixes.behind(sequence, first)):
                    self._waiting.park(sequence)
        return None

    def cancel(self, key: int) -> None:
        """Finish a sequence as cancelled, wherever it is; without effect on one that is finished or unknown."""
        sequence = self._live.get(key)
        if sequence is not None:
            self._finish(sequence, FinishReason.CANCELLED)

    def fail_all(self, error: str) -> None:
        """Finish everybody with an error."""
        for sequence in sorted(self._live.values(), key=lambda s: s.order):
            self._finish(sequence, FinishReason.ERROR, error=error)

    def take_finished(self) -> list[Sequence]:
        """Those that finished since the last call; each sequence is given exactly once."""
        finished, self._finished = self._finished, []
        return finished

    # ------------------------------------------------------------------ a step

    def next_batch(self, now_s: float) -> Batch:
        """Plan the next step; see the module for the order. An empty batch: nothing can be done before ``commit``."""
        batch = Batch()
        for sequence, error in self._deadlines.passed(now_s):
            self._finish(sequence, FinishReason.ERROR, error=error)
        batch.searches, batch.stores, self._stores = self._searching.begin(now_s), self._stores, []
        self._waiting.call(self._searching.ended(now_s))
        self._plan_decode(batch)
        if len(self._waiting) and not self._running.full:
            self._admit(batch, now_s)
        self._plan_moves(batch)
        self._plan_prefill(batch)
        return batch

    def moved(self, saved: Many[bool], contents: Many[object | None]) -> None:
        """The oldest copies between pool and host tier have ended, in the order in which they were planned.

        Args:
            saved: of each save, whether the tier has the content.
            contents: of each fetch, the content as ``Load`` carries it; None: it is lost.
        """
        self._tier.saved(saved)
        self._loading.come(contents)

    def found(self, number: int, contents: Many[object]) -> None:
        """A search has ended; ``contents`` are of its first names, up to one that is nowhere."""
        self._stores += self._searching.found(number, contents)

    def commit(self, sequences: Many[Sequence], ids: Many[int], now_s: float) -> list[int]:
        """Apply the ids that a launch sampled.

        Args:
            sequences: the sequences whose ids were in flight.
            ids: one sampled id a sequence.
            now_s: the time.

        Returns:
            Indices of the sequences that have a new id, in order. Those that ended are in ``take_finished`` as well.
        """
        accepted: list[int] = []
        for index, (sequence, new_id) in enumerate(zip(sequences, ids, strict=True)):
            sequence.in_flight -= 1
            if sequence.status is Status.FINISHED:
                continue
            if sequence.first_token_s is None:
                sequence.first_token_s = now_s
            if new_id in sequence.sampling.stop_ids:
                self._finish(sequence, FinishReason.STOP, stop_id=new_id)
                continue
            sequence.ids.append(new_id)
            accepted.append(index)
            if len(sequence.ids) >= sequence.max_len:
                self._finish(sequence, FinishReason.LENGTH)
        return accepted

    def check(self) -> None:
        """Check every invariant; O(everything), for tests and debugging.

        Raises:
            AssertionError: a sequence or a slot is in the wrong place.
            PageError: pages and page tables disagree.
        """
        self._running.check()
        running, waiting = list(self._running), list(self._waiting)
        self.pool.check([sequence.pages for sequence in running])
        self._prefixes.check(running)
        self._loading.check()
        assert sorted(self._live) == sorted(s.key for s in [*running, *waiting]), "live = running or waiting"
        assert all(self._live[s.key] is s for s in [*running, *waiting]), "a key stands for one sequence"
        assert (self._waiting.num_tokens > 0) == bool(waiting), "waiting ids are counted"
        assert self._blocked is None or self._blocked in waiting, "only one that waits can be blocked"
        for s in [*self._running.prefilling, *self._running.decoding]:
            assert s.computed <= len(s.pages) * self.pool.page_size, "computed positions have pages"
        for s in waiting:
            assert s.status is Status.WAITING, "waiting"
            assert not s.pages, "waiting sequences hold no pages"
            assert s.slot == -1, "waiting sequences hold no slot"
            assert s.computed == 0, "waiting sequences start over"

    # ------------------------------------------------------------------ admission

    def _register(self, sequence: Sequence) -> None:
        sampling = sequence.sampling
        assert sequence.prompt_len == len(sequence.ids) > 0, "the gateway refuses empty prompts"
        assert sampling.max_tokens > 0, "the gateway refuses max_tokens below 1"
        assert not sampling.min_tokens or len(sampling.stop_ids) <= NUM_SUPPRESSED, "the gateway refuses more stop ids"
        if sequence.max_len > self.capacity:
            sequence.sampling = replace(sampling, max_tokens=self.capacity - sequence.prompt_len)
        sequence.order = self._submitted
        self._submitted += 1
        self._live[sequence.key] = sequence
        self._deadlines.add(sequence, len(self._live))

    def _admit(self, batch: Batch, now_s: float) -> None:
        growing = self._growing()
        outlook: Outlook | None = None
        for sequence in [self._blocked] if self._blocked and self._held_back() else self._waiting.in_turn():
            if self._running.full or (self._held_back() and sequence is not self._blocked):
                return
            shared = self._shared_pages(sequence)
            if shared is None:
                continue
            pages, beside = self.pool.pages_for(len(sequence.ids)), self.pool.num_held(shared)
            grows = self._grows(sequence, pages)
            home = self.pool.home_for(shared, pages, growing, reserve=grows and len(self._running) > 0)
            if home is None:
                self._blocked = self._blocked or sequence
                continue
            if len(self._running) and self._may_wait(sequence, now_s):
                outlook = outlook or outlook_of(self._running, self.pool)
                if not outlook.fits(candidate_need(sequence, self.pool.page_size, beside)):
                    self._blocked = self._blocked or sequence
                    continue
            if self._blocked is sequence:
                self._unblock()
            elif self._blocked is not None:
                self._overtakes += 1
            self._enter(sequence, shared, pages - len(shared), home, now_s)
            growing[self.pool.device_of(home, pages)] += grows
            if outlook is not None:
                outlook.add(need(sequence, self.pool.page_size, beside))
            batch.entered.append(sequence)

    def _may_wait(self, sequence: Sequence, now_s: float) -> bool:
        """Whether a prediction may hold a sequence back: it has one, half of its time is left, and of the queue."""
        if sequence.expected_len is None:
            return False
        if sequence.deadline_s is not None and 2.0 * now_s > sequence.arrival_s + sequence.deadline_s:
            return False
        waiting, settings = self._waiting, self._settings
        return 2 * len(waiting) <= settings.max_waiting and 2 * waiting.num_tokens <= settings.max_waiting_tokens

    def _growing(self) -> list[int]:
        """How many running sequences may need one page more, by the device that it would be on."""
        found, pool = [0] * self.pool.devices, self.pool
        for sequence in self._running:
            if (count := len(sequence.pages)) and self._grows(sequence, count):
                found[pool.device_of(pool.home_of(sequence.pages), count)] += 1
        return found

    def _grows(self, sequence: Sequence, pages: int) -> bool:
        """Whether a sequence that has so many pages may need more; its last possible id needs no position."""
        return pages * self.pool.page_size < sequence.max_len - 1

    def _held_back(self) -> bool:
        """Whether the blocked sequence has been overtaken often enough."""
        return self._blocked is not None and self._overtakes >= self._settings.max_overtakes

    def _shared_pages(self, sequence: Sequence) -> list[int] | None:
        """The pages that one in line can enter with; None: not yet, since its own ids or others' pages are to come."""
        if sequence.in_flight:
            return None
        shared = self._prefixes.resident(sequence)
        if not self._prefixes.awaits(sequence, len(shared)):
            return shared
        self._waiting.park(sequence)
        if self._blocked is sequence:
            self._unblock()
        return None

    def _unblock(self) -> None:
        self._blocked, self._overtakes = None, 0

    def _enter(self, sequence: Sequence, shared: list[int], fresh: int, home: int, now_s: float) -> None:
        self.pool.share(shared)
        sequence.pages = [*shared, *self.pool.take(fresh, home, len(shared))]
        spared = self._prefixes.entered(sequence, len(shared))
        first_time = sequence.first_scheduled_s is None
        self._waiting.admit(sequence, len(sequence.ids) - spared if first_time else 0)
        if first_time:
            sequence.first_scheduled_s = now_s
            sequence.cached_tokens = spared
            self._prefixes.counts.prompt_tokens += sequence.prompt_len
            self._prefixes.counts.reused_tokens += spared
        self._running.enter(sequence)
        if self._tier.places:
            self._loading.begin(sequence, len(shared), self._prefixes.behind(sequence, len(shared)))

    # ------------------------------------------------------------------ planning

    def _plan_decode(self, batch: Batch) -> None:
        page_size, rows, charge = self.pool.page_size, batch.decode, self._waiting.charge
        ended = False
        for sequence in tuple(self._running.decoding):
            if sequence.slot < 0:
                continue
            if sequence.computed == len(sequence.pages) * page_size and not self._grow(sequence, batch):
                continue
            sequence.computed += 1
            sequence.in_flight += 1
            # written out, since this runs for every row of every step: scheduled_len >= max_len
            if len(sequence.ids) + sequence.in_flight >= sequence.prompt_len + sequence.sampling.max_tokens:
                ended = True
            charge(sequence.tenant, 1)
            rows.append(sequence)
        if ended:
            self._running.settle()

    def _grow(self, sequence: Sequence, batch: Batch) -> bool:
        """Give a sequence one page more; False: it was the newest and has been preempted itself."""
        pool, count = self.pool, len(sequence.pages)
        home = pool.home_of(sequence.pages)
        device = pool.device_of(home, count)
        while not pool.free_on(device):
            ending = [s for s in self._running.ending if s.pages]
            for done in ending:
                self._drop_pages(done)
            if ending:
                continue
            newest = self._running.newest(lambda s: s is sequence or pool.touches(s.pages, device))
            self._preempt(newest)
            batch.preempted += 1
            if newest is sequence:
                return False
        self._waiting.call(self._prefixes.publish(sequence))
        sequence.pages += pool.take(1, home, count)
        batch.grown.append(sequence)
        return True

    def _plan_moves(self, batch: Batch) -> None:
        """Plan what goes to the host tier and what comes from it, once all pages of the step have been taken."""
        batch.saves = self._tier.plan_saves(self.pool)
        if not self._loading:
            return
        batch.loads, batch.fetches, progress = self._loading.plan()
        for sequence, pages, ended in progress:
            self._waiting.call(self._prefixes.loaded(sequence, pages))
            if ended:
                self._loaded(sequence)

    def _loaded(self, sequence: Sequence) -> None:
        """A sequence has what the tier had for it, and computes the rest."""
        before = sequence.computed or sequence.resume_at - self._settings.prefixes.lead
        more = self._prefixes.begin(sequence) - max(before, 0)
        if not sequence.preemptions:
            sequence.cached_tokens += more
            self._prefixes.counts.reused_tokens += more
            self._waiting.charge(sequence.tenant, -more)

    def _plan_prefill(self, batch: Batch) -> None:
        settings, prompts = self._settings, tuple(s for s in self._running.prefilling if s not in self._loading)
        budget = self.lattice.prefill_chunks[-1]
        if batch.decode:
            budget = min(budget, max(settings.prefill_budget - len(batch.decode), settings.chunk_align))
        wanted = [self._prefixes.next_end(s) - s.computed for s in prompts]
        for index, count in share_budget(wanted, budget, self.lattice.prefill_slots, settings.chunk_align):
            sequence = prompts[index]
            samples = sequence.computed + count == len(sequence.ids)
            batch.prefill.append(Chunk(sequence, sequence.computed, count, samples))
            sequence.computed += count
            if sequence.computed == settings.prefixes.lead and sequence.resume_at:
                sequence.computed, sequence.resume_at = sequence.resume_at, 0
            if samples:
                sequence.in_flight += 1
                self._running.prompt_planned(sequence)
            self._waiting.call(self._prefixes.publish(sequence))

    # ------------------------------------------------------------------ leaving

    def _preempt(self, sequence: Sequence) -> None:
        self._drop_pages(sequence)
        self._running.leave(sequence)
        sequence.status = Status.WAITING
        sequence.computed = 0
        sequence.preemptions += 1
        self._waiting.add(sequence)

    def _finish(self, sequence: Sequence, reason: FinishReason, *, stop_id: int | None = None, error: str = "") -> None:
        if sequence.status is Status.FINISHED:
            return
        if sequence.status is Status.RUNNING:
            self._drop_pages(sequence)
            self._running.leave(sequence)
        else:
            self._searching.remove(sequence)
            self._waiting.remove(sequence)
        sequence.status = Status.FINISHED
        sequence.finish_reason, sequence.stop_id, sequence.error = reason, stop_id, error
        del self._live[sequence.key]
        self._finished.append(sequence)
        if self._blocked is sequence:
            self._unblock()

    def _drop_pages(self, sequence: Sequence) -> None:
        """Give a sequence's pages back; whoever waited for what it was computing comes in line again."""
        self._loading.stop(sequence)
        self._waiting.call(self._prefixes.left(sequence))
        self.pool.give_back(sequence.pages)
        sequence.pages = []
