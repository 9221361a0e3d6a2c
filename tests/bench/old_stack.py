"""old-stack: nginx and zccp beside nginx, Gunicorn, Flask and ``transformers``, under open-loop load on the same cores.

Two arms. In the first both stacks run the model; in the second both run the same null model, so that what is left is
the cost of the layer around it: a model whose forward pass costs nothing, so that each stack's own way from id to id
counts. Requests leave at the moments of a Poisson process, and their times run from there.
Both stacks are up all the time and take turns; who waits does nothing. Ratios are theirs over ours, of turns that
belong together, so that above 1 zccp is better; of rates it is ours over theirs.
"""

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import click
import msgspec

from appliance.bench.report import Findings, Operator, Result, installed
from appliance.bench.runner import BenchContext, BenchError
from appliance.bench.served import build_store
from appliance.bench.statistics import median, quantile, spread
from appliance.model.library import ModelLibrary
from tests.bench.open_loop import OpenLoop, Outcome
from tests.bench.stacks import Stack, appliance, find_nginx, old_stack

WORKLOAD = Path(__file__).parent / "mixes" / "old_stack.json"
TIMEOUT_S = 30.0
LOAD, OVERLOAD = 0.8, 2.0
"""Of the old stack's sustained rate: where latencies are compared, and where errors are."""
SLOWER = 3.0
"""Times the unloaded p99 that a sustained rate may have."""
FAILED = 0.01
"""Share of errors that a sustained rate may have."""
IN_FLIGHT = 16
"""Requests at once, where memory is weighed."""
_HALVINGS = 4
_UNLOADED = 24
_LEAST_REQUESTS = 60
_MIB = 1024 * 1024
_LEAST_MB = 0.05
"""A request's memory below which weighing says nothing."""
TARGETS: Mapping[str, tuple[float, Operator]] = {
    "p50_ratio": (7.4, ">="),
    "p99_ratio": (26.0, ">="),
    "rate_ratio": (7.2, ">="),
    "error_ratio": (38.0, ">="),
    "memory_per_request_ratio": (11.9, ">="),
    "layer_p50_ratio": (7.4, ">="),
    "layer_p99_ratio": (26.0, ">="),
    "p99_growth_5x": (1.4, "<="),
}

OPTIONS: Sequence[click.Parameter] = [
    click.Option(["--repeats"], type=click.IntRange(1, 20), default=3, show_default=True, help="Turns that count."),
    click.Option(["--seconds"], type=click.FloatRange(2, 600), default=30.0, show_default=True, help="Of one turn."),
    click.Option(["--arm", "arms"], multiple=True, type=click.Choice(("model", "null")), help="Default: both."),
    click.Option(["--workers"], type=click.IntRange(1, 64), help="Of either stack; default: one a core."),
]


@dataclass(frozen=True, slots=True)
class Turn:
    """What one stack did under one load; times in seconds. A request without an answer counts with all of its time."""

    p50_s: float
    p99_s: float
    errors: int
    requests: int

    @classmethod
    def of(cls, outcomes: Sequence[Outcome]) -> "Turn":
        """Sum up.

        Raises:
            BenchError: there was no request.
        """
        if not outcomes:
            raise BenchError("no request was due in a turn; raise --seconds")
        times = [outcome.took_s for outcome in outcomes]
        errors = sum(bool(outcome.problem) for outcome in outcomes)
        return cls(quantile(times, 0.5), quantile(times, 0.99), errors, len(outcomes))

    @property
    def error_share(self) -> float:
        """Share of requests without a right answer."""
        return self.errors / self.requests


@dataclass(slots=True)
class Arm:
    """What one arm found."""

    rates: dict[str, float] = field(default_factory=dict[str, float])
    unloaded: dict[str, Turn] = field(default_factory=dict[str, Turn])
    compared: list[tuple[Turn, Turn]] = field(default_factory=list[tuple[Turn, Turn]])
    overloaded: list[tuple[Turn, Turn]] = field(default_factory=list[tuple[Turn, Turn]])
    growth: list[tuple[Turn, Turn]] = field(default_factory=list[tuple[Turn, Turn]])


