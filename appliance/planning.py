"""From configuration and architecture to plans, and to the places on disk that belong to them.

Owns the defaults of the engine section and the layout of the state directory beside the models. Read by the main
process, the engine and the builder; never imports jax.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from appliance.config import ApplianceConfig
from appliance.model.record import ModelRecord
from pallas_kernels.kv_layout import BASE_BITS
from pallas_kernels.platform import cpu_features
from planner.architecture import ModelArchitecture
from planner.decide import Declined, Terms, decide, terms_of
from planner.formats import KvFormat, WeightForm
from planner.memory import MemoryPlanError, memory_plan, pool_bytes, prefill_rows
from planner.plan import Plan, PlanError, PoolError, default_implementation, formats_for, make_plan, with_pool
from planner.target import DEFAULT_TARGET, Target, find_target

DEFAULT_KV_BYTES = 2 << 30
"""Size of the page pool on a CPU where none is configured, raised to hold one sequence of full length."""

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class _Defaults:
    """What the engine section means where it says nothing, by the platform of the target."""

    weight_form: WeightForm
    kv_format: KvFormat
    slots: int
    prefill_chunk: int
    prefill_rows: int
    page_size: int
    bitmask_page_size: int = 128
    """The bitmask formats round blocks of 128 positions, and a page holds whole blocks."""


_DEFAULTS: Mapping[str, _Defaults] = {
    "cpu": _Defaults(WeightForm.INT8, KvFormat.FLOAT32, slots=16, prefill_chunk=512, prefill_rows=4, page_size=64),
    "cuda": _Defaults(WeightForm.BF16, KvFormat.BF16, slots=64, prefill_chunk=1024, prefill_rows=8, page_size=128),
}


def store_directory(home: Path, folder: Path, plan: Plan) -> Path:
    """Where the programs of the model in ``folder`` lie.

    Each target, weight form, page format, code path and number of devices has a place of its own, so that building one
    keeps the others.
    """
    kind = f"{plan.target}-{plan.weight_form}-{plan.kv_format}-{plan.implementation}"
    if plan.devices > 1:
        kind += f"-d{plan.devices}" + (f"x{plan.context_devices}" if plan.context_devices > 1 else "")
    return home / "programs" / folder.name / kind


def signing_key_file(home: Path) -> Path:
    """The private key that signs locally built stores."""
    return home / "signing-key.pem"


def plan_for(config: ApplianceConfig, record: ModelRecord) -> Plan:
    """The plan of a configuration for a model of the store.

    Raises:
        PlanError: the settings cannot be planned.
        MemoryPlanError: the model does not fit on the target.
    """
    return plan_to_serve(config, record.read_architecture(), record.context)


def plan_to_serve(config: ApplianceConfig, architecture: ModelArchitecture, model_context: int) -> Plan:
    """The one plan that an engine serves: that of ``engine.kv_format``, which ``auto`` leaves to ``decide``.

    Args:
        config: the settings.
        architecture: the model.
        model_context: the longest sequence that it may have.

    Raises:
        PlanError: the settings cannot be planned.
        MemoryPlanError: the model does not fit on the target.
    """
    context = config.context_of(model_context)
    if config.engine.kv_format != "auto":
        chosen = config.engine.kv_format or _defaults(config).kv_format
        return _plan(config, architecture, context, KvFormat(chosen))
    return choose([plan for plan in plans_by_format(config, architecture, context).values() if isinstance(plan, Plan)])


def choose(plans: Sequence[Plan]) -> Plan:
    """The plan among several formats that holds the longest context with the most bits.

    Raises:
        PlanError: none does.
    """
    terms = terms_of(plans)
    made = decide(terms, plans[0].context - 1, 1, free_bytes(terms))
    if isinstance(made, Declined):
        raise PlanError(f"engine.kv_format auto: {made.message}")
    return made.plan


def plans_by_format(
    config: ApplianceConfig, architecture: ModelArchitecture, model_context: int
) -> dict[KvFormat, Plan | str]:
    """The plan of every format that ``engine.kv_format`` allows (none or auto: all that the model can be held in).

    A format that cannot be planned has the reason in place of its plan.

    Args:
        config: the settings.
        architecture: the model.
        model_context: the longest sequence that it may have.

    Raises:
        PlanError: no format can be planned; the reason is that of the one with the most bits.
        MemoryPlanError: the same, for want of memory.
    """
    named = config.engine.kv_format
    wanted = formats_for(architecture, _target(config).name) if named in (None, "auto") else (KvFormat(named),)
    found: dict[KvFormat, Plan | str] = {}
    fault: PlanError | MemoryPlanError | None = None
    for kv_format in wanted:
        try:
            found[kv_format] = _plan(config, architecture, config.context_of(model_context), kv_format)
        except (PlanError, MemoryPlanError) as error:
            found[kv_format], fault = str(error), fault or error
    if fault is not None and not any(isinstance(plan, Plan) for plan in found.values()):
        raise fault
    return found


def free_bytes(terms: Terms) -> int:
    """Bytes for pages on each device while nobody runs, as the first offer leaves them."""
    first = terms.offers[0].plan
    return memory_plan(first).pages_bytes


def weight_form(config: ApplianceConfig) -> WeightForm:
    """The form of weights that is served."""
    return WeightForm(config.engine.weight_form or _defaults(config).weight_form)


def usable_bytes(config: ApplianceConfig) -> int:
    """What ``gpu.memory_limit_mb`` leaves of each device of a GPU target; 0 without a limit.

    Raises:
        PlanError: the limit is above what the target has.
    """
    limit, target = config.gpu.memory_limit_mb, _target(config)
    if limit is None or target.platform != "cuda":
        return 0
    if limit * _MIB > target.usable_bytes:
        raise PlanError(
            f"gpu.memory_limit_mb {limit} is above the {target.usable_bytes // _MIB} MiB that target {target.name} has "
            "for programs: lower it or leave it out"
        )
    return limit * _MIB


def _plan(config: ApplianceConfig, architecture: ModelArchitecture, context: int, kv_format: KvFormat) -> Plan:
    engine, target, defaults = config.engine, _target(config), _defaults(config)
    own_page_size = defaults.bitmask_page_size if kv_format in BASE_BITS else defaults.page_size
    code_path = default_implementation(architecture, target.name, kv_format, cpu_features())
    draft = make_plan(
        architecture,
        target=target.name,
        weight_form=weight_form(config),
        kv_format=kv_format,
        context=context,
        slots=engine.slots or defaults.slots,
        prefill_chunk=engine.prefill_chunk or defaults.prefill_chunk,
        prefill_slots=engine.prefill_rows or defaults.prefill_rows,
        page_size=config.page_size or own_page_size,
        kv_bytes=0,
        implementation=engine.implementation or code_path,
        devices=engine.devices,
        context_devices=engine.context_devices,
    )
    if engine.prefill_rows is None:
        draft = replace(draft, lattice=replace(draft.lattice, prefill_slots=prefill_rows(draft)))
    try:
        plan = with_pool(draft, _kv_bytes(config, draft))
    except PoolError as error:
        raise _named(error, config, draft) from error
    bound = usable_bytes(config)
    if not memory_plan(plan, usable_bytes=bound).fits:
        raise PlanError(
            f"engine.kv_memory_mb {engine.kv_memory_mb} passes the {pool_bytes(draft, bound) // _MIB} MiB that target "
            f"{target.name} leaves for pages in {kv_format}: lower it or leave it out"
        )
    return plan


def _kv_bytes(config: ApplianceConfig, draft: Plan) -> int:
    """Bytes for the page pool of each device: as configured, else what is left of a GPU, else the default of CPUs."""
    bound = usable_bytes(config)
    if config.engine.kv_memory_mb:
        return config.engine.kv_memory_mb * _MIB
    if find_target(draft.target).platform == "cuda":
        return pool_bytes(draft, bound)
    one_sequence = int(draft.architecture.kv_bytes_per_token(4) * (draft.context + 512))  # the largest page more
    return max(DEFAULT_KV_BYTES, one_sequence)


def _named(error: PoolError, config: ApplianceConfig, draft: Plan) -> PlanError:
    """The error in the words of the configuration."""
    needed = -(-error.needed_bytes // _MIB)
    if config.engine.kv_memory_mb:
        return PlanError(
            f"engine.kv_memory_mb {config.engine.kv_memory_mb} holds no sequence of {draft.context} ids in "
            f"{draft.kv_format}: raise it to {needed} or lower engine.context"
        )
    return PlanError(
        f"target {draft.target} leaves {error.kv_bytes // _MIB} MiB for pages, and one sequence of {draft.context} ids "
        f"takes {needed} MiB in {draft.kv_format}: lower engine.context or engine.slots, raise engine.devices, or "
        "choose an engine.kv_format with fewer bits"
    )


def _target(config: ApplianceConfig) -> Target:
    return find_target(config.engine.target or DEFAULT_TARGET)


def _defaults(config: ApplianceConfig) -> _Defaults:
    return _DEFAULTS[_target(config).platform]
