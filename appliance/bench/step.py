"""step: what one engine step costs the host at 64 slots, and how many decisions it makes a second.

The engine, its scheduler, its socket and its segments are real, with the plan of llama-3.1-8b on an A100; its programs
are null programs, which take and donate the same arrays and compute nothing. Requests of the chat mix keep every slot
taken. A step counts whole, from looking at the socket to the last metric, its launches and the reading of ids included.
"""

import contextlib
import gc
import os
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

import click
import msgspec
from prometheus_client import CollectorRegistry

from appliance.bench.report import Findings, Result, measured
from appliance.bench.runner import BenchContext, BenchError, BenchUseError
from appliance.bench.served import scratch_folder
from appliance.bench.statistics import quantile
from appliance.bench.step_client import LOGPROBS_EVERY, PENALTY_EVERY, MixClient
from appliance.bench.step_forecast import learned_forecast
from appliance.bench.step_programs import SAMPLED_ID, NullDevice, null_device
from appliance.bench.step_watch import PHASES, Step, Watch, WatchedGateway, WatchedScheduler, watched_programs
from appliance.config import ApplianceConfig, EngineConfig
from appliance.engine import Engine
from appliance.engine_metrics import EngineObserver
from appliance.gateway_engine import EngineGateway
from appliance.host.segments import MIN_STRIDE_BYTES, SegmentError, SegmentFile
from appliance.plan_report import committed_mixes, terms_for
from appliance.planning import plan_to_serve
from appliance.submission import ModelLimits
from appliance.telemetry import Metrics
from appliance.wiring import schedule_settings
from planner.catalogue import find_architecture
from planner.decide import decisions_per_s
from planner.pages import PagePool
from planner.plan import Plan, PlanError

ARCHITECTURE, TARGET = "llama-3.1-8b", "a100_sxm_80"
TARGET_SLOTS = 64
HOST_TARGET_MS, DECISIONS_TARGET = 1.0, 100_000.0

OPTIONS: Sequence[click.Parameter] = [
    click.Option(
        ["--slots"], type=click.IntRange(1, 512), default=TARGET_SLOTS, show_default=True, help="Slots of the engine."
    ),
    click.Option(
        ["--steps"], type=click.IntRange(50, 1_000_000), default=3000, show_default=True, help="Steps to time."
    ),
]

_ROUNDS = 5
_WAITING = 8
"""Requests beyond the slots, so that each slot that comes free is taken at once."""
_SETTLE_STEPS = 300


def run(context: BenchContext, *, slots: int, steps: int) -> Findings:
    """Measure steps, then decisions.

    Raises:
        BenchUseError: so many slots cannot be planned.
        BenchError: the engine refuses a request, or there is no room for segments.
    """
    config = msgspec.structs.replace(context.config, engine=EngineConfig(target=TARGET, slots=slots))
    architecture = find_architecture(ARCHITECTURE)
    try:
        plan = plan_to_serve(config, architecture, architecture.context)
    except PlanError as error:
        raise BenchUseError(f"--slots {slots}: {error}") from error
    load = os.getloadavg()[0]
    device = null_device(plan, lambda done, total: context.progress("compiling null programs", done, total))
    with scratch_folder() as scratch, _running(config, plan, device, scratch) as (engine, client, watch):
        timed = _time_steps(engine, client, watch, steps, context.progress)
    context.progress("deciding", 0, _ROUNDS)
    terms = terms_for(config, architecture, architecture.context)
    rates = [decisions_per_s(terms, time.perf_counter) for _ in range(_ROUNDS)]
    return Findings(
        (*step_results(timed, slots), measured("decisions_per_s", rates, "/s", DECISIONS_TARGET, ">=")),
        (*_what_ran(plan, device), *step_notes(timed), f"load average before the run: {load:.2f}"),
        samples={f"host time of a step, {slots} slots, ms": [1e3 * step.seconds for step in timed]},
    )


