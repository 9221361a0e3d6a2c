"""peers: zccp beside ``transformers`` and llama.cpp's server on the same model, prompts and threads.

All contestants are started first and then take turns, round by round; who waits does nothing. Every round has prompts
of its own, the same for all, so that no cache helps anybody. Figures are ratios of medians; above 1 means that zccp is
faster. Prefill and time to first token are whole requests for a single id.
"""

import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import click

from appliance.bench.report import Findings, Operator, Result, installed, measured
from appliance.bench.runner import BenchContext, BenchError
from appliance.bench.served import build_store, serving
from appliance.bench.statistics import median, paired_ratios, spread
from appliance.model.codec import Codec
from appliance.model.library import ModelLibrary
from appliance.model.record import read_record
from pallas_kernels.platform import cpu_features
from tests.bench.contestants import (
    DEFAULT_PYTHON,
    SLOTS,
    Contestant,
    TransformersContestant,
    ZccpContestant,
    llama_command,
    llama_server,
)
from tests.bench.english import Prompt, fresh_prompts, text_of

ZCCP, FLOAT32, TRANSFORMERS, LLAMA = "zccp", "zccp-float32", "transformers", "llamacpp"
CONTESTANTS = (ZCCP, FLOAT32, TRANSFORMERS, LLAMA)
_FAST_ISA = frozenset({"amx_int8", "avx512_vnni", "avx_vnni"})


@dataclass(frozen=True, slots=True)
class Measure:
    """What is asked of a contestant at a time. With one new id, work is counted in prompt ids."""

    name: str
    prompts: int
    prompt_len: int
    new_tokens: int

    def work(self, made: int) -> int:
        """Ids that the time was spent on."""
        return made if self.new_tokens > 1 else self.prompts * self.prompt_len


MEASURES = (
    Measure("prefill", 1, 2048, 1),
    Measure("streams8", SLOTS, 64, 128),
    Measure("single", 1, 64, 128),
    Measure("ttft1500", 1, 1500, 1),
)
TARGETS: Mapping[tuple[str, str], tuple[float, Operator] | None] = {
    ("prefill", TRANSFORMERS): (3.0, ">="),
    ("prefill", LLAMA): (8.0, ">="),
    ("streams8", TRANSFORMERS): (3.0, ">="),
    ("streams8", LLAMA): (1.5, ">="),
    ("single", TRANSFORMERS): (1.6, ">="),
    ("single", LLAMA): None,
    ("ttft1500", TRANSFORMERS): (2.5, ">="),
}
"""The figures, each with its target on a CPU with int8 products, or None where it is reported."""

Speeds = dict[tuple[str, str], list[float]]
"""Ids a second of a measure and a contestant, one number a round."""

OPTIONS: Sequence[click.Parameter] = [
    click.Option(["--rounds"], type=click.IntRange(1, 50), default=5, show_default=True, help="Rounds that count."),
    click.Option(["--threads"], type=click.IntRange(1, 256), default=2, show_default=True, help="Cores for everybody."),
    click.Option(["--only"], multiple=True, type=click.Choice(CONTESTANTS), help="Contestants; default: all."),
    click.Option(
        ["--measure", "measures"], multiple=True, type=click.Choice([m.name for m in MEASURES]), help="Default: all."
    ),
    click.Option(["--llama-python"], default=DEFAULT_PYTHON, help="Python that has llama-cpp-python."),
]


def run(
    context: BenchContext,
    *,
    rounds: int,
    threads: int,
    only: Sequence[str],
    measures: Sequence[str],
    llama_python: str,
    clock: Callable[[], float] = time.monotonic,
) -> Findings:
    """Start the contestants, let them take turns, and compare.

    Raises:
        BenchError: a contestant that was started fails.
    """
    wanted = [name for name in CONTESTANTS if not only or name in only]
    chosen = [measure for measure in MEASURES if not measures or measure.name in measures]
    notes: list[str] = []
    with pinned(threads) as cores, ExitStack() as stack:
        contestants = _start(context, stack, wanted, threads, llama_python, notes)
        folder = ModelLibrary(context.config.home).ensure(context.config.model.reference)
        prompts = _prompts(Codec.load(folder), chosen, rounds)
        speeds = take_turns(contestants, chosen, prompts, rounds, clock, context.progress)
    notes.append(f"threads: every process on the same {cores} cores; {rounds} rounds after one that does not count")
    notes += [f"{m.name}: {m.prompts} x {m.prompt_len} prompt ids, {m.new_tokens} new" for m in chosen]
    results, missing = compare(speeds, chosen, fast_isa=bool(_FAST_ISA & set(cpu_features())))
    return Findings(results, (*notes, *missing), installed(("transformers", "torch")))


@contextmanager
def pinned(cores: int) -> Iterator[int]:
    """Let this process, and those it starts, use at most so many cores; gives how many there are."""
    before = os.sched_getaffinity(0)
    chosen = sorted(before)[:cores]
    os.sched_setaffinity(0, chosen)
    try:
        yield len(chosen)
    finally:
        os.sched_setaffinity(0, before)


