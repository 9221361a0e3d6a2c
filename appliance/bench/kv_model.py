"""One model under kv-quality: loads it once and runs every trial on it.

Owns the order of the measurements and the plans of the formats. Imports jax.
"""

import functools
from pathlib import Path

import jax
import msgspec

from appliance.bench.held_out import HeldOut, held_out
from appliance.bench.kv_quality import (
    BASELINE_CONTEXT,
    CONTEXTS,
    FORMATS,
    KEY_CONTEXTS,
    Losses,
    Measured,
    delta_line,
)
from appliance.bench.kv_trials import attention_errors, losses, trials_of
from appliance.bench.passkey import answers, passkeys
from appliance.bench.runner import BenchContext, BenchUseError
from appliance.building import convert_model, ensure_energy
from appliance.config import ApplianceConfig
from appliance.model.calibration import calibration_ids
from appliance.model.codec import Codec
from appliance.model.energy import read_energy
from appliance.model.library import ModelLibrary
from appliance.model.record import read_record, weights_folder
from appliance.model.store import restore
from appliance.planning import plan_for
from pallas_kernels import native
from planner.decoder import QUERY_ENERGY, Weights
from planner.kv import bits_per_element, energy_shape, page_bytes, slot_bytes
from planner.plan import Plan
from planner.program import weight_shapes
from planner.weights import weight_specs

_ERROR_LENGTH = 4096
"""Ids of each kind of text that attention errors are measured on."""


def measure(
    context: BenchContext, config: ApplianceConfig, count: int, depths: int
) -> tuple[Measured, tuple[HeldOut, HeldOut]]:
    """Every figure of the configured model.

    Raises:
        BenchError: the engine refused something.
        BenchUseError: a text is too short, the model takes no context that long, or the target is no CPU.
    """
    if config.engine.target and not config.engine.target.startswith("cpu"):
        raise BenchUseError(f"engine.target is {config.engine.target}; kv-quality compares with float32 pages on a CPU")
    jax.config.update("jax_platforms", "cpu")
    name = config.model.reference
    plans, weights, folder = _loaded(context, config)
    codec = Codec.load(folder)
    texts = held_out(codec, count)
    trials = trials_of(plans)
    found: dict[tuple[str, int], Losses] = {}
    for length in CONTEXTS:
        windows = [text.ids[at : at + length] for text in texts for at in range(0, count, length)]
        for trial in trials:
            if trial.rounding is not None and length != BASELINE_CONTEXT:
                continue
            told = _progress(context, f"{name}, {trial.name}, context {length}", 2 * count)
            by_block = losses(trial, CONTEXTS[-1], weights, windows, told)
            found[trial.name, length] = Losses(by_block, len(windows) * (length - 1))
            context.progress(f"{name}, {delta_line(found, trial.name, length)}", 2 * count, 2 * count)
    told = _progress(context, f"{name}, attention errors", _ERROR_LENGTH)
    errors = attention_errors(trials, weights, [text.ids[:_ERROR_LENGTH] for text in texts], told)
    keys: dict[str, list[bool]] = {}
    if asked := passkeys(codec, texts[0].ids, KEY_CONTEXTS, depths):
        for fmt, plan in plans.items():
            ask = functools.partial(context.progress, f"{name}, pass keys, {fmt}")
            taken = {kind: weights[kind] for kind in weight_shapes(plan)}  # energies only where the format needs them
            keys[fmt] = answers(plan, taken, codec, asked, ask)
    return Measured(name, found, errors, keys, {fmt: _size(plan) for fmt, plan in plans.items()}), texts


def _loaded(context: BenchContext, config: ApplianceConfig) -> tuple[dict[str, Plan], Weights, Path]:
    """A plan a format, the weights with their query energies, and the model's folder."""
    folder = ModelLibrary(config.home).ensure(config.model.reference, context.progress)
    record = read_record(folder)
    if config.context_of(record.context) < CONTEXTS[-1]:
        raise BenchUseError(
            f"{record.name} is served with {config.context_of(record.context)} ids; {CONTEXTS[-1]} are needed"
        )
    plans = {name: plan_for(_for_one(config, name), record) for name in FORMATS}
    plan = plans["float32"]
    form = plan.weight_form
    convert_model(config.home, config.model.reference, form, calibration_ids, context.progress)
    ensure_energy(folder, plan, calibration_ids, context.progress)
    if plan.implementation == "native":
        native.register(native.compile_library())
    arch = plan.architecture
    weights: dict[str, jax.Array] = {**restore(weights_folder(folder, form), weight_specs(arch, form))}
    energy = read_energy(folder, energy_shape(arch))
    weights[QUERY_ENERGY] = jax.device_put(energy)
    return plans, weights, folder


def _for_one(config: ApplianceConfig, kv_format: str) -> ApplianceConfig:
    """The configuration for one stream in a format, with the pages that the format has by default."""
    engine = msgspec.structs.replace(
        config.engine, kv_format=kv_format, slots=1, prefill_rows=1, page_size=None, context=CONTEXTS[-1]
    )
    gpu = msgspec.structs.replace(config.gpu, paged_attention_page_size=None)
    return msgspec.structs.replace(config, engine=engine, gpu=gpu)


def _size(plan: Plan) -> tuple[float, int, int]:
    """Bits of a number in a full page, bytes of a token in pages, bytes of a slot beside them."""
    arch = plan.architecture
    in_pages = page_bytes(plan.kv_format, arch, plan.page_size) // plan.page_size
    return bits_per_element(plan.kv_format, arch.head_dim), in_pages, slot_bytes(plan.kv_format, arch)


def _progress(context: BenchContext, what: str, total: int) -> functools.partial[None]:
    return functools.partial(_tell, context, what, total)


def _tell(context: BenchContext, what: str, total: int, done: int) -> None:
    context.progress(what, done, total)
