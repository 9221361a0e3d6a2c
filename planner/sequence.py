"""Sequence: one stream of ids with its sampling, its pages and its place in the schedule.

Owns the state that the scheduler moves and the engine publishes. Imports neither jax nor numpy and reads no clock:
times come in as arguments, in seconds on a monotonic clock.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from planner.ids import Ids


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


class Status(StrEnum):
    """Where a sequence is: waiting (also after preemption), running in a slot, or finished."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a sequence's next id is chosen.

    ``temperature`` 0 is greedy. ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 are off. ``repetition_penalty`` divides
    positive and multiplies negative logits of ids seen in prompt or output; presence and frequency look at the output
    only. ``stop_ids`` already contains the model's end-of-sequence ids unless the request ignores them.
    ``top_logprobs`` -1 asks for no log-probabilities, 0 for the chosen id's alone. ``seed`` is 64 bits.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    min_tokens: int = 0
    stop_ids: frozenset[int] = frozenset()
    top_logprobs: int = -1

    @property
    def penalised(self) -> bool:
        """Whether any penalty changes the logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(slots=True, eq=False)
class Sequence:
    """One stream of ids.

    ``key`` is the id of the segment that carries it. ``ids`` holds the prompt and every completion id read back so far.
    ``computed`` counts the positions whose keys and values are in pages or will be once the steps already dispatched
    have run; ``in_flight`` counts completion ids dispatched and not yet read. ``slot`` is -1 without one.
    ``order`` is its place in the order of submission: lower is older. ``expected_len`` is how many completion ids a
    prediction expects: advice for admission, any float, None without one.

    ``precious`` says whether its prompt's pages are to be cached rather than others. ``chain`` has the names of its
    full pages as far as they are known; ``kept`` of its pages have been named or shared, and those up to ``promised``
    it is computing for others too. ``resume_at`` above 0: pages hold what is before it, and only the first positions,
    which its slot needs, are computed again. ``cached_tokens`` counts prompt ids whose keys and values it did not
    compute, ``created_tokens`` those that it computed and that others can have now.
    """

    key: int
    request_id: str
    tenant: str
    ids: Ids
    prompt_len: int
    sampling: Sampling
    arrival_s: float
    deadline_s: float | None = None
    order: int = 0
    expected_len: float | None = None
    precious: bool = False
    status: Status = Status.WAITING
    pages: list[int] = field(default_factory=list[int])
    computed: int = 0
    in_flight: int = 0
    slot: int = -1
    chain: list[bytes] = field(default_factory=list[bytes])
    kept: int = 0
    promised: int = 0
    resume_at: int = 0
    cached_tokens: int = 0
    created_tokens: int = 0
    preemptions: int = 0
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    finish_reason: FinishReason | None = None
    stop_id: int | None = None
    error: str = ""

    @property
    def completion_len(self) -> int:
        """Completion ids read back so far."""
        return len(self.ids) - self.prompt_len

    @property
    def scheduled_len(self) -> int:
        """Length once everything dispatched has been read."""
        return len(self.ids) + self.in_flight

    @property
    def max_len(self) -> int:
        """Most ids the sequence may ever hold."""
        return self.prompt_len + self.sampling.max_tokens


@dataclass(frozen=True, slots=True)
class Chunk:
    """Part of a sequence's ids in one prefill launch: ``count`` of them from position ``start`` on.

    ``samples`` is true for the last chunk: its last position yields the next id.
    """

    sequence: Sequence
    start: int
    count: int
    samples: bool

    @property
    def end(self) -> int:
        """Position after the last one."""
        return self.start + self.count
