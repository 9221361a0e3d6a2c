"""What the engine's loop needs of its surroundings: programs, a gateway, metrics; and the values that cross.

Owns the seam types of ``engine``. Nothing here computes, and nothing here knows jax: arrays are whatever
``numpy.asarray`` reads, and the device state is opaque.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy.typing as npt

from planner.batch import Floats, Ints
from planner.buckets import Bucket, Lattice
from planner.host_tier import Fetch, Save, Store
from planner.prefixes import ReuseCounts
from planner.searching import Search
from planner.sequence import FinishReason, Sequence

# ---------------------------------------------------------------------- programs


class StepOutput(Protocol):
    """What a launch sampled; rows are those of its ``ints``. Rows without a sample may hold anything."""

    @property
    def ids(self) -> npt.ArrayLike:
        """int32 [rows]."""
        ...

    @property
    def logprob(self) -> npt.ArrayLike:
        """float32 [rows]: log-probability of the sampled id."""
        ...

    @property
    def top_ids(self) -> npt.ArrayLike:
        """int32 [rows, top]: the likeliest ids, best first."""
        ...

    @property
    def top_logprobs(self) -> npt.ArrayLike:
        """float32 [rows, top]: their log-probabilities."""
        ...


class DecodeProgram(Protocol):
    """One id for every row; a row's number is its slot."""

    def __call__(self, weights: object, state: object, ints: Ints, floats: Floats, /) -> tuple[object, StepOutput]:
        """Dispatch the program; the state is donated, and the new one comes back."""
        ...


class PrefillProgram(Protocol):
    """Chunks of prompts, one a row."""

    def __call__(
        self, weights: object, state: object, tokens: npt.ArrayLike, ints: Ints, floats: Floats, /
    ) -> tuple[object, StepOutput]:
        """Dispatch the program; the state is donated, and the new one comes back."""
        ...


class SetSlotProgram(Protocol):
    """Write the counts row and the bias row of one slot."""

    def __call__(self, state: object, slot: Ints, counts: Ints, bias: Floats, /) -> object:
        """Dispatch the program; the state is donated, and the new one comes back."""
        ...


class PageCopy(Protocol):
    """What a page held, in an array of its own on the device; ``numpy.asarray`` waits for it."""

    def copy_to_host_async(self) -> None:
        """Begin to copy it to the host; returns at once."""
        ...

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]: ...


class ReadPagesProgram(Protocol):
    """Copy pages out of the pool."""

    def __call__(self, state: object, ids: Ints, /) -> tuple[object, Many[PageCopy]]:
        """Dispatch the program; the state is donated, and the new one comes back with a copy an id."""
        ...


class WritePagesProgram(Protocol):
    """Put contents into pages of the pool."""

    def __call__(self, state: object, ids: Ints, /, *contents: object) -> object:
        """Dispatch the program, with a content an id; the state is donated, and the new one comes back."""
        ...


@dataclass(frozen=True, slots=True)
class ProgramSet:
    """The compiled programs of one plan.

    Those that move pages take ``moved_pages`` at a time; they are None, and that is 0, where pages stay in the pool.
    """

    decode: Mapping[Bucket, DecodeProgram]
    prefill: Mapping[Bucket, PrefillProgram]
    set_slot: SetSlotProgram
    read_pages: ReadPagesProgram | None = None
    write_pages: WritePagesProgram | None = None
    moved_pages: int = 0

    def missing(self, lattice: Lattice) -> list[str]:
        """Names of the lattice's buckets that have no program."""
        return [b.name for b in lattice.buckets() if b not in self.decode and b not in self.prefill]


# ---------------------------------------------------------------------- tiers


class Found(NamedTuple):
    """The end of a search: the contents of its first names, up to one that is nowhere."""

    number: int
    contents: Many[object]


class Moved(NamedTuple):
    """What has ended, oldest first.

    Whether each save and store went well, what each fetch gave, None if nothing, and what each search found.
    """

    saved: list[bool]
    contents: list[object | None]
    found: list[Found]


class PageMover(Protocol):
    """Copies pages between the device and the host tier, in the order of the calls and in its own time; never raises.

    Called on the engine's thread; only ``moved`` waits.
    """

    def save(self, copies: Many[PageCopy], saves: Many[Save]) -> None:
        """Keep what pages held; the copies may be computed later."""
        ...

    def store(self, stores: Many[Store]) -> None:
        """Keep what a search has found."""
        ...

    def fetch(self, fetches: Many[Fetch]) -> None:
        """Bring contents to the device."""
        ...

    def search(self, searches: Many[Search]) -> None:
        """Look for contents in the tiers below."""
        ...

    def moved(self, wait_s: float) -> Moved:
        """What has ended since the last call; waits up to ``wait_s`` for something to end."""
        ...

    def close(self) -> None:
        """Nothing more is asked."""
        ...


