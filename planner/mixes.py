"""Mixes: what requests of a workload look like, and how much of what a plan computes for them is padding.

Owns the drawing of requests from a mix and the simulation that drives the real scheduler over them. Reads no clock and
never imports jax: time is counted in steps, and every program is taken to do what its bucket says.

A launch computes every row of a decode bucket and every id of a prefill bucket; useful are the rows of sequences that
decode and the ids of prompts. Page tables are wider than most sequences, too, but their width is computed only where
attention goes through XLA: then the positions of all rows are counted beside.
"""

import random
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from planner.buckets import Bucket, Phase, round_up
from planner.pages import PagePool
from planner.plan import Plan
from planner.prefixes import PrefixSettings
from planner.schedule import Scheduler
from planner.schedule_values import Batch, SchedulerSettings
from planner.sequence import Sampling, Sequence

_P99 = 0.99


class MixError(ValueError):
    """A document is no mix; the message says what is missing or wrong."""


@dataclass(frozen=True, slots=True)
class Mix:
    """A workload.

    ``prompt`` and ``output`` are quantiles of lengths in ids, pairs of a share from 0 to 1 and a length; between two
    pairs the logarithm of the length grows evenly. ``load`` is how much of the scarcest resource of a plan (slots, ids
    of prompts a step, or pages) requests take on average, as they come one by one at random; 0 means that all are there
    at the start. ``source`` says where the lengths come from.
    """

    name: str
    description: str
    source: str
    seed: int
    requests: int
    load: float
    prompt: tuple[tuple[float, int], ...]
    output: tuple[tuple[float, int], ...]

    @classmethod
    def from_json(cls, name: str, document: Mapping[str, Any]) -> "Mix":
        """Read a mix.

        Raises:
            MixError: a field is missing, unknown or out of range.
        """
        try:
            fields = dict(document)
            for key in ("prompt", "output"):
                fields[key] = tuple((float(share), int(length)) for share, length in fields[key])
            mix = cls(name=name, **fields)
        except (KeyError, TypeError, ValueError) as error:
            raise MixError(f"mix {name}: {error}") from error
        for key in ("prompt", "output"):
            pairs: tuple[tuple[float, int], ...] = getattr(mix, key)
            rising = all(a[0] < b[0] and 0 < a[1] <= b[1] for a, b in pairwise(pairs))
            if len(pairs) < 2 or (pairs[0][0], pairs[-1][0]) != (0, 1) or not rising:
                raise MixError(f"mix {name}: {key} must be rising pairs of a share, from 0 to 1, and a length above 0")
        if mix.requests <= 0 or not 0 <= mix.load <= 1:
            raise MixError(f"mix {name}: requests {mix.requests} must be above 0 and load {mix.load} within 0..1")
        return mix

    def draw(self) -> list[tuple[int, int]]:
        """Prompt and output length of every request; the same at every call."""
        source = random.Random(self.seed)  # noqa: S311 - a workload, not a secret
        return [(_quantile(self.prompt, source), _quantile(self.output, source)) for _ in range(self.requests)]


@dataclass(frozen=True, slots=True)
class Waste:
    """What a simulation counted.

    ``mean`` is the share of computed ids and rows that nobody asked for; ``p99`` the share within a launch that 99 % of
    what is computed does not pass. ``table_mean`` is the same as ``mean`` of positions in page tables, 0 where their
    width is not computed. ``refused`` requests are longer than the plan's context.
    """

    mix: str
    mean: float
    p99: float
    table_mean: float
    launches: int
    computed: int
    useful: int
    refused: int


def simulate(plan: Plan, mix: Mix) -> Waste:
    """Run a mix through the scheduler of a plan and count what its launches pad."""
    return _waste(mix.name, [_run(plan, mix)])


def simulate_all(plan: Plan, mixes: Iterable[Mix]) -> tuple[Waste, ...]:
    """The same for several mixes, and at the end all of them together, named ``all``."""
    counts = {mix.name: _run(plan, mix) for mix in mixes}
    each = [_waste(name, [count]) for name, count in counts.items()]
    return (*each, _waste("all", list(counts.values())))


@dataclass(frozen=True, slots=True)
class _Counts:
    """What one run counted: computed and useful of every launch, of table positions together, and requests left out."""

    launches: list[tuple[int, int]]
    positions: tuple[int, int]
    refused: int


def _run(plan: Plan, mix: Mix) -> _Counts:
    drawn = mix.draw()
    capacity = min(plan.context, plan.num_pages * plan.page_size)
    lengths = [(prompt, output) for prompt, output in drawn if prompt + output <= capacity]
    pool = PagePool(plan.num_pages, plan.page_size, plan.context_devices, plan.shard_pages)
    settings = SchedulerSettings(
        prefill_budget=plan.prefill_budget,
        max_waiting=len(lengths) + 1,
        max_waiting_tokens=sum(map(sum, lengths)) + 1,
        prefixes=PrefixSettings(reuse=False),
    )
    run = _Steps(Scheduler(plan.lattice, pool, settings), with_tables=plan.attention == "xla")
    arrivals = deque(_arrivals(plan, mix, lengths))
    step = 0
    while arrivals or run.scheduler.num_live:
        while arrivals and arrivals[0][0] <= step:
            _, sequence = arrivals.popleft()
            refusal = run.scheduler.submit([sequence])
            assert refusal is None, refusal
        step = step + 1 if run.scheduler.num_live else int(arrivals[0][0]) + 1
        run.step(float(step))
    return _Counts(run.launches, (run.computed_positions, run.useful_positions), refused=len(drawn) - len(lengths))