def run(context: BenchContext, *, repeats: int, seconds: float, arms: Sequence[str], workers: int | None) -> Findings:
    """Start both stacks, find what each sustains, and compare.

    Raises:
        BenchUseError: nginx or a package of the old stack is missing.
        BenchError: a stack does not start or does not answer.
    """
    find_nginx()
    workers = workers or len(os.sched_getaffinity(0))
    context.progress("building what is missing", 0, 1)
    build_store(context.config, {})
    folder = ModelLibrary(context.config.home).ensure(context.config.model.reference)
    bodies = read_bodies()
    results, notes = (
        list[Result](),
        [f"{workers} workers of either stack; {len(bodies)} requests in turn, {WORKLOAD.name}"],
    )
    for name in arms or ("model", "null"):
        null = name == "null"
        with ExitStack() as stack:
            context.progress(f"{name}: starting both stacks", 0, 1)
            old = stack.enter_context(old_stack(folder, workers, null=null))
            ours = stack.enter_context(appliance(context.config, workers, null=null))
            arm = asyncio.run(measure((old, ours), bodies, repeats, seconds, name, context.progress))
            results += compared(arm, null=null)
            notes += told(name, arm)
            if not null:
                per_request = asyncio.run(request_mb(ours, bodies)), old.pss_bytes(), ours.pss_bytes()
        if not null:
            with old_stack(folder, workers + 1, null=False) as more:
                asyncio.run(_asked(more, bodies[:4]))
                results += weighed(*per_request, more.pss_bytes())
    notes.append(
        "memory_per_request: a synchronous worker holds one request, so that one more in flight is one more worker"
    )
    return Findings(tuple(results), tuple(notes), installed(("flask", "gunicorn", "torch", "transformers")))


def read_bodies() -> list[bytes]:
    """The requests of the workload as both stacks take them."""
    document = json.loads(WORKLOAD.read_text())
    return [
        msgspec.json.encode({"model": "smollm2-135m", "temperature": 0, "ignore_eos": True, **request})
        for request in document["requests"]
    ]


async def measure(
    stacks: tuple[Stack, Stack],
    bodies: Sequence[bytes],
    repeats: int,
    seconds: float,
    name: str,
    progress: Callable[[str, int, int], None],
) -> Arm:
    """One arm: rates first, then latencies at the old stack's load, errors above it, and how latencies grow."""
    arm, total = Arm(), 2 + 6 * repeats
    clients = [OpenLoop(stack.port, TIMEOUT_S, time.monotonic) for stack in stacks]
    done = 0

    async def turn(client: OpenLoop, rate: float, seed: int) -> Turn:
        found = Turn.of(await client.run(bodies, rate, max(seconds, _LEAST_REQUESTS / rate), seed))
        await _settled(client, bodies, arm.unloaded)
        return found

    for stack, client in zip(stacks, clients, strict=True):
        progress(f"{name}: what {stack.name} sustains", done, total)
        await client.in_turn(bodies[:8])
        alone = arm.unloaded[stack.name] = Turn.of(await client.in_turn(bodies[:_UNLOADED]))
        bound_s = SLOWER * alone.p99_s
        arm.rates[stack.name] = await sustained_rate(
            lambda rate, client=client: turn(client, rate, 1), 0.25 / alone.p50_s, bound_s
        )
        done += 1
        progress(f"{name}: {stack.name} sustains {arm.rates[stack.name]:.2f} requests a second", done, total)
    rate, own = (arm.rates[stack.name] for stack in stacks)
    for kept, times in ((arm.compared, LOAD), (arm.overloaded, OVERLOAD)):
        for repeat in range(repeats):
            progress(f"{name}: {times:g} times what the old stack sustains", done, total)
            first, second = [await turn(client, times * rate, 2 + repeat) for client in clients]
            kept.append((first, second))
            done += 2
            progress(f"{name}: {times:g} times: {_brief(first)} and {_brief(second)}", done, total)
    for repeat in range(repeats):
        progress(f"{name}: from 10 % to 50 % of what zccp sustains", done, total)
        arm.growth.append(
            (await turn(clients[1], 0.1 * own, 50 + repeat), await turn(clients[1], 0.5 * own, 60 + repeat))
        )
        done += 2
    for client in clients:
        client.close()
    return arm


async def sustained_rate(turn: Callable[[float], Awaitable[Turn]], first: float, bound_s: float) -> float:
    """The highest rate found with p99 within the bound and next to no errors: doubled or halved, then bisected.

    Args:
        turn: loads a stack at a rate.
        first: where to begin, requests a second.
        bound_s: of p99.
    """

    async def holds(rate: float) -> bool:
        found = await turn(rate)
        return found.p99_s <= bound_s and found.error_share < FAILED

    low = first
    while not await holds(low):
        low /= 2
        if low < first / 64:
            raise BenchError(f"a stack does not sustain {low:.3g} requests a second; it is no match for this workload")
    high = 2 * low
    while await holds(high):
        low, high = high, 2 * high
    for _ in range(_HALVINGS):
        middle = (low * high) ** 0.5
        if await holds(middle):
            low = middle
        else:
            high = middle
    return low


