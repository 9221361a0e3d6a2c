"""build: how long a release for a GPU takes to compile on this host, and that its programs keep to their memory.

Compiles every program of every format for two models, of one and of eight devices, into a scratch folder, from nothing.
What programs take is what XLA says of the compiled ones. Needs the extra ``aot`` and no GPU; says nothing about how
fast the programs are.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from appliance.bench.report import Findings, Result, installed
from appliance.bench.runner import BenchContext, BenchError, BenchUseError
from appliance.bench.served import scratch_folder
from appliance.bench.statistics import spread
from appliance.config import ApplianceConfig, quieten_compiler
from appliance.plan_report import padding
from appliance.planning import plans_by_format
from pallas_kernels.platform import find_gpu_compiler
from planner.catalogue import find_architecture
from planner.plan import Plan
from planner.target import UnknownTargetError, find_target

if TYPE_CHECKING:
    from appliance.building import Release

TEMPORARIES, WASTE = 0.03, 0.25
_PACKAGES = ("jax-cuda12-plugin", "jax-cuda12-pjrt", "nvidia-cuda-nvcc-cu12")


@dataclass(frozen=True, slots=True)
class Subject:
    """A model, its devices, and the minutes that its release may take."""

    name: str
    architecture: str
    devices: int
    minutes: float


SUBJECTS = (Subject("8b", "llama-3.1-8b", 1, 15.0), Subject("70b", "llama-3.3-70b", 8, 30.0))

OPTIONS: Sequence[click.Parameter] = [
    click.Option(["--target"], default="a100_sxm_80", show_default=True, help="The GPU that is compiled for."),
    click.Option(["--only"], type=click.Choice([one.name for one in SUBJECTS]), help="One of the two; default: both."),
    click.Option(
        ["--threads"], type=click.IntRange(1, 256), default=2, show_default=True, help="Compilations at once."
    ),
]


def run(context: BenchContext, *, target: str, only: str | None, threads: int) -> Findings:
    """Build every release and read what it says.

    Raises:
        BenchUseError: the target is none that needs a compiler for cards, or the compiler is missing.
        BenchError: a program does not compile, or does not keep to the memory plan.
    """
    try:
        found = find_target(target)
    except UnknownTargetError as error:
        raise BenchUseError(str(error)) from error
    if found.platform != "cuda":
        raise BenchUseError(f"--target {target} is no GPU; this bench compiles for cards")
    quieten_compiler()
    find_gpu_compiler()
    from pallas_kernels.compiled import missing  # noqa: PLC0415 - loads jax

    if lacking := missing():
        raise BenchUseError(lacking)
    results, notes = list[Result](), list[str]()
    wanted = [subject for subject in SUBJECTS if only in (None, subject.name)]
    fractions, aliases, wastes = list[float](), list[float](), list[tuple[float, float]]()
    for subject in wanted:
        config = _configured(context.config, target, subject)
        with scratch_folder() as folder:
            began_s = time.monotonic()
            release = _built(context, config, subject, folder, threads)
            minutes = (time.monotonic() - began_s) / 60
        results.append(
            Result(f"build_minutes_{subject.name}", minutes, "min", 1, (minutes, minutes), subject.minutes, "<=")
        )
        for store in release.stores:
            fractions.append(store.temp_bytes / (store.memory.usable_bytes + store.memory.reserve_bytes))
            aliases.append(store.alias_fraction)
            notes.append(
                f"{subject.architecture} on {subject.devices} x {target}, {store.directory.name}: {store.programs} "
                f"programs, {store.total_bytes / 1e6:.1f} MB, at most {store.max_arguments} arguments, temporaries up "
                f"to {store.temp_bytes / 1e6:.0f} MB, {store.alias_fraction:.3f} of the state updated in place"
            )
        notes += [f"{subject.architecture}, {name} is left out: {why}" for name, why in release.left_out.items()]
        wastes += _wastes(config, subject)
    means, tails = ([waste[place] for waste in wastes] for place in (0, 1))
    results += [
        Result("temp_fraction_max", max(fractions), "share", len(fractions), spread(fractions), TEMPORARIES, "<="),
        Result("pool_alias_fraction_min", min(aliases), "share", len(aliases), spread(aliases), 1.0, "=="),
        Result("padding_waste_mean", max(means), "share", len(means), spread(means), WASTE, "<="),
        Result("padding_waste_p99", max(tails), "share", len(tails), spread(tails)),
    ]
    notes.append("padding: over all committed mixes together, by ids; the worst format of each model")
    return Findings(tuple(results), tuple(notes), installed(_PACKAGES))


def _configured(config: ApplianceConfig, target: str, subject: Subject) -> ApplianceConfig:
    engine = msgspec.structs.replace(config.engine, target=target, devices=subject.devices)
    return msgspec.structs.replace(config, engine=engine)


def _built(context: BenchContext, config: ApplianceConfig, subject: Subject, folder: Path, threads: int) -> "Release":
    from appliance.building import build_release  # noqa: PLC0415 - loads jax

    def told(what: str, done: int, total: int) -> None:
        context.progress(f"{subject.architecture}: {what}", done, total)

    try:
        return build_release(config, subject.architecture, folder / "out", folder / "key.pem", told, threads=threads)
    except (ValueError, RuntimeError) as error:
        raise BenchError(f"{subject.architecture} for {config.engine.target}: {error}") from error


def _wastes(config: ApplianceConfig, subject: Subject) -> list[tuple[float, float]]:
    """Mean and p99 of what is padded, of each format."""
    architecture = find_architecture(subject.architecture)
    plans = plans_by_format(config, architecture, architecture.context).values()
    found = [padding(plan)[-1] for plan in plans if isinstance(plan, Plan)]
    return [(waste.mean, waste.p99) for waste in found]
