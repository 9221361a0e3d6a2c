"""Engine: THE loop; one thread that owns the device and turns waiting sequences into ids.

Owns the device state, the packed rows and the launches whose ids have not been read. Reads requests from a ``Gateway``
and publishes to it; calls compiled programs and nothing else that computes. Knows no socket, no text and no model.

A step, in the order of ``Engine.step``:

1. Take in what the gateway received: requests go to the scheduler or are refused, cancellations finish sequences.
2. Ask the scheduler for the next batch.
3. Dispatch it: pages that go to the host tier are read and those that come from it are written, then the state of
   sequences that enter a slot, then one decode launch, then one prefill launch. Every program takes the device state
   donated and returns it, so programs run in the order of dispatch. Nothing waits here.
4. Read the ids of the *previous* step. This blocks until the device has them, while the step just dispatched is queued
   behind. The device keeps the newest id of every slot itself, so it never waits for the host. The lag of one step is
   ``_in_flight`` and exists nowhere else; prefill launches are read even when they sampled nothing, which keeps the
   host from running ahead.
5. Commit the ids: sequences grow or finish, and what they held comes free. A sequence that ends is told of only now,
   so that its segment is never written by its worker while a program may still read the prompt there.
6. Publish new ids and finishes, at most one emission a sequence, and report.

The state is donated, so a program that fails leaves nothing to go on with: every sequence finishes with an error that
names the cause, and ``EngineFailedError`` ends the loop.
"""

import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from contextlib import suppress
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from appliance.engine_ports import (
    Arrival,
    Cancellation,
    Emission,
    EngineMetrics,
    EngineReport,
    Finished,
    Forecast,
    Gateway,
    NoForecast,
    NoMetrics,
    NoMover,
    PageMover,
    ProgramSet,
    StepOutput,
)
from planner.batch import Ints, SlotTable, slot_state
from planner.buckets import Phase, round_up
from planner.schedule import Scheduler
from planner.schedule_values import Batch
from planner.sequence import Chunk, FinishReason, Sequence, Status

IDLE_S = 0.25
"""Longest wait for the gateway when there is nothing to do, in seconds."""

TIERS_S = 0.002
"""Longest wait for a copy when everybody waits for what tiers have, in seconds."""

_RATE_WEIGHT = 0.05
"""Weight of the newest step in the running mean of the throughput."""


class EngineFailedError(RuntimeError):
    """A step failed and the device state is lost; everybody has been told. Start a new engine process."""


class _Launch(NamedTuple):
    """A dispatched program whose ids have not been read: the rows that sampled, and whose they are."""

    sequences: list[Sequence]
    rows: list[int]
    out: StepOutput