class NoMover:
    """Where there is no tier: nothing is ever asked."""

    def save(self, copies: Many[PageCopy], saves: Many[Save]) -> None:
        """There is no place to keep them."""

    def store(self, stores: Many[Store]) -> None:
        """Nothing was found."""

    def fetch(self, fetches: Many[Fetch]) -> None:
        """There is nothing to bring."""

    def search(self, searches: Many[Search]) -> None:
        """There is nowhere to look."""

    def moved(self, wait_s: float) -> Moved:  # noqa: ARG002 - nothing is awaited
        """Nothing ends."""
        return Moved([], [], [])

    def close(self) -> None:
        """There is nothing to close."""


# ---------------------------------------------------------------------- gateway


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request: its sequences share a prompt, and the first one's key names the request."""

    sequences: tuple[Sequence, ...]


@dataclass(frozen=True, slots=True)
class Cancellation:
    """Keys of sequences that nobody waits for any more; unknown and finished ones are ignored."""

    keys: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """How a sequence ended.

    ``stop_id`` is the id that ended it, which is not among the published ids. Of the prompt, ``cached_tokens`` were
    reused and ``created_tokens`` computed and left for others. Times in seconds: from arrival to slot,
    from slot to first id, from first id to the end; 0 for what it never reached.
    """

    reason: FinishReason
    stop_id: int | None
    error: str
    prompt_len: int
    cached_tokens: int
    created_tokens: int
    queue_s: float
    prefill_s: float
    decode_s: float


class Emission(NamedTuple):
    """News of one sequence in one step; a tuple, since a step makes one for every row.

    ``ids`` are the new completion ids and ``completion_len`` counts all up to them. ``logprobs`` has one record a new
    id when the request asked for them: pairs of id and log-probability, the sampled id first, then the likeliest.
    ``finish`` comes once, with the last emission of a sequence.
    """

    key: int
    completion_len: int
    ids: tuple[int, ...] = ()
    logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    finish: Finished | None = None


@dataclass(frozen=True, slots=True)
class EngineReport:
    """The engine's state after a step; counts are sequences, ids and pages.

    ``last_step_s`` is when the loop last came round, on the engine's clock. ``reason`` explains a state other than
    ``ready``. ``cached_pages`` are among the free ones, and ``reuse`` counts from the start.
    """

    state: Literal["ready", "draining", "lost"]
    reason: str
    running: int
    waiting: int
    waiting_tokens: int
    free_pages: int
    total_pages: int
    cached_pages: int
    reuse: ReuseCounts
    last_step_s: float


class Gateway(Protocol):
    """Where requests come from and ids go to. Called on the engine's thread; only ``receive`` blocks."""

    def receive(self, timeout_s: float) -> list[Arrival | Cancellation]:
        """What came since the last call, in order; waits up to ``timeout_s`` for the first."""
        ...

    def admitted(self, key: int) -> None:
        """The request is in the queue."""
        ...

    def refused(self, key: int, kind: str, message: str, retry_after_s: float) -> None:
        """The request is not taken. ``kind``: overloaded | draining | too_long | stale."""
        ...

    def publish(self, emissions: list[Emission]) -> None:
        """News of a step, at most one emission a sequence; not called without any."""
        ...

    def report(self, report: EngineReport) -> None:
        """The state after every step."""
        ...


# ---------------------------------------------------------------------- metrics


class EngineMetrics(Protocol):
    """What a step counts. Called on the engine's thread, so it must be cheap."""

    def launched(self, bucket: Bucket, rows: int, tokens: int) -> None:
        """A program was dispatched with so many rows and ids in use."""
        ...

    def stepped(self, host_s: float, prompt_tokens: int, generated_tokens: int, preemptions: int) -> None:
        """A step is over; ``host_s`` leaves out the time spent waiting for the device and for requests."""
        ...

    def reported(self, report: EngineReport) -> None:
        """The state after a step."""
        ...


class NoMetrics:
    """Counts nothing."""

    def launched(self, bucket: Bucket, rows: int, tokens: int) -> None:
        """Ignore a launch."""

    def stepped(self, host_s: float, prompt_tokens: int, generated_tokens: int, preemptions: int) -> None:
        """Ignore a step."""

    def reported(self, report: EngineReport) -> None:
        """Ignore a report."""


# ---------------------------------------------------------------------- prediction


class Forecast(Protocol):
    """How long completions are going to be. Called on the engine's thread, so it must be quick; it never raises."""

    def expect(self, choices: Many[Sequence]) -> float | None:
        """Completion ids that each choice of a request just queued is expected to get; None: nothing is known."""
        ...

    def ended(self, sequence: Sequence) -> None:
        """A sequence that was asked about has ended, whatever the reason."""
        ...

    def close(self) -> None:
        """The engine asks no more."""
        ...


class NoForecast:
    """Expects nothing."""

    def expect(self, choices: Many[Sequence]) -> float | None:
        """Nothing is known."""

    def ended(self, sequence: Sequence) -> None:
        """Ignore an end."""

    def close(self) -> None:
        """There is nothing to close."""
