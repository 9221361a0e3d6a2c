"""From a model reference to everything that serving needs on disk: model, weights in the plan's form, programs.

Owns the order of these steps for the command line; each is done elsewhere. Imports jax through the parts, so the main
process of a running appliance never imports this module.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from appliance.config import ApplianceConfig
from appliance.model.checkpoint import Progress
from appliance.model.checksums import is_sealed
from appliance.model.energy import has_energy, write_energy
from appliance.model.library import ModelLibrary
from appliance.model.record import read_record, weights_folder
from appliance.model.store import convert, restore
from appliance.planning import plan_for, plans_by_format, signing_key_file, store_directory, usable_bytes
from appliance.release import PUBLIC_KEY
from pallas_kernels.kv_layout import BASE_BITS
from planner.architecture import ModelArchitecture
from planner.build import BuildReport, build
from planner.catalogue import find_architecture
from planner.energy import query_energy
from planner.formats import WeightForm
from planner.plan import Plan
from planner.quantize import quantize
from planner.signing import local_key, public_pem
from planner.store import StoreError
from planner.target import find_target
from planner.weights import weight_specs

ENERGY_WINDOWS = 4
"""Windows of calibration text that query energies are measured on; more choose the same channels."""

CalibrationIds = Callable[[Path], np.ndarray]
"""Gives int32 [windows, length] ids of calibration text for the model in a folder."""


@dataclass(frozen=True, slots=True)
class Converted:
    """Converted weights; ``fresh`` says whether they were made now."""

    folder: Path
    weights: Path
    form: WeightForm
    fresh: bool


@dataclass(frozen=True, slots=True)
class Release:
    """A folder of stores for other hosts; ``left_out`` says why a format has none."""

    stores: list[BuildReport]
    left_out: dict[str, str]
    public_key: Path


def convert_model(
    home: Path,
    reference: str,
    form: WeightForm,
    calibration: CalibrationIds,
    progress: Progress,
    *,
    force: bool = False,
) -> Converted:
    """Bring a model in and convert its weights, unless that has been done.

    Raises:
        CatalogError: the model cannot be had.
        CheckpointError: its files cannot be served.
        StoreError: the weights cannot be written.
    """
    library = ModelLibrary(home)
    folder = library.ensure(reference, progress)
    weights = weights_folder(folder, form)
    if is_sealed(weights) and not force:
        return Converted(folder, weights, form, fresh=False)
    checkpoint = library.open(folder)
    transform = None
    if form is WeightForm.INT8:
        transform = _rounding(checkpoint.architecture, calibration(folder), progress)
    convert(checkpoint, weights, form, transform, progress)
    return Converted(folder, weights, form, fresh=True)


def build_programs(
    config: ApplianceConfig, calibration: CalibrationIds, progress: Progress, *, force: bool = False, threads: int = 2
) -> BuildReport:
    """Bring the configured model in, convert it, and compile every program of its plan.

    Raises:
        PlanError: the settings cannot be planned.
        StoreError: the store cannot be written.
        MemoryPlanError: a program takes more memory than it may.
    """
    folder = ModelLibrary(config.home).ensure(config.model.reference, progress)
    plan = plan_for(config, read_record(folder))
    _provide_devices(plan)
    convert_model(config.home, config.model.reference, plan.weight_form, calibration, progress)
    if plan.kv_format in BASE_BITS:
        ensure_energy(folder, plan, calibration, progress, force=force)
    key = local_key(signing_key_file(config.home))
    _without_devices(plan)
    return build(
        plan,
        store_directory(config.home, folder, plan),
        key,
        lambda done, total, name: progress(f"compiled {name}", done, total),
        force=force,
        threads=threads,
        usable_bytes=usable_bytes(config),
    )


def build_release(
    config: ApplianceConfig,
    reference: str | None,
    out: Path,
    key_file: Path,
    progress: Progress,
    *,
    force: bool = False,
    threads: int = 2,
) -> Release:
    """Compile the programs of every format that the configuration allows, each into a folder of ``out``.

    Needs no weights. The public half of the key is written beside the stores.

    Args:
        config: the settings; without ``engine.kv_format`` every format is built that the model can be held in.
        reference: an architecture of the catalogue or the path of a ``config.json``; None = the configured model.
        out: the release.
        key_file: signs it; made if there is none.
        progress: told of every program.
        force: compile everything again.
        threads: compilations at once.

    Raises:
        UnknownArchitectureError: the reference names nothing.
        CatalogError: the configured model is not in the store.
        PlanError: no format can be planned.
        SigningKeyError: the key cannot be read.
        StoreError: the place cannot be written.
        MemoryPlanError: a program takes more memory than it may.
        CompileError: the compiler for cards is missing or refuses a program.
    """
    if reference is None:
        record = read_record(ModelLibrary(config.home).ensure(config.model.reference, progress))
        architecture, context = record.read_architecture(), record.context
    else:
        architecture = find_architecture(reference)
        context = architecture.context
    plans, key = plans_by_format(config, architecture, context), local_key(key_file)
    left_out = {str(kv_format): plan for kv_format, plan in plans.items() if isinstance(plan, str)}
    wanted = [plan for plan in plans.values() if isinstance(plan, Plan)]
    _provide_devices(wanted[0])
    _without_devices(wanted[0])
    total, before, reports = sum(len(plan.buckets()) for plan in wanted), 0, list[BuildReport]()
    public = _begin_release(out, public_pem(key), force=force)
    for plan in wanted:

        def told(done: int, of_plan: int, name: str, plan: Plan = plan, before: int = before) -> None:
            progress(f"compiled {plan.kv_format} {name}", before + done + len(plan.buckets()) - of_plan, total)

        reports.append(
            build(
                plan, out / plan.kv_format, key, told,
                force=force, threads=threads, usable_bytes=usable_bytes(config),
            )
        )  # fmt: skip
        before += len(plan.buckets())
    try:
        public.write_bytes(public_pem(key))
    except OSError as error:
        raise _cannot_write(out, error) from error
    return Release(reports, left_out, public)


def _begin_release(out: Path, pem: bytes, *, force: bool) -> Path:
    """Make the folder of a release; where its public key goes, once the stores are whole.

    Raises:
        StoreError: it cannot be made, or holds a release that another key has signed.
    """
    public = out / PUBLIC_KEY
    try:
        out.mkdir(parents=True, exist_ok=True)
        signed = public.read_bytes() if public.exists() else pem
    except OSError as error:
        raise _cannot_write(out, error) from error
    if signed != pem and not force:
        raise StoreError(f"release {out} is signed by another key; choose another folder, or replace it with --force")
    return public


def _cannot_write(out: Path, error: OSError) -> StoreError:
    return StoreError(f"release {out} cannot be written: {error}; free space or choose another place")


def ensure_energy(
    folder: Path, plan: Plan, calibration: CalibrationIds, progress: Progress, *, force: bool = False
) -> None:
    """Measure the query energies of a converted model, which bitmask formats need, unless that has been done.

    Raises:
        StoreError: the weights cannot be read, or the energies not written.
    """
    if has_energy(folder) and not force:
        return
    ids = calibration(folder)
    weights = restore(weights_folder(folder, plan.weight_form), weight_specs(plan.architecture, plan.weight_form))
    few = ids[:: max(1, len(ids) // ENERGY_WINDOWS)]
    found = query_energy(plan, weights, few, lambda done, total: progress("measuring query energies", done, total))
    write_energy(folder, found)


def _provide_devices(plan: Plan) -> None:
    """Let the CPU count as many devices as programs are compiled for.

    A process that has looked for its devices keeps those it has; compiling says so if they are too few.
    """
    if find_target(plan.target).platform == "cpu" and plan.devices > 1:
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", plan.devices)


def _without_devices(plan: Plan) -> None:
    """Programs for a GPU are compiled without one, whether this host has any or not."""
    if find_target(plan.target).platform != "cpu":
        jax.config.update("jax_platforms", "cpu")


def _rounding(
    architecture: ModelArchitecture, ids: np.ndarray, progress: Progress
) -> Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]:
    def transform(tree: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return quantize(architecture, tree, ids, lambda done, total: progress("rounding weights", done, total))

    return transform