def take_turns(
    contestants: Mapping[str, Contestant],
    measures: Sequence[Measure],
    prompts: Iterator[Prompt],
    rounds: int,
    clock: Callable[[], float],
    progress: Callable[[str, int, int], None],
) -> Speeds:
    """Measure round by round, beginning each with the next contestant; the first round does not count."""
    names = list(contestants)
    speeds: Speeds = {(measure.name, name): [] for measure in measures for name in names}
    total = (rounds + 1) * len(measures) * len(names)
    done = itertools.count()
    for turn in range(rounds + 1):
        for measure in measures:
            asked = list(itertools.islice(prompts, measure.prompts))
            for place in range(len(names)):
                name = names[(turn + place) % len(names)]
                progress(f"round {turn} of {rounds}: {measure.name}, {name}", next(done), total)
                began_s = clock()
                made = contestants[name].answer(asked, measure.new_tokens)
                took_s = clock() - began_s
                if turn:
                    speeds[measure.name, name].append(measure.work(made) / took_s)
    return speeds


def compare(speeds: Speeds, measures: Sequence[Measure], *, fast_isa: bool) -> tuple[tuple[Result, ...], list[str]]:
    """The figures, the speeds behind them, and what is missing.

    Args:
        speeds: as ``take_turns`` gives them.
        measures: those that were taken.
        fast_isa: whether this CPU has the int8 products that the targets are set for.
    """
    results: list[Result] = []
    missing: list[str] = []
    for (measure, peer), target in TARGETS.items():
        name = f"{measure}_vs_{peer}"
        ours, theirs = speeds.get((measure, ZCCP)), speeds.get((measure, peer))
        if not ours or not theirs:
            missing.append(f"{name}: not measured, since {ZCCP if not ours else peer} did not run {measure}")
            continue
        aim, op = target if target and fast_isa else (None, None)
        ends = spread(paired_ratios(ours, theirs))
        results.append(Result(name, median(ours) / median(theirs), "ratio", len(ours), ends, aim, op))
    results += _worst_of_float32(speeds, measures, missing)
    for measure in measures:
        for (taken, name), values in speeds.items():
            if taken == measure.name and values:
                results.append(_speed(measure, name, values))
    if not fast_isa:
        missing.append("this CPU has neither AMX-int8 nor VNNI: ratios are reported without targets")
    return tuple(results), missing


def _worst_of_float32(speeds: Speeds, measures: Sequence[Measure], missing: list[str]) -> list[Result]:
    pairs = [
        (speeds[measure.name, FLOAT32], speeds[measure.name, TRANSFORMERS])
        for measure in measures
        if speeds.get((measure.name, FLOAT32)) and speeds.get((measure.name, TRANSFORMERS))
    ]
    if not pairs:
        missing.append(f"float32_worst_ratio: not measured, since {FLOAT32} and {TRANSFORMERS} did not both run")
        return []
    worst = min(median(ours) / median(theirs) for ours, theirs in pairs)
    each_round = [min(ratios) for ratios in zip(*(paired_ratios(*pair) for pair in pairs), strict=True)]
    return [Result("float32_worst_ratio", worst, "ratio", len(each_round), spread(each_round), 1.0, ">=")]


def _speed(measure: Measure, name: str, values: Sequence[float]) -> Result:
    if measure.new_tokens > 1:
        return measured(f"{measure.name}_{name}", values, "ids/s")
    return measured(f"{measure.name}_{name}", [1000 * measure.prompt_len / value for value in values], "ms")


def _prompts(codec: Codec, measures: Sequence[Measure], rounds: int) -> Iterator[Prompt]:
    text, _ = text_of(None)
    lengths = [measure.prompt_len for measure in measures for _ in range(measure.prompts)]
    return fresh_prompts(codec, text, lengths * (rounds + 1))


def _start(
    context: BenchContext, stack: ExitStack, wanted: Sequence[str], threads: int, llama_python: str, notes: list[str]
) -> dict[str, Contestant]:
    """Every wanted contestant that there is; notes say which there are not, and which kind ran."""
    config = context.config
    started: dict[str, Contestant] = {}
    for name, engine in ((ZCCP, {}), (FLOAT32, {"weight_form": "float32"})):
        if name in wanted:
            context.progress(f"building and starting {name}", 0, 0)
            overrides = {"engine": engine}
            build_store(config, overrides)
            served = stack.enter_context(serving(config, overrides))
            ours = ZccpContestant(served)
            stack.callback(ours.close)
            started[name] = ours
    folder = ModelLibrary(config.home).ensure(config.model.reference)
    if LLAMA in wanted:
        command, description = llama_command(llama_python)
        file = folder / read_record(folder).source_path
        if not command:
            notes.append(f"{LLAMA} is not here: {description}")
        elif file.suffix != ".gguf":
            notes.append(f"{LLAMA} cannot run: {file.name} is no GGUF file")
        else:
            context.progress(f"starting {LLAMA}", 0, 0)
            started[LLAMA] = stack.enter_context(llama_server(command, file, threads))
            notes.append(f"{description}, {file.name}")
    if TRANSFORMERS in wanted:
        context.progress(f"loading {TRANSFORMERS}", 0, 0)
        started[TRANSFORMERS] = TransformersContestant(folder, threads)
        notes.append("transformers: torch float32 on the CPU, generate with one static batch")
    if not started:
        raise BenchError(f"none of {', '.join(wanted)} can run here: {'; '.join(notes)}")
    return started
