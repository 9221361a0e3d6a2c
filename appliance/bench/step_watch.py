"""Watch: where the host's time within one engine step goes, told at the borders between its parts.

Owns the watch and thin doubles of the engine's neighbours (gateway, scheduler, programs) that look at it when they are
called and when they return. Every moment of a step belongs to exactly one phase. The doubles change nothing; each look
costs some tenths of a microsecond. Never imports jax.

``receive``: what came over the socket, and its way to the scheduler. ``schedule``: the next batch. ``pack``: its rows
into arrays. ``dispatch``: the calls of programs. ``read``: ids of the step before to the host. ``commit``: their way
into sequences, and the news made of them. ``publish``: the news into segments and to workers. ``count``: metrics.
"""

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Literal

import numpy.typing as npt

from appliance.engine_ports import (
    Arrival,
    Cancellation,
    Emission,
    EngineReport,
    Gateway,
    PrefillProgram,
    ProgramSet,
    SetSlotProgram,
    StepOutput,
)
from planner.batch import Floats, Ints
from planner.buckets import Bucket
from planner.schedule import Scheduler
from planner.schedule_values import Batch
from planner.sequence import Sequence

Phase = Literal["receive", "schedule", "pack", "dispatch", "read", "commit", "publish", "count"]
PHASES: tuple[Phase, ...] = ("receive", "schedule", "pack", "dispatch", "read", "commit", "publish", "count")


@dataclass(slots=True)
class Step:
    """One step: seconds by phase, seconds of its thread on a CPU, and what it launched and published."""

    phases: dict[Phase, float]
    cpu_s: float = 0.0
    decoded: int = 0
    """Rows of the decode launch."""
    prefilled: bool = False
    """Whether there was a prefill launch."""

    @property
    def seconds(self) -> float:
        """The whole step."""
        return sum(self.phases.values())


class Watch:
    """Divides the time of a step among its phases; use ``begin``, the doubles, and ``end``."""

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, cpu_clock: Callable[[], float] = time.thread_time
    ) -> None:
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._last_s = self._cpu_s = 0.0
        self.step = Step(dict.fromkeys(PHASES, 0.0))

    def begin(self) -> None:
        """A step begins."""
        self.step = Step(dict.fromkeys(PHASES, 0.0))
        self._cpu_s = self._cpu_clock()
        self._last_s = self._clock()

    def give(self, phase: Phase) -> None:
        """All that has passed since the last call, or the beginning, belongs to ``phase``."""
        now_s = self._clock()
        self.step.phases[phase] += now_s - self._last_s
        self._last_s = now_s

    def end(self) -> Step:
        """The step is over."""
        self.give("count")
        self.step.cpu_s = self._cpu_clock() - self._cpu_s
        return self.step


class WatchedGateway:
    """A gateway whose time is told."""

    def __init__(self, gateway: Gateway, watch: Watch) -> None:
        self._gateway = gateway
        self._watch = watch

    def receive(self, timeout_s: float) -> list[Arrival | Cancellation]:
        """Pass it on."""
        found = self._gateway.receive(timeout_s)
        self._watch.give("receive")
        return found

    def admitted(self, key: int) -> None:
        """Pass it on."""
        self._gateway.admitted(key)

    def refused(self, key: int, kind: str, message: str, retry_after_s: float) -> None:
        """Pass it on."""
        self._gateway.refused(key, kind, message, retry_after_s)

    def publish(self, emissions: list[Emission]) -> None:
        """Pass it on."""
        self._watch.give("commit")
        self._gateway.publish(emissions)
        self._watch.give("publish")

    def report(self, report: EngineReport) -> None:
        """Pass it on."""
        self._gateway.report(report)
        self._watch.give("publish")


class WatchedScheduler(Scheduler):
    """A scheduler whose time is told."""

    watch: Watch

    def next_batch(self, now_s: float) -> Batch:
        """Plan the next step."""
        self.watch.give("receive")
        batch = super().next_batch(now_s)
        self.watch.give("schedule")
        self.watch.step.decoded = len(batch.decode)
        self.watch.step.prefilled = bool(batch.prefill)
        return batch

    def commit(self, sequences: Many[Sequence], ids: Many[int], now_s: float) -> list[int]:
        """Apply sampled ids."""
        self.watch.give("read")
        return super().commit(sequences, ids, now_s)


class _WatchedOutput:
    """What a launch sampled; the reading of its ids begins when they are asked for."""

    __slots__ = ("_out", "_watch")

    def __init__(self, out: StepOutput, watch: Watch) -> None:
        self._out = out
        self._watch = watch

    @property
    def ids(self) -> npt.ArrayLike:
        self._watch.give("commit")
        return self._out.ids

    @property
    def logprob(self) -> npt.ArrayLike:
        return self._out.logprob

    @property
    def top_ids(self) -> npt.ArrayLike:
        return self._out.top_ids

    @property
    def top_logprobs(self) -> npt.ArrayLike:
        return self._out.top_logprobs


def watched_programs(programs: ProgramSet, watch: Watch) -> ProgramSet:
    """Programs whose time is told."""
    decode = {bucket: _watched_step(program, watch) for bucket, program in programs.decode.items()}
    prefill: Mapping[Bucket, PrefillProgram] = {
        bucket: _watched_step(program, watch) for bucket, program in programs.prefill.items()
    }
    return ProgramSet(decode=decode, prefill=prefill, set_slot=_watched_set_slot(programs.set_slot, watch))


def _watched_step(
    program: Callable[..., tuple[object, StepOutput]], watch: Watch
) -> Callable[..., tuple[object, StepOutput]]:
    def call(*arguments: object) -> tuple[object, StepOutput]:
        watch.give("pack")
        state, out = program(*arguments)
        watch.give("dispatch")
        return state, _WatchedOutput(out, watch)

    return call


def _watched_set_slot(program: SetSlotProgram, watch: Watch) -> SetSlotProgram:
    def call(state: object, slot: Ints, counts: Ints, bias: Floats, /) -> object:
        watch.give("pack")
        state = program(state, slot, counts, bias)
        watch.give("dispatch")
        return state

    return call