def step_results(timed: Sequence[Step], slots: int) -> tuple[Result, ...]:
    """The median of all steps, its spread over rounds of neighbours, and the 99th percentile."""
    times_ms = [1e3 * step.seconds for step in timed]
    size = -(-len(times_ms) // _ROUNDS)
    rounds = [times_ms[first : first + size] for first in range(0, len(times_ms), size)]
    found: list[Result] = []
    for name, of, target in (("median", 0.5, HOST_TARGET_MS if slots == TARGET_SLOTS else None), ("p99", 0.99, None)):
        each = [quantile(part, of) for part in rounds]
        ends = min(each), max(each)
        op = None if target is None else "<="
        found.append(Result(f"host_ms_{name}_{slots}", quantile(times_ms, of), "ms", len(rounds), ends, target, op))
    return tuple(found)


def step_notes(timed: Sequence[Step]) -> tuple[str, ...]:
    """Where the time goes: by phase, by what was launched, and on a CPU."""

    def both(values: Sequence[float]) -> str:
        return f"{1e3 * quantile(values, 0.5):.3f} / {1e3 * quantile(values, 0.99):.3f}"

    phases = ", ".join(f"{phase} {both([step.phases[phase] for step in timed])}" for phase in PHASES)
    notes = [f"phases of a step, median / p99 in ms: {phases}"]
    for name, wanted in (("that only decode", False), ("with a prefill launch", True)):
        part = [step.seconds for step in timed if step.prefilled is wanted]
        if part:
            notes.append(f"steps {name}: {len(part) / len(timed):.0%}, median / p99 {both(part)} ms")
    rows = sum(step.decoded for step in timed) / len(timed)
    notes.append(f"rows that decode in a step: {rows:.1f} on average")
    notes.append(f"time on a CPU of a step: median / p99 {both([step.cpu_s for step in timed])} ms")
    return tuple(notes)


def _what_ran(plan: Plan, device: NullDevice) -> tuple[str, ...]:
    if not device.aliased:
        raise BenchError("a null program copies the state that it was given; its time would say nothing")
    what = (
        f"plan of {ARCHITECTURE} on {TARGET}: {plan.slots} slots, {plan.num_pages} pages of {plan.page_size} ids; "
        f"{len(plan.buckets())} null programs, those that decode of {device.num_arguments} arrays, {device.shortened} "
        "of which stay on the device and are shorter than the plan's"
    )
    load = (
        f"requests of the chat mix, {_WAITING} more than slots; one in {LOGPROBS_EVERY} asks for log-probabilities, "
        f"one in {PENALTY_EVERY} for penalties; lengths are predicted by an LSTM"
    )
    return what, load, "the socket's other end is read between steps on the same thread, so that nobody is woken"


@contextlib.contextmanager
def _running(
    config: ApplianceConfig, plan: Plan, device: NullDevice, scratch: Path
) -> Generator[tuple[Engine, MixClient, Watch]]:
    """An engine on its socket, and a client on the other end."""
    watch = Watch()
    count = plan.slots + _WAITING
    (mix,) = [mix for mix in committed_mixes() if mix.name == "chat"]
    lengths = mix.draw()
    vocab = plan.architecture.vocab
    observer = EngineObserver(Metrics(CollectorRegistry()))
    try:
        segments = SegmentFile.create(f"bench-step-{os.getpid()}", count, MIN_STRIDE_BYTES)
    except SegmentError as error:
        raise BenchError(str(error)) from error
    with segments:
        gateway = EngineGateway(scratch / "engine.sock", segments, epoch=1)
        gateway.open(ModelLimits(vocab=vocab, context=plan.context, eos_ids=frozenset({SAMPLED_ID + 1})))
        client = MixClient(scratch / "engine.sock", segments, lengths, vocab, in_flight=count)
        scheduler = WatchedScheduler(
            plan.lattice,
            PagePool(plan.num_pages, plan.page_size),
            schedule_settings(plan, config),
        )
        scheduler.watch = watch
        engine = Engine(
            device.weights,
            device.state,
            watched_programs(device.programs, watch),
            scheduler,
            WatchedGateway(gateway, watch),
            vocab=vocab,
            metrics=observer,
            forecast=learned_forecast(scratch / "lengths.state", lengths, observer),
        )
        try:
            yield engine, client, watch
        finally:
            client.close()
            gateway.close(flush_s=0.0)


def _time_steps(
    engine: Engine, client: MixClient, watch: Watch, steps: int, progress: Callable[[str, int, int], None]
) -> list[Step]:
    """Run until every slot is taken and lengths are mixed, then time so many steps, with the heap as it is served."""

    def turn() -> Step:
        client.turn()
        watch.begin()
        engine.step()
        return watch.end()

    for done in range(_SETTLE_STEPS):
        progress("filling slots", done, _SETTLE_STEPS)
        turn()
    gc.collect()
    gc.freeze()
    try:
        timed: list[Step] = []
        for done in range(steps):
            if done % 100 == 0:
                progress("timing steps", done, steps)
            timed.append(turn())
    finally:
        gc.unfreeze()
    return timed
