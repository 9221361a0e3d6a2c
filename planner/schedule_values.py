"""What goes into a schedule and what comes out of it: its bounds, and a step's work.

Owns the values; ``planner.schedule`` decides.
"""

from dataclasses import dataclass, field

from planner.host_tier import Fetch, Save, Store
from planner.loading import Load
from planner.prefixes import PrefixSettings
from planner.searching import Search
from planner.sequence import Chunk, Sequence


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """Bounds of the schedule.

    ``prefill_budget`` bounds decode rows and prompt ids of a step together while anything decodes, which bounds the
    time between two ids of a stream. ``max_waiting`` counts sequences and ``max_waiting_tokens`` their ids.
    ``max_overtakes`` is how many sequences may be admitted past one that does not fit. Chunks start at multiples of
    ``chunk_align`` positions. ``search_s`` is the longest time that a sequence waits while its pages are looked for in
    the tiers below host memory, 0 without any. ``prefixes`` says what pages are shared.

    Raises:
        ValueError: a bound is below its least value.
    """

    prefill_budget: int
    max_waiting: int = 1024
    max_waiting_tokens: int = 1 << 20
    max_overtakes: int = 64
    chunk_align: int = 16
    search_s: float = 0.0
    prefixes: PrefixSettings = field(default_factory=PrefixSettings)

    def __post_init__(self) -> None:
        for name in ("prefill_budget", "max_waiting", "max_waiting_tokens", "chunk_align"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0")
        for name in ("max_overtakes", "search_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 0 or more")
        if self.prefixes.lead % self.chunk_align:
            raise ValueError(f"lead is {self.prefixes.lead}; it must be a multiple of chunk_align, {self.chunk_align}")


@dataclass(slots=True)
class Batch:
    """One step's work.

    ``entered`` have a slot since this step and ``grown`` one page more; both must be told to whoever packs rows.
    ``saves`` are read out of the pool before anything else, then ``loads`` are written, then launches run; ``stores``,
    ``fetches`` and ``searches`` are begun.
    """

    decode: list[Sequence] = field(default_factory=list[Sequence])
    prefill: list[Chunk] = field(default_factory=list[Chunk])
    entered: list[Sequence] = field(default_factory=list[Sequence])
    grown: list[Sequence] = field(default_factory=list[Sequence])
    saves: list[Save] = field(default_factory=list[Save])
    stores: list[Store] = field(default_factory=list[Store])
    loads: list[Load] = field(default_factory=list[Load])
    fetches: list[Fetch] = field(default_factory=list[Fetch])
    searches: list[Search] = field(default_factory=list[Search])
    preempted: int = 0

    def __bool__(self) -> bool:
        return bool(self.decode or self.prefill)