class Engine:
    """Runs the sequences of one gateway on one device; see the module for the walk.

    Args:
        weights: what programs take first; opaque.
        state: the device state, donated to every program; opaque.
        programs: one for every bucket of the scheduler's lattice.
        scheduler: fresh; the engine is its only caller.
        gateway: where requests come from and ids go to.
        vocab: ids of the model.
        metrics: what is counted.
        forecast: what lengths are expected, for admission.
        mover: copies pages to the host tier of the scheduler and back.
        lend: makes ids that lie in a segment what programs take, without a copy; None = they are given as they are.
        clock: monotonic seconds.

    Raises:
        ValueError: a bucket has no program, or none moves as many pages at once as the scheduler's tier plans.
    """

    def __init__(
        self,
        weights: object,
        state: object,
        programs: ProgramSet,
        scheduler: Scheduler,
        gateway: Gateway,
        *,
        vocab: int,
        metrics: EngineMetrics | None = None,
        forecast: Forecast | None = None,
        mover: PageMover | None = None,
        lend: Callable[[Ints], npt.ArrayLike] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        lattice, pool = scheduler.lattice, scheduler.pool
        missing = programs.missing(lattice)
        if missing:
            raise ValueError(f"no program for buckets {', '.join(missing)}; build the plan's programs first")
        wanted = scheduler.pages_at_once
        if wanted and (mover is None or programs.moved_pages != wanted):
            raise ValueError(
                f"the scheduler's tier moves {wanted} pages at once, the programs {programs.moved_pages}, and "
                f"{'nobody copies them' if mover is None else 'both must come from one plan'}"
            )
        self._weights = weights
        self._state = state
        self._programs = programs
        self._scheduler = scheduler
        self._gateway = gateway
        self._vocab = vocab
        self._metrics = metrics or NoMetrics()
        self._forecast = forecast or NoForecast()
        self._mover: PageMover = NoMover() if mover is None else mover
        self._only_tiers = False
        self._lend = lend
        self._clock = clock
        self._table = SlotTable(lattice.decode_slots[-1], lattice.widths[-1], pool.unused)
        self._in_flight: list[_Launch] = []
        self._waited_s = 0.0
        self._tokens_per_s = 0.0
        self._drain_until_s: float | None = None
        self._failure = ""

    @property
    def scheduler(self) -> Scheduler:
        """Who decides; for benches, which call it between steps."""
        return self._scheduler

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do: no sequence and no launch to read."""
        return not self._in_flight and not self._scheduler.num_live

    @property
    def drained(self) -> bool:
        """Whether the engine takes no more requests and has finished all it had."""
        return self._drain_until_s is not None and self.idle

    def drain(self, deadline_s: float) -> None:
        """Refuse requests from now on; what is not finished at the deadline ends with an error.

        Only notes the wish, so it may be called from a signal handler of the engine's thread.

        Args:
            deadline_s: on the engine's clock.
        """
        self._drain_until_s = deadline_s

    def run(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Step until ``stop()`` says so or the engine is drained; then everybody still there ends with an error.

        Raises:
            EngineFailedError: a step failed.
        """
        while not stop() and not self.drained:
            self.step(IDLE_S if self.idle else 0.0)
        self._end_all("the engine was stopped before this sequence ended; send the request again")
        self._forecast.close()
        self._mover.close()

    def step(self, wait_s: float = 0.0) -> None:
        """One turn of the loop; see the module for the walk.

        Args:
            wait_s: how long to wait for requests when the gateway has none.

        Raises:
            EngineFailedError: a program failed, now or in an earlier step.
        """
        if self._failure:
            raise EngineFailedError(self._failure)
        messages = self._gateway.receive(wait_s)
        moved = self._mover.moved(TIERS_S if self._only_tiers else 0.0)
        began_s, self._waited_s = self._clock(), 0.0
        try:
            self._take_in(messages)
            self._scheduler.moved(moved.saved, moved.contents)
            for number, contents in moved.found:
                self._scheduler.found(number, contents)
            batch = self._scheduler.next_batch(began_s)
            earlier, self._in_flight = self._in_flight, self._dispatch(batch)
            self._only_tiers = not (batch or earlier) and self._scheduler.waits_for_tiers
            assert batch or earlier or self._only_tiers or not self._scheduler.num_live, "somebody waits for nothing"
            emissions = self._commit(earlier)
        except Exception as error:
            self._fail(error)
            raise EngineFailedError(self._failure) from error
        self._publish(emissions)
        self._count(batch, began_s, generated=sum(len(emission.ids) for emission in emissions))

    # ------------------------------------------------------------------ in

    def _take_in(self, messages: Many[Arrival | Cancellation]) -> None:
        for message in messages:
            if isinstance(message, Cancellation):
                for key in message.keys:
                    self._scheduler.cancel(key)
                continue
            key = message.sequences[0].key
            if self._drain_until_s is not None:
                self._gateway.refused(key, "draining", "the engine is shutting down; send the request elsewhere", 0.0)
                continue
            refusal = self._scheduler.submit(message.sequences, self._tokens_per_s)
            if refusal is None:
                self._gateway.admitted(key)
                expected = self._forecast.expect(message.sequences)
                for sequence in message.sequences:
                    sequence.expected_len = expected
            else:
                self._gateway.refused(key, refusal.kind, refusal.message, refusal.retry_after_s)
        if self._drain_until_s is not None and self._scheduler.num_live and self._clock() >= self._drain_until_s:
            self._scheduler.fail_all("the engine shut down before this sequence ended; send the request again")

    # ------------------------------------------------------------------ through the device

    def _dispatch(self, batch: Batch) -> list[_Launch]:
        self._move(batch)
        for sequence in batch.entered:
            self._table.enter(sequence)
            if sequence.sampling.penalised or sequence.sampling.logit_bias:
                slot = np.asarray(sequence.slot, np.int32)
                self._state = self._programs.set_slot(self._state, slot, *slot_state(sequence, self._vocab))
        for sequence in batch.grown:
            self._table.grow(sequence)
        launches: list[_Launch] = []
        if batch.decode:
            launches.append(self._decode(batch.decode))
        if batch.prefill:
            launches.append(self._prefill(batch.prefill))
        return launches

    def _move(self, batch: Batch) -> None:
        """Read the pages that are saved, write those that are loaded, and have the next ones fetched and looked for."""
        programs = self._programs
        if batch.stores:
            self._mover.store(batch.stores)
        if batch.saves:
            assert programs.read_pages is not None, "the tier was checked against the programs"
            for first in range(0, len(batch.saves), programs.moved_pages):
                saves = batch.saves[first : first + programs.moved_pages]
                ids = _filled([save.page for save in saves], programs.moved_pages)
                self._state, copies = programs.read_pages(self._state, np.asarray(ids, np.int32))
                self._mover.save(copies[: len(saves)], saves)
        if batch.loads:
            assert programs.write_pages is not None, "the tier was checked against the programs"
            ids = _filled([load.page for load in batch.loads], programs.moved_pages)
            contents = _filled([load.content for load in batch.loads], programs.moved_pages)
            self._state = programs.write_pages(self._state, np.asarray(ids, np.int32), *contents)
        if batch.fetches:
            self._mover.fetch(batch.fetches)
        if batch.searches:
            self._mover.search(batch.searches)

    def _decode(self, sequences: list[Sequence]) -> _Launch:
        rows = [sequence.slot for sequence in sequences]
        pages = max([len(sequence.pages) for sequence in sequences])
        bucket = round_up(self._scheduler.lattice, Phase.DECODE, max(rows) + 1, len(rows), pages)
        arrays = self._table.pack_decode(bucket, sequences)
        self._state, out = self._programs.decode[bucket](self._weights, self._state, *arrays)
        self._metrics.launched(bucket, len(rows), len(rows))
        return _Launch(sequences, rows, out)

    def _prefill(self, chunks: list[Chunk]) -> _Launch:
        tokens = sum(chunk.count for chunk in chunks)
        pages = self._scheduler.pool.pages_for(max(chunk.end for chunk in chunks))
        bucket = round_up(self._scheduler.lattice, Phase.PREFILL, len(chunks), tokens, pages)
        ids, ints, floats = self._table.pack_prefill(bucket, chunks)
        given = ids if self._lend is None or ids.flags.owndata else self._lend(ids)
        self._state, out = self._programs.prefill[bucket](self._weights, self._state, given, ints, floats)
        self._metrics.launched(bucket, len(chunks), tokens)
        rows = [row for row, chunk in enumerate(chunks) if chunk.samples]
        return _Launch([chunks[row].sequence for row in rows], rows, out)

    # ------------------------------------------------------------------ out

    def _commit(self, launches: list[_Launch]) -> list[Emission]:
        emissions: list[Emission] = []
        ended: set[int] = set()
        for launch in launches:
            before_s = self._clock()
            sampled = np.asarray(launch.out.ids)
            now_s = self._clock()
            self._waited_s += now_s - before_s
            ids: list[int] = sampled[launch.rows].tolist()
            logprobs, sequences = _Logprobs(launch), launch.sequences
            for index in self._scheduler.commit(sequences, ids, now_s):
                sequence, finish = sequences[index], None
                record = logprobs.record(index, ids[index]) if sequence.sampling.top_logprobs >= 0 else ()
                if sequence.status is Status.FINISHED:
                    finish = self._ended(sequence, now_s)
                    ended.add(sequence.key)
                emissions.append(Emission(sequence.key, sequence.completion_len, (ids[index],), record, finish))
        return emissions + self._finishes(ended)

    def _finishes(self, told: set[int]) -> list[Emission]:
        """The finishes of sequences without a new id in this step."""
        now_s = self._clock()
        return [
            Emission(sequence.key, sequence.completion_len, finish=self._ended(sequence, now_s))
            for sequence in self._scheduler.take_finished()
            if sequence.key not in told
        ]

    def _ended(self, sequence: Sequence, now_s: float) -> Finished:
        self._forecast.ended(sequence)
        return _finished(sequence, now_s)

    def _publish(self, emissions: list[Emission]) -> None:
        if emissions:
            self._gateway.publish(emissions)
        scheduler = self._scheduler
        draining = self._drain_until_s is not None
        report = EngineReport(
            state="lost" if self._failure else "draining" if draining else "ready",
            reason=self._failure or ("shutting down" if draining else ""),
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            waiting_tokens=scheduler.num_waiting_tokens,
            free_pages=scheduler.pool.num_free,
            total_pages=scheduler.pool.num_pages,
            cached_pages=scheduler.pool.num_cached,
            reuse=scheduler.reuse,
            last_step_s=self._clock(),
        )
        self._gateway.report(report)
        self._metrics.reported(report)

    def _count(self, batch: Batch, began_s: float, generated: int) -> None:
        elapsed_s = self._clock() - began_s
        computed = sum(chunk.count for chunk in batch.prefill)
        if computed + generated and elapsed_s > 0:
            rate = (computed + generated) / elapsed_s
            self._tokens_per_s += _RATE_WEIGHT * (rate - self._tokens_per_s) if self._tokens_per_s else rate
        if batch or generated:
            self._metrics.stepped(elapsed_s - self._waited_s, computed, generated, batch.preempted)

    # ------------------------------------------------------------------ the end

    def _end_all(self, error: str) -> None:
        self._scheduler.fail_all(error)
        for launch in self._in_flight:  # until it has run, a program may read segments that finishes give back
            with suppress(Exception):
                np.asarray(launch.out.ids)
        self._in_flight = []
        self._publish(self._finishes(set()))

    def _fail(self, error: Exception) -> None:
        self._failure = f"a step of the engine failed: {type(error).__name__}: {error}"
        self._end_all(f"{self._failure}; send the request again")


class _Logprobs:
    """The log-probabilities of one launch, read from the device when the first record is asked for."""

    __slots__ = ("_arrays", "_launch")

    def __init__(self, launch: _Launch) -> None:
        self._launch = launch
        self._arrays: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None

    def record(self, index: int, sampled_id: int) -> tuple[tuple[tuple[int, float], ...]]:
        """One record, of the new id of ``launch.sequences[index]``."""
        out, row = self._launch.out, self._launch.rows[index]
        if self._arrays is None:
            self._arrays = np.asarray(out.logprob), np.asarray(out.top_ids), np.asarray(out.top_logprobs)
        logprob, top_ids, top_logprobs = self._arrays
        top = self._launch.sequences[index].sampling.top_logprobs
        likeliest = zip(top_ids[row, :top].tolist(), top_logprobs[row, :top].tolist(), strict=True)
        return (((sampled_id, float(logprob[row])), *likeliest),)


_T = TypeVar("_T")


def _filled(given: list[_T], count: int) -> list[_T]:
    """As many as a program takes: the first one again in place of those that are not there."""
    return given + given[:1] * (count - len(given))


def _finished(sequence: Sequence, now_s: float) -> Finished:
    """How a sequence ended, with the time spent in each stage it reached."""
    slot_s, first_s = sequence.first_scheduled_s, sequence.first_token_s
    return Finished(
        reason=sequence.finish_reason or FinishReason.ERROR,
        stop_id=sequence.stop_id,
        error=sequence.error,
        prompt_len=sequence.prompt_len,
        cached_tokens=sequence.cached_tokens,
        created_tokens=sequence.created_tokens,
        queue_s=(now_s if slot_s is None else slot_s) - sequence.arrival_s,
        prefill_s=0.0 if slot_s is None else (now_s if first_s is None else first_s) - slot_s,
        decode_s=0.0 if first_s is None else now_s - first_s,
    )
