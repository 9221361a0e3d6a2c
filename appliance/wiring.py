"""Composition root of the engine process: configuration -> plan -> program store -> weights -> engine.

Owns the order of loading and nothing else; every part is made elsewhere. Imports jax through the parts.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
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
from appliance.reuse.disk_tier import DiskTier
from appliance.reuse.lower_tiers import LowerTiers, PageStore
from appliance.reuse.redis_tier import TIMEOUT_S, RedisTier
from appliance.reuse.tiers import Below, HostMemory, PageForm, TierObserver
from appliance.submission import ModelLimits
from planner.batch import Ints
from planner.buckets import Bucket, Phase
from planner.host_tier import HostTier
from planner.kv import lead_of
from planner.page_moves import PAGE_CUT, page_shape
from planner.pages import PagePool
from planner.plan import Plan
from planner.prefixes import PrefixSettings, identity_of
from planner.program import Program, empty_state, idle_arguments, serving_devices, state_shapes
from planner.schedule import Scheduler
from planner.schedule_values import SchedulerSettings
from planner.sharding import Placement
from planner.store import digest, identity, open_store
from planner.target import find_target

_log = structlog.get_logger("zccp.engine")

_NO_ADAPTER = ""
"""Stands for the adapter in the names of pages, until there are any."""

_SEARCH_S = 0.25
"""Longest wait for tiers below host memory, in seconds: a disk reads many pages in it, and a reader hardly feels it."""

_MIB = 1 << 20

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
    tier = host_tier(plan, config)
    scheduler = Scheduler(
        plan.lattice,
        PagePool(plan.num_pages, plan.page_size, plan.context_devices, plan.shard_pages),
        schedule_settings(plan, config, [file.sha256 for file in record.source_files]),
        tier,
    )
    mover = None
    if tier.places:
        announce("setting host memory for pages aside")
        mover = page_mover(plan, tier.places, observer, lower_tiers(plan, config, observer))
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
        mover=mover,
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
        search_s=_SEARCH_S if config.cache.disk_tier_mb or config.cache.redis_tier else 0.0,
        prefixes=PrefixSettings(
            reuse=config.cache.prefix_reuse,
            identity=identity_of(plan.digest(), _NO_ADAPTER, *model),
            all_tenants=config.cache.share_prefixes == "all",
            lead=lead_of(plan.kv_format),
            warm_up=config.cache.warmup_enabled,
        ),
    )


def host_tier(plan: Plan, config: ApplianceConfig) -> HostTier:
    """The places for pages in host memory that the configuration asks for, as far as the plan can use them."""
    page_bytes, given_bytes = plan.page_bytes * plan.model_devices, int(config.cache.host_tier_mb * _MIB)
    places = given_bytes // page_bytes
    if not given_bytes:
        return HostTier()
    if not plan.moved_pages:
        _log.warning("there is no host tier: pages of contexts that are spread over devices stay on them")
        return HostTier()
    if not places:
        _log.warning("there is no host tier: cache.host_tier_mb holds no page", page_bytes=page_bytes)
        return HostTier()
    return HostTier(places, plan.moved_pages)


def lower_tiers(plan: Plan, config: ApplianceConfig, observer: EngineObserver) -> LowerTiers | None:
    """The tiers below host memory that the configuration asks for, the nearest first; None: there are none.

    Contents there outlive this process, so that they are found only by programs that would make the same.
    """
    cache, space = config.cache, bytes.fromhex(digest(identity(plan)))
    stores: list[PageStore] = []
    if cache.disk_tier_mb:
        evicted = partial(observer.tier_event, DiskTier.label, "evicted")
        stores.append(DiskTier(config.home / "pages", int(cache.disk_tier_mb * _MIB), space, evicted))
    if cache.redis_tier:
        from appliance.reuse.redis_index import connect  # noqa: PLC0415 - takes memory that few need

        client = partial(connect, cache.redis_url, TIMEOUT_S, cluster=cache.redis_cluster)
        stores.append(RedisTier(client, cache.redis_tier_ttl_s, space))
    return LowerTiers(stores, plan.page_bytes * plan.model_devices, observer) if stores else None


def page_mover(plan: Plan, places: int, observer: TierObserver, below: Below | None = None) -> HostMemory:
    """Memory for so many pages of a plan, page-locked where a GPU is to read it, and the thread that copies."""
    shape = page_shape(state_shapes(plan).pages)
    sharding = Placement.of(plan, serving_devices(plan)).sharding(PAGE_CUT)

    def to_device(page: np.ndarray) -> object:
        return jax.block_until_ready(jax.device_put(page, sharding, may_alias=False))

    lock = _try_to_lock if find_target(plan.target).card else None
    return HostMemory(places, PageForm(shape.shape, shape.dtype), to_device, observer, lock, below)


def program_set(programs: dict[Bucket, Program]) -> ProgramSet:
    """The loaded programs as the engine calls them."""
    phases = {
        phase: {bucket: program for bucket, program in programs.items() if bucket.phase is phase} for phase in Phase
    }
    (set_slot,) = phases[Phase.SET_SLOT].values()
    found = ProgramSet(decode=phases[Phase.DECODE], prefill=phases[Phase.PREFILL], set_slot=set_slot)
    if not phases[Phase.READ_PAGES]:
        return found
    (read_pages,), (write_pages,) = phases[Phase.READ_PAGES].values(), phases[Phase.WRITE_PAGES].values()
    return replace(found, read_pages=read_pages, write_pages=write_pages, moved_pages=read_pages.bucket.slots)


def lend_to(plan: Plan) -> Callable[[Ints], jax.Array] | None:
    """How a plan's programs take ids where they lie; None where ids have to be sent to the devices."""
    if find_target(plan.target).platform != "cpu" or plan.devices > 1:
        return None
    return partial(jax.dlpack.from_dlpack, copy=False)


def _page_lock(gateway: EngineGateway) -> None:
    """Let the GPU read segments itself; without that it still gets every id, through a buffer of the driver's."""
    _try_to_lock(gateway.memory)


def _try_to_lock(memory: memoryview) -> None:
    try:
        page_lock(memory)
    except PinError as error:
        _log.warning("memory is not page-locked", cause=str(error))


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

    Returns the device state after that, which is as empty as before: rows without ids write nothing, and the page that
    is written is written with nothing.
    """
    for bucket, program in programs.items():
        if bucket.phase is Phase.EMPTY:
            continue
        arguments = idle_arguments(plan, bucket)
        if bucket.phase in (Phase.SET_SLOT, Phase.WRITE_PAGES):
            state = program(state, *arguments)
        elif bucket.phase is Phase.READ_PAGES:
            state, _ = program(state, *arguments)
        else:
            state, _ = program(weights, state, *arguments)
    return jax.block_until_ready(state)


def _count_compilations(observer: EngineObserver) -> Callable[..., None]:
    def listen(event: str, _duration_s: float, **_: str | int) -> None:
        if event == _COMPILE_EVENT:
            observer.compiled()

    return listen