async def request_mb(stack: Stack, bodies: Sequence[bytes]) -> float:
    """MB of a request in flight in a stack that runs many at once: the most that was seen, over their number."""
    client = OpenLoop(stack.port, TIMEOUT_S, time.monotonic)
    await client.at_once(bodies[:IN_FLIGHT])
    before = stack.pss_bytes()
    running = asyncio.create_task(client.at_once([_longer(body) for body in bodies[:IN_FLIGHT]]))
    most = before
    while not running.done():
        most = max(most, await asyncio.to_thread(stack.pss_bytes))
    await running
    client.close()
    return (most - before) / IN_FLIGHT / _MIB


def compared(arm: Arm, *, null: bool) -> list[Result]:
    """The ratios of an arm, theirs over ours, of turns that belong together."""
    before = "layer_" if null else ""
    found = {
        f"{before}p50_ratio": [old.p50_s / ours.p50_s for old, ours in arm.compared],
        f"{before}p99_ratio": [old.p99_s / ours.p99_s for old, ours in arm.compared],
        f"{before}rate_ratio": [arm.rates["zccp"] / arm.rates["old"]],
        f"{before}error_ratio": [(old.errors + 0.5) / (ours.errors + 0.5) for old, ours in arm.overloaded],
        f"{before}p99_growth_5x": [high.p99_s / low.p99_s for low, high in arm.growth],
    }
    results: list[Result] = []
    for name, values in found.items():
        target, op = TARGETS.get(name, (None, None))
        results.append(Result(name, median(values), "ratio", len(values), spread(values), target, op))
    return results


def weighed(ours_mb: float, old_bytes: int, ours_bytes: int, more_bytes: int) -> list[Result]:
    """Memory of one more request in flight, and of everything together."""
    old_mb = (more_bytes - old_bytes) / _MIB
    ratio, total = old_mb / max(ours_mb, _LEAST_MB), old_bytes / ours_bytes
    return [
        Result("memory_per_request_ratio", ratio, "ratio", 1, (ratio, ratio), *TARGETS["memory_per_request_ratio"]),
        Result("memory_pss_ratio", total, "ratio", 1, (total, total)),
    ]


def told(name: str, arm: Arm) -> list[str]:
    """The numbers behind the ratios."""
    lines = [
        f"{name}, {stack}: {alone.p50_s * 1e3:.1f} / {alone.p99_s * 1e3:.1f} ms without load (p50 / p99), sustains "
        f"{arm.rates[stack]:.2f} requests a second"
        for stack, alone in arm.unloaded.items()
    ]
    for what, pairs in (("0.8 times", arm.compared), ("2 times", arm.overloaded)):
        for stack, turns in (("old", [old for old, _ in pairs]), ("zccp", [ours for _, ours in pairs])):
            middle = sorted(turns, key=lambda turn: turn.p99_s)[len(turns) // 2]
            errors, requests = sum(turn.errors for turn in turns), sum(turn.requests for turn in turns)
            lines.append(
                f"{name}, {stack} at {what} the old stack's rate: {middle.p50_s * 1e3:.1f} / {middle.p99_s * 1e3:.1f} "
                f"ms, {errors} errors of {requests}"
            )
    return lines


def _brief(turn: Turn) -> str:
    return f"{turn.p50_s * 1e3:.1f} / {turn.p99_s * 1e3:.1f} ms, {turn.errors} errors"


async def _asked(stack: Stack, bodies: Sequence[bytes]) -> None:
    client = OpenLoop(stack.port, TIMEOUT_S, time.monotonic)
    await client.at_once(bodies)
    client.close()


async def _settled(client: OpenLoop, bodies: Sequence[bytes], unloaded: Mapping[str, Turn]) -> None:
    """Wait until a stack has worked off what its clients have given up."""
    longest_s = max(turn.p99_s for turn in unloaded.values())
    for _ in range(20):
        (outcome,) = await client.in_turn(bodies[:1])
        if not outcome.problem and outcome.took_s <= 2 * longest_s:
            return
    raise BenchError("a stack did not come back within 20 requests after a turn")


def _longer(body: bytes) -> bytes:
    document = msgspec.json.decode(body)
    return msgspec.json.encode({**document, "max_tokens": 128})