def _quantile(pairs: tuple[tuple[float, int], ...], source: random.Random) -> int:
    at = source.random()
    for (low, short), (high, long) in pairwise(pairs):
        if at <= high:
            return round(short * (long / short) ** ((at - low) / (high - low)))
    return pairs[-1][1]


def _arrivals(plan: Plan, mix: Mix, lengths: list[tuple[int, int]]) -> list[tuple[float, Sequence]]:
    """Every request with the step at which it comes, in order."""
    source, now = random.Random(mix.seed + 1), 0.0  # noqa: S311
    rate = _rate(plan, lengths) * mix.load if lengths else 0.0
    arrivals: list[tuple[float, Sequence]] = []
    for key, (prompt, output) in enumerate(lengths):
        now += source.expovariate(rate) if rate else 0.0
        sequence = Sequence(
            key=key,
            request_id=str(key),
            tenant=mix.name,
            ids=[0] * prompt,
            prompt_len=prompt,
            sampling=Sampling(max_tokens=output),
            arrival_s=now,
        )
        arrivals.append((now, sequence))
    return arrivals


def _rate(plan: Plan, lengths: list[tuple[int, int]]) -> float:
    """Requests a step that the scarcest of slots, prefill and pages can take."""
    prompt = sum(p for p, _ in lengths) / len(lengths)
    stay = sum(-(-p // plan.prefill_budget) + output for p, output in lengths) / len(lengths)
    held = sum(p + output for p, output in lengths) / len(lengths) * stay
    return min(plan.slots / stay, plan.prefill_budget / prompt, plan.num_pages * plan.page_size / held)


class _Steps:
    """A scheduler without an engine: launches are counted, and every sampled id is 1."""

    __slots__ = ("_in_flight", "_with_tables", "computed_positions", "launches", "scheduler", "useful_positions")

    def __init__(self, scheduler: Scheduler, *, with_tables: bool) -> None:
        self.scheduler = scheduler
        self._with_tables = with_tables
        self._in_flight: list[Sequence] = []
        self.launches: list[tuple[int, int]] = []
        self.computed_positions = self.useful_positions = 0

    def step(self, now_s: float) -> None:
        """Plan a step and commit the one before, as the engine does."""
        batch = self.scheduler.next_batch(now_s)
        earlier, self._in_flight = self._in_flight, self._launch(batch)
        self.scheduler.commit(earlier, [1] * len(earlier), now_s)
        self.scheduler.take_finished()

    def _launch(self, batch: Batch) -> list[Sequence]:
        lattice, pool = self.scheduler.lattice, self.scheduler.pool
        if batch.decode:
            rows, pages = max(s.slot for s in batch.decode) + 1, max(len(s.pages) for s in batch.decode)
            bucket = round_up(lattice, Phase.DECODE, rows, rows, pages)
            self._count(bucket, bucket.slots, len(batch.decode), sum(s.computed for s in batch.decode))
        if batch.prefill:
            tokens, pages = sum(c.count for c in batch.prefill), pool.pages_for(max(c.end for c in batch.prefill))
            bucket = round_up(lattice, Phase.PREFILL, len(batch.prefill), tokens, pages)
            self._count(bucket, bucket.chunk, tokens, sum(c.start for c in batch.prefill))
        return [*batch.decode, *(chunk.sequence for chunk in batch.prefill if chunk.samples)]

    def _count(self, bucket: Bucket, computed: int, useful: int, positions: int) -> None:
        self.launches.append((computed, useful))
        if self._with_tables:
            self.computed_positions += bucket.slots * bucket.width * self.scheduler.pool.page_size
            self.useful_positions += positions


def _waste(name: str, counts: list[_Counts]) -> Waste:
    """The sums of all launches."""
    launches = [launch for count in counts for launch in count.launches]
    computed, useful = (sum(launch[place] for launch in launches) for place in (0, 1))
    table, seen = (sum(count.positions[place] for count in counts) for place in (0, 1))
    return Waste(
        mix=name,
        mean=1 - useful / computed if computed else 0.0,
        p99=_weighted_p99(launches),
        table_mean=1 - seen / table if table else 0.0,
        launches=len(launches),
        computed=computed,
        useful=useful,
        refused=sum(count.refused for count in counts),
    )


def _weighted_p99(launches: list[tuple[int, int]]) -> float:
    """The waste that launches with 99 % of what is computed do not pass."""
    left = _P99 * sum(computed for computed, _ in launches)
    for waste, computed in sorted((1 - useful / computed, computed) for computed, useful in launches):
        left -= computed
        if left <= 0:
            return waste
    return 0.0
