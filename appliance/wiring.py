"""Composition root of the engine process: configuration -> plan -> program store -> weights -> engine.

Owns the order of loading and nothing else; every part is made elsewhere. Imports jax through the parts.
"""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import jax
import structlog

from appliance.assignment import Assignment
from appliance.config import ApplianceConfig, training_environment
from appliance.engine import Engine
from appliance.engine_metrics import EngineObserver
from appliance.engine_ports import ProgramSet
from appliance.gateway_engine import EngineGateway
from appliance.host.pinned import PinError, page_lock
from appliance.model.placed import load_weights
from appliance.model.record import read_record
from appliance.prediction import LengthForecast, TrainingProcess, state_file
from appliance.release import programs_of
from appliance.submission import ModelLimits
from planner.batch import Ints
from planner.buckets import Bucket, Phase
from planner.kv import lead_of
from planner.pages import PagePool
from planner.plan import Plan
from planner.prefixes import PrefixSettings, identity_of
from planner.program import Program, empty_state, idle_arguments
from planner.schedule import Scheduler, SchedulerSettings
from planner.store import open_store
from planner.target import find_target

_log = structlog.get_logger("zccp.engine")

_NO_ADAPTER = ""
"""Stands for the adapter in the names of pages, until there are any."""

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


def build_engine(
    assignment: Assignment,
    gateway: EngineGateway,
    observer: EngineObserver,
    announce: Callable[[str], None],
) -> tuple[Engine, ModelLimits]:
    """Load the assigned model and its programs, run each program once, and put an engine on the gateway.

    Raises:
        StoreError: the programs or the weights are missing or made for something else; the message says how to rebuild.
        DevicesError: this process has fewer devices than the plan, or of another kind.
        PlanError: the settings cannot be planned.
        ModelRecordError: the model's folder is damaged.
    """
    config = assignment.config
    folder = Path(assignment.model)
    record = read_record(folder)
    tell_of_context(record.context, config)
    plan, directory, key = programs_of(config, folder, record)
    announce("verifying the program store")
    store = open_store(directory, plan, key)
    announce("loading programs")
    programs = {program.bucket: program for program in store.load_all()}
    announce("restoring weights")
    weights = load_weights(folder, plan)
    if find_target(plan.target).card:
        announce("page-locking segments")
        _page_lock(gateway)
    announce("making the page pool")
    state = jax.block_until_ready(empty_state(programs))
    announce("running every program once")
    state = _run_once(plan, programs, weights, state)
    scheduler = Scheduler(
        plan.lattice,
        PagePool(plan.num_pages, plan.page_size, plan.context_devices, plan.shard_pages),
        schedule_settings(plan, config, [file.sha256 for file in record.source_files]),
    )
    vocab = plan.architecture.vocab
    engine = Engine(
        weights,
        state,
        program_set(programs),
        scheduler,
        gateway,
        vocab=vocab,
        metrics=observer,
        forecast=_forecast(assignment, folder.name, observer),
        lend=lend_to(plan),
    )
    jax.monitoring.register_event_duration_secs_listener(_count_compilations(observer))
    return engine, ModelLimits(vocab=vocab, context=plan.context, eos_ids=frozenset(record.eos_ids))


def tell_of_context(model_context: int, config: ApplianceConfig) -> None:
    """Say so where a model's context is not served whole although nobody asked for less."""
    if config.engine.context is None and config.context_of(model_context) < model_context:
        _log.warning(
            "the model's context is longer than a segment and is served up to that; set engine.context to agree",
            of_model=model_context,
            served=config.context_of(model_context),
        )


def schedule_settings(plan: Plan, config: ApplianceConfig, model: Iterable[str] = ()) -> SchedulerSettings:
    """The bounds of the schedule under a plan, and what is shared; ``model`` has the digests of the model's files."""
    return SchedulerSettings(
        prefill_budget=plan.prefill_budget,
        max_waiting=config.engine.max_waiting,
        max_waiting_tokens=config.engine.max_waiting_tokens,
        prefixes=PrefixSettings(
            reuse=config.cache.prefix_reuse,
            identity=identity_of(plan.digest(), _NO_ADAPTER, *model),
            all_tenants=config.cache.share_prefixes == "all",
            lead=lead_of(plan.kv_format),
            warm_up=config.cache.warmup_enabled,
        ),
    )


def program_set(programs: dict[Bucket, Program]) -> ProgramSet:
    """The loaded programs as the engine calls them."""
    phases = {
        phase: {bucket: program for bucket, program in programs.items() if bucket.phase is phase} for phase in Phase
    }
    (set_slot,) = phases[Phase.SET_SLOT].values()
    return ProgramSet(decode=phases[Phase.DECODE], prefill=phases[Phase.PREFILL], set_slot=set_slot)


def lend_to(plan: Plan) -> Callable[[Ints], jax.Array] | None:
    """How a plan's programs take ids where they lie; None where ids have to be sent to the devices."""
    if find_target(plan.target).platform != "cpu" or plan.devices > 1:
        return None
    return partial(jax.dlpack.from_dlpack, copy=False)


def _page_lock(gateway: EngineGateway) -> None:
    """Let the GPU read segments itself; without that it still gets every id, through a buffer of the driver's."""
    try:
        page_lock(gateway.memory)
    except PinError as error:
        _log.warning("segments are not page-locked", cause=str(error))


def _forecast(assignment: Assignment, model: str, observer: EngineObserver) -> LengthForecast | None:
    """What predicts lengths, started, if the configuration wants it; its trainings use the folder of this run."""
    config = assignment.config
    if not config.prediction.enabled:
        return None
    trainer = TrainingProcess(Path(assignment.socket).parent, training_environment())
    forecast = LengthForecast(state_file(config.home, model), model, trainer, observer)
    forecast.start()
    return forecast


def _run_once(plan: Plan, programs: dict[Bucket, Program], weights: object, state: object) -> object:
    """Run each program on an empty batch, so that nothing is done for the first time while serving.

    Returns the device state after that, which is as empty as before: rows without ids write nothing.
    """
    for bucket, program in programs.items():
        if bucket.phase is Phase.EMPTY:
            continue
        arguments = idle_arguments(plan, bucket)
        if bucket.phase is Phase.SET_SLOT:
            state = program(state, *arguments)
        else:
            state, _ = program(weights, state, *arguments)
    return jax.block_until_ready(state)


def _count_compilations(observer: EngineObserver) -> Callable[..., None]:
    def listen(event: str, _duration_s: float, **_: str | int) -> None:
        if event == _COMPILE_EVENT:
            observer.compiled()

    return listen
