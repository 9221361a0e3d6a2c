"""chaos: kill -9 of a worker or the engine at random moments under load; no request may be lost and nothing leak.

Lost is a request that hangs or whose answer looks finished and is not what the same request gives undisturbed. After
half of the kills everything must serve again before the next, which gives the times of recovery; the others hit
whatever lives. In the end segments, pages, files, processes and descriptors are compared with those before.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click
import httpx
import psutil

from appliance.bench.report import Findings, measured
from appliance.bench.runner import BenchContext, BenchError
from appliance.bench.served import Served, build_store, serving, sum_samples, tail
from appliance.host.segments import SHARED_MEMORY
from tests.bench.chaos_load import Load, make_asks
from tests.bench.leftovers import by_kind, held_after, zero

OPTIONS: Sequence[click.Parameter] = [
    click.Option(["--kills"], type=click.IntRange(1), default=200, show_default=True, help="How many."),
    click.Option(["--connections"], type=click.IntRange(1, 256), default=8, show_default=True, help="Clients at once."),
    click.Option(["--seed"], type=int, default=1, show_default=True, help="Of requests, victims and moments."),
]

WORKERS = 2
ENGINE_SHARE = 0.25
"""Share of the kills that take the engine."""
WAIT_SHARE = 0.5
"""Share of the kills after which everything must serve again before the next."""
MOST_PAUSE_S = 3.0
"""Kills come within this time after the last one, or after everything served again."""
RECOVERY_LIMIT_S = 120.0
POLL_S = 0.1


@dataclass(slots=True)
class Kills:
    """What was killed, and how long recovery took, by role."""

    victims: Counter[str] = field(default_factory=Counter[str])
    recovery_s: dict[str, list[float]] = field(default_factory=lambda: {"worker": [], "engine": []})


@dataclass(frozen=True, slots=True)
class Footprint:
    """What an appliance holds of its host: files of its run and of shared memory, processes, descriptors."""

    files: frozenset[str]
    processes: int
    descriptors: int


def run(
    context: BenchContext, *, kills: int, connections: int, seed: int, clock: Callable[[], float] = time.monotonic
) -> Findings:
    """Kill and look.

    Raises:
        BenchError: the appliance does not start, ends, or does not recover.
    """
    context.progress("building what is missing", 0, 1)
    build_store(context.config, {})
    with serving(context.config, {"server": {"workers": WORKERS}}) as served:
        load = Load(make_asks(served.model, seed), seed)
        done, before = asyncio.run(_chaos(context, served, load, kills, connections, seed, clock))
        held = held_after(served, ("zccp_segments_used", "zccp_kv_pages_used"), clock)
        after = footprint(served.pid)
    left = [path.name for path in SHARED_MEMORY.glob(f"zccp-{served.pid}-*")]
    extra = sorted(after.files - before.files) + left
    results = [
        zero("lost_requests", load.lost, "requests"),
        zero("leaked_segments", held["zccp_segments_used"], "segments"),
        zero("leaked_pages", held["zccp_kv_pages_used"], "pages"),
        zero("leaked_files", len(extra), "files"),
        zero("leaked_processes", after.processes - before.processes, "processes"),
        zero("leaked_descriptors", after.descriptors - before.descriptors, "descriptors"),
    ]
    results += [measured(f"{role}_recovery_s", times, "s") for role, times in done.recovery_s.items() if times]
    notes = [
        f"kills: {by_kind(done.victims)}",
        f"exchanges of {connections} clients: {by_kind(load.verdicts)}",
        *load.details[:20],
        *(f"left behind: {name}" for name in extra[:20]),
    ]
    return Findings(tuple(results), tuple(notes))


async def _chaos(
    context: BenchContext,
    served: Served,
    load: Load,
    kills: int,
    connections: int,
    seed: int,
    clock: Callable[[], float],
) -> tuple[Kills, Footprint]:
    """Learn the right answers, then load and kill; what was done, and the footprint before."""
    done, going = Kills(), True
    limits = httpx.Limits(max_connections=connections + 2)
    async with httpx.AsyncClient(base_url=served.url, timeout=RECOVERY_LIMIT_S, limits=limits) as http:
        context.progress("learning the right answers", 0, 1)
        await load.learn(http)
        before = footprint(served.pid)
        clients = [asyncio.create_task(load.client(http, number, lambda: going)) for number in range(connections)]
        draw = random.Random(seed)
        for number in range(kills):
            context.progress("kills under load", number, kills)
            await asyncio.sleep(draw.uniform(0.0, MOST_PAUSE_S))
            role = "engine" if draw.random() < ENGINE_SHARE else "worker"
            name = "engine" if role == "engine" else f"worker-{draw.randrange(WORKERS)}"
            await _kill(served, name, clock)
            done.victims[name] += 1
            if draw.random() < WAIT_SHARE or number == kills - 1:
                began_s = clock()
                await _recovered(served, number + 1, clock)
                done.recovery_s[role].append(clock() - began_s)
        going = False
        await asyncio.gather(*clients)
    return done, before


async def _kill(served: Served, name: str, clock: Callable[[], float]) -> None:
    """Kill the named child as soon as there is one."""
    deadline_s = clock() + RECOVERY_LIMIT_S
    while clock() < deadline_s:
        process = children(served.pid).get(name)
        if process is not None:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
            return
        await asyncio.sleep(POLL_S)
    raise BenchError(f"{name} was not started again within {RECOVERY_LIMIT_S:g} s; the log ends: {tail(served.log)}")


async def _recovered(served: Served, kills: int, clock: Callable[[], float]) -> None:
    """Wait until every killed process has a successor and all of them serve."""
    deadline_s = clock() + RECOVERY_LIMIT_S
    async with httpx.AsyncClient(base_url=served.url, timeout=10) as http:
        while clock() < deadline_s:
            try:
                counts = sum_samples((await http.get("/metrics")).raise_for_status().text)
            except httpx.HTTPError:
                counts = {}
            started_again = counts.get("zccp_restarts_total", 0) >= kills
            if started_again and (counts["zccp_workers_ready"], counts["zccp_engine_ready"]) == (WORKERS, 1):
                return
            await asyncio.sleep(POLL_S)
    raise BenchError(f"no recovery within {RECOVERY_LIMIT_S:g} s after kill {kills}; the log ends: {tail(served.log)}")


def children(pid: int) -> dict[str, psutil.Process]:
    """The living children of an appliance by the names of their assignments.

    Raises:
        BenchError: the appliance is gone.
    """
    named: dict[str, psutil.Process] = {}
    try:
        found = psutil.Process(pid).children()
    except psutil.NoSuchProcess as error:
        raise BenchError("the main process of the appliance ended") from error
    for child in found:
        try:
            assignment = Path(child.cmdline()[-1])
        except (psutil.NoSuchProcess, IndexError):
            continue  # it ends just now
        if assignment.suffix == ".json":
            named[assignment.stem] = child
    return named


def footprint(pid: int) -> Footprint:
    """What the appliance with the main process ``pid`` holds now.

    Raises:
        BenchError: the appliance is gone, or has no child.
    """
    living = children(pid)
    if "engine" not in living:
        raise BenchError("the appliance has no engine")
    folder = Path(living["engine"].cmdline()[-1]).parent
    files = {str(path.relative_to(folder)) for path in folder.rglob("*")}
    files |= {path.name for path in SHARED_MEMORY.glob(f"zccp-{pid}-*")}
    return Footprint(frozenset(files), len(living), psutil.Process(pid).num_fds())
