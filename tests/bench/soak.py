"""soak: mixed load for many minutes, with cancels and bad requests; afterwards nothing may be held and memory be flat.

Counts every outcome that is not the expected one. Resident memory of every process is sampled and, from the settling
time on, fitted with a line. When the load has ended, pages, slots and segments in use are read from ``/metrics``.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import click
import httpx
import psutil

from appliance.bench.report import Findings, Result
from appliance.bench.runner import BenchContext, BenchError
from appliance.bench.served import Served, build_store, serving
from appliance.bench.statistics import slope
from tests.bench.leftovers import by_kind, held_after, zero
from tests.bench.soak_load import Load

OPTIONS: Sequence[click.Parameter] = [
    click.Option(["--minutes"], type=click.FloatRange(0.05, 1440), default=30.0, show_default=True, help="Load."),
    click.Option(
        ["--connections"], type=click.IntRange(1, 256), default=12, show_default=True, help="Clients at once."
    ),
    click.Option(
        ["--settle-minutes"], type=click.FloatRange(0), default=5.0, show_default=True, help="Left out of slopes."
    ),
    click.Option(["--seed"], type=int, default=1, show_default=True, help="Of the requests."),
    click.Option(["--workers"], type=click.IntRange(1, 64), help="API worker processes; default: as configured."),
]

SAMPLE_S = 5.0
MIN_SAMPLES = 6
_MIB = 1024 * 1024
_HELD = ("zccp_requests_running", "zccp_requests_waiting", "zccp_kv_pages_used", "zccp_segments_used")


@dataclass(slots=True)
class Memory:
    """Resident bytes of every process of the appliance over time, by name."""

    at_s: list[float] = field(default_factory=list)
    rss: dict[str, list[float]] = field(default_factory=dict)

    def slopes(self, from_s: float) -> dict[str, float]:
        """MiB a minute of each process, over the samples from ``from_s`` on; empty with too few of them."""
        first = next((index for index, at_s in enumerate(self.at_s) if at_s >= from_s), len(self.at_s))
        if len(self.at_s) - first < MIN_SAMPLES:
            return {}
        minutes = [at_s / 60 for at_s in self.at_s[first:]]
        return {name: slope(minutes, [v / _MIB for v in values[first:]]) for name, values in self.rss.items()}


def run(
    context: BenchContext,
    *,
    minutes: float,
    connections: int,
    settle_minutes: float,
    seed: int,
    workers: int | None,
    clock: Callable[[], float] = time.monotonic,
) -> Findings:
    """Load the appliance, then look at what is left.

    Raises:
        BenchError: the appliance does not start, or ends under load.
    """
    context.progress("building what is missing", 0, 1)
    build_store(context.config, {})
    overrides = {"server": {"workers": workers}} if workers else {}
    with serving(context.config, overrides) as served:
        load = Load(served.url, served.model, seed)
        memory = asyncio.run(_loaded(context, served, load, minutes * 60, connections, clock))
        slots, waiting, pages, segments = held_after(served, _HELD, clock).values()
        counts = served.metrics()
    errors = load.unexpected
    results = [
        zero("unexpected_errors", sum(errors.values()), "errors"),
        zero("pages_leaked", pages, "pages"),
        zero("segments_leaked", segments, "segments"),
        zero("slots_leaked", slots + waiting, "sequences"),
    ]
    notes = [
        f"{sum(load.done.values())} requests in {minutes:g} minutes, {connections} connections: {by_kind(load.done)}"
    ]
    notes.append(
        f"preemptions {counts['zccp_preemptions_total']:g}, compilations {counts['zccp_compilations_total']:g}"
    )
    if errors:
        notes.append(f"unexpected: {by_kind(errors)}")
    slopes = memory.slopes(settle_minutes * 60)
    if slopes:
        values = list(slopes.values())
        ends = (min(values), max(values))
        fitted = sum(at_s >= settle_minutes * 60 for at_s in memory.at_s)
        results.append(Result("rss_slope_mb_per_min", max(values), "MiB/min", fitted, ends, 0.5, "<="))
        notes.append("slopes in MiB/min: " + ", ".join(f"{name} {value:+.3f}" for name, value in slopes.items()))
    else:
        needed = settle_minutes + MIN_SAMPLES * SAMPLE_S / 60
        notes.append(f"rss_slope_mb_per_min: not measured, {minutes:g} minutes are less than the {needed:g} it needs")
    last = ", ".join(f"{name} {values[-1] / _MIB:.0f}" for name, values in memory.rss.items())
    notes.append(f"resident MiB at the end: {last}")
    return Findings(tuple(results), tuple(notes))


async def _loaded(
    context: BenchContext, served: Served, load: Load, length_s: float, connections: int, clock: Callable[[], float]
) -> Memory:
    """Run all clients for ``length_s`` and sample memory meanwhile."""
    processes = named_processes(served.pid)
    memory = Memory(rss={name: [] for name in processes})
    began_s = clock()
    limits = httpx.Limits(max_connections=connections * 2)
    async with httpx.AsyncClient(base_url=served.url, timeout=300, limits=limits) as client:
        clients = [
            asyncio.create_task(load.client(client, number, lambda: clock() - began_s < length_s))
            for number in range(connections)
        ]
        while not all(task.done() for task in clients):
            passed_s = clock() - began_s
            context.progress("mixed load, seconds", round(min(passed_s, length_s)), round(length_s))
            if passed_s <= length_s:
                _sample(memory, processes, passed_s)
            await asyncio.wait(clients, timeout=SAMPLE_S)
        await asyncio.gather(*clients)
    return memory


def named_processes(pid: int) -> dict[str, psutil.Process]:
    """The processes of an appliance by the names of their assignments; the main process is ``main``."""
    main = psutil.Process(pid)
    named = {"main": main}
    for child in main.children(recursive=True):
        assignment = next((part for part in reversed(child.cmdline()) if part.endswith(".json")), f"{child.pid}")
        named[assignment.rpartition("/")[2].removesuffix(".json")] = child
    return named


def _sample(memory: Memory, processes: Mapping[str, psutil.Process], passed_s: float) -> None:
    try:
        sizes = {name: float(process.memory_info().rss) for name, process in processes.items()}
    except psutil.NoSuchProcess as error:
        raise BenchError(f"a process of the appliance ended under load after {passed_s:.0f} s: {error}") from error
    memory.at_s.append(passed_s)
    for name, size in sizes.items():
        memory.rss[name].append(size)
