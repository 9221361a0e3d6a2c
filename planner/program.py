"""Program: one compiled executable with its bucket and cost; and how programs are lowered, saved and loaded.

Owns the argument shapes of every phase and where arguments lie. A program takes arrays of exactly these shapes and
refuses all others; nothing is ever compiled by calling one. Programs for a CPU are compiled on a host with such CPUs,
programs for a GPU by a compiler that needs none.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.experimental import serialize_executable
from jax.sharding import PartitionSpec

from pallas_kernels.card import find_card
from pallas_kernels.compiled import card_devices
from pallas_kernels.kv_layout import BASE_BITS, BLOCK, RECENT, BitmaskLayout, int8_page_words
from pallas_kernels.pages import BitmaskPages, Int8Pages, Pages
from pallas_kernels.sample.op import Sampled
from planner.architecture import ModelArchitecture
from planner.axes import ENERGY_AXES
from planner.batch import NUM_FLOATS, NUM_INTS
from planner.buckets import Bucket, Phase
from planner.decoder import QUERY_ENERGY, DeviceState, Numerics, decode_step, prefill_step, set_slot
from planner.formats import KvFormat
from planner.kv import energy_shape
from planner.memory import memory_plan
from planner.page_moves import PAGE_CUT, page_shape, read_pages, write_pages
from planner.plan import Plan
from planner.sharding import (
    Device,
    DevicesError,
    Placement,
    over_mesh,
    part_of,
    pool_axes,
    spec_of,
    spread_of,
)
from planner.target import find_target
from planner.weights import WeightSpec, by_layer, weight_specs

BF16_BITS = jnp.uint16
"""How pools for a CPU hold bf16 numbers; see ``pallas_kernels.pages``."""


@dataclass(frozen=True, slots=True)
class ProgramCost:
    """XLA's own figures of a program, in bytes of one device, and its number of argument arrays."""

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    code_bytes: int
    num_arguments: int


@dataclass(frozen=True, slots=True)
class Program:
    """A compiled executable of one bucket. Called with (weights, state, host arrays...), see ``planner.decoder``."""

    bucket: Bucket
    executable: jax.stages.Compiled
    cost: ProgramCost

    def __call__(self, *arguments: Any) -> Any:
        """Dispatch; returns at once with arrays that are computed later.

        Raises:
            TypeError: a shape or dtype differs from the bucket's.
        """
        return self.executable(*arguments)


def state_shapes(plan: Plan) -> DeviceState:
    """Shapes of what lives on the devices between steps, of all devices together."""
    arch, bf16 = plan.served, BF16_BITS if _for_cpu(plan) else jnp.bfloat16
    shape = jax.ShapeDtypeStruct
    return DeviceState._make(
        (
            pool_shapes(plan.kv_format, arch, plan.num_pages, plan.page_size, plan.slots, bf16=bf16),
            shape((plan.slots,), jnp.int32),
            shape((plan.slots, arch.vocab), jnp.int32),
            shape((plan.slots, arch.vocab), jnp.float32),
        )
    )


def empty_state(programs: Mapping[Bucket, Program]) -> DeviceState:
    """A fresh state, made on the devices by the program that a plan has for that: no keys and values, no ids."""
    return next(program for bucket, program in programs.items() if bucket.phase is Phase.EMPTY)()


def pool_shapes(
    kv_format: KvFormat,
    architecture: ModelArchitecture,
    num_pages: int,
    page_size: int,
    slots: int,
    *,
    bf16: npt.DTypeLike = BF16_BITS,
) -> BitmaskPages | Int8Pages | jax.ShapeDtypeStruct:
    """Shapes of a page pool, in the structure that the ops take; ``bf16`` is what holds bf16 numbers."""
    shape = jax.ShapeDtypeStruct
    pool, head_dim = (architecture.layers, num_pages, architecture.kv_heads), architecture.head_dim
    if kv_format in BASE_BITS:
        words = (*pool, page_size // BLOCK, BitmaskLayout(head_dim, BASE_BITS[kv_format]).words)
        recent = (architecture.layers, slots, architecture.kv_heads, 2, RECENT, head_dim)
        return BitmaskPages._make((shape(words, jnp.int32), shape(recent, bf16)))
    if kv_format is KvFormat.INT8:
        return Int8Pages._make((shape((*pool, int8_page_words(page_size, head_dim)), jnp.int32),))
    return shape((*pool, 2, page_size, head_dim), jnp.float32 if kv_format is KvFormat.FLOAT32 else bf16)


def empty_pool(plan: Plan, num_pages: int, slots: int) -> Pages:
    """A page pool of a plan's format without keys and values, on one CPU device."""
    shapes = pool_shapes(plan.kv_format, plan.architecture, num_pages, plan.page_size, slots)
    return jax.tree.map(lambda leaf: jax.device_put(np.zeros(leaf.shape, leaf.dtype)), shapes)


def weight_shapes(plan: Plan) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of the weight tree, with the query energies where the format of keys and values needs them."""
    shape = jax.ShapeDtypeStruct
    shapes = {name: shape(spec.shape, jnp.dtype(spec.dtype)) for name, spec in _weight_specs(plan).items()}
    if plan.kv_format in BASE_BITS:
        shapes[QUERY_ENERGY] = shape(energy_shape(plan.served), jnp.dtype(jnp.float32))
    return shapes


def _weight_specs(plan: Plan) -> dict[str, WeightSpec]:
    specs = weight_specs(plan.served, plan.weight_form)
    return by_layer(specs) if plan.weights_by_layer else specs


def state_specs(plan: Plan) -> DeviceState:
    """How the state is cut over devices: its pool by pages and heads, everything else not at all."""
    pool = jax.tree.structure(state_shapes(plan).pages)
    pages = jax.tree.unflatten(pool, [spec_of(axes) for axes in pool_axes(plan.kv_format)])
    return DeviceState._make((pages, *[PartitionSpec()] * 3))


def placed_weight_specs(plan: Plan) -> dict[str, PartitionSpec]:
    """How the arrays of ``weight_shapes`` are cut over devices."""
    found = {name: spec_of(spec.axes) for name, spec in _weight_specs(plan).items()}
    if plan.kv_format in BASE_BITS:
        found[QUERY_ENERGY] = spec_of(ENERGY_AXES)
    return found


def host_shapes(bucket: Bucket, vocab: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes of the arrays that the host gives a program; every device gets all of them."""
    shape = jax.ShapeDtypeStruct
    if bucket.phase is Phase.EMPTY:
        return ()
    if bucket.phase is Phase.SET_SLOT:
        return shape((), jnp.int32), shape((vocab,), jnp.int32), shape((vocab,), jnp.float32)
    if bucket.phase in (Phase.READ_PAGES, Phase.WRITE_PAGES):
        return (shape((bucket.slots,), jnp.int32),)
    ints = shape((bucket.slots, NUM_INTS + bucket.width), jnp.int32)
    floats = shape((bucket.slots, NUM_FLOATS), jnp.float32)
    if bucket.phase is Phase.DECODE:
        return ints, floats
    return shape((bucket.chunk,), jnp.int32), ints, floats


def numerics_of(plan: Plan) -> Numerics:
    """How a plan's programs do their arithmetic."""
    on_gpu = plan.implementation == "pallas"
    linear = "xla" if plan.implementation == "pallas" else plan.implementation
    return Numerics(plan.weight_form, linear, plan.attention, "pallas" if on_gpu else "xla", spread_of(plan))


def building_devices(plan: Plan) -> Sequence[Device]:
    """What a plan's programs are compiled for here: this process's CPU devices, or cards that need not be present.

    Raises:
        CompileError: the compiler for cards is missing.
    """
    if _for_cpu(plan):
        return jax.devices()
    return card_devices(find_card(find_target(plan.target).card), plan.devices)


def serving_devices(plan: Plan) -> Sequence[Device]:
    """The devices of this process that a plan's programs run on.

    Raises:
        DevicesError: they are of another kind, or have less memory than the plan takes.
    """
    devices, wanted = jax.devices(), "cpu" if _for_cpu(plan) else "gpu"
    if devices[0].platform != wanted:
        raise DevicesError(
            f"the plan is for target {plan.target}, whose devices are of kind {wanted}; this process has "
            f"{len(devices)} of kind {devices[0].platform}: choose another target or start it where such devices are"
        )
    if wanted == "gpu":
        needed = memory_plan(plan).total_bytes
        for device in devices[: plan.devices]:
            _require_card(plan, device, needed)
    return devices


def _require_card(plan: Plan, device: Any, needed: int) -> None:
    """Check that a GPU runs the programs of a plan and has the bytes that they take."""
    card = find_card(find_target(plan.target).card)
    wanted = "{}.{}".format(*card.compute_capability)
    if device.compute_capability != wanted:
        raise DevicesError(
            f"the plan is for target {plan.target}, {card.description} of compute capability {wanted}; GPU {device.id} "
            f"here is {device.device_kind} of {device.compute_capability}: take programs that were built for its target"
        )
    given = (device.memory_stats() or {}).get("bytes_limit", needed)
    if given < needed:
        raise DevicesError(
            f"the plan takes {needed} bytes of a GPU, and GPU {device.id} here, {device.device_kind}, gives {given}: "
            "take programs that were built for its target, or build them with a lower gpu.memory_limit_mb"
        )


def _for_cpu(plan: Plan) -> bool:
    return find_target(plan.target).platform == "cpu"


@dataclass(frozen=True, slots=True)
class _Signature:
    """What is computed and how it is called; shapes and cuts are trees of the same structure.

    ``donated`` are the indices of arguments whose memory the results take. Every device computes ``function`` on its
    parts of the arguments; without any, it is the function of the whole.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    cuts: tuple[Any, ...]
    donated: tuple[int, ...]
    result: Any
    result_cuts: Any


def _signature(plan: Plan, bucket: Bucket) -> _Signature:
    numerics, arch = numerics_of(plan), part_of(plan)
    host = host_shapes(bucket, arch.vocab)
    state, state_cuts, host_cuts = state_shapes(plan), state_specs(plan), [PartitionSpec()] * len(host)
    if bucket.phase is Phase.EMPTY:
        return _Signature(functools.partial(_zeros, plan), (), (), (), state, state_cuts)
    if bucket.phase is Phase.SET_SLOT:
        return _Signature(set_slot, (state, *host), (state_cuts, *host_cuts), (0,), state, state_cuts)
    pages, page_cuts = (page_shape(state.pages),) * bucket.slots, (PAGE_CUT,) * bucket.slots
    if bucket.phase is Phase.READ_PAGES:
        result, result_cuts = (state, pages), (state_cuts, page_cuts)
        return _Signature(read_pages, (state, *host), (state_cuts, *host_cuts), (0,), result, result_cuts)
    if bucket.phase is Phase.WRITE_PAGES:
        arguments, cuts = (state, *host, *pages), (state_cuts, *host_cuts, *page_cuts)
        return _Signature(write_pages, arguments, cuts, (0,), state, state_cuts)
    step = functools.partial(decode_step if bucket.phase is Phase.DECODE else prefill_step, arch, numerics)
    arguments, cuts = (weight_shapes(plan), state, *host), (placed_weight_specs(plan), state_cuts, *host_cuts)
    return _Signature(step, arguments, cuts, (1,), (state, Sampled._make(range(4))), (state_cuts, PartitionSpec()))


def _zeros(plan: Plan) -> DeviceState:
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), state_shapes(plan))


def lower_program(plan: Plan, bucket: Bucket) -> jax.stages.Lowered:
    """A bucket's program as the compiler of its target takes it.

    Raises:
        CompileError: the compiler for cards is missing.
        DevicesError: this process has fewer CPU devices than the plan.
    """
    placement = Placement.of(plan, building_devices(plan))
    called = _signature(plan, bucket)
    arguments = jax.tree.map(
        lambda leaf, cut: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placement.sharding(cut)),
        called.arguments,
        called.cuts,
    )
    if not arguments:
        return jax.jit(called.function, out_shardings=jax.tree.map(placement.sharding, called.result_cuts)).lower()
    function = over_mesh(called.function, placement, called.cuts, called.result_cuts)
    return jax.jit(function, donate_argnums=called.donated).lower(*arguments)


def compile_program(plan: Plan, bucket: Bucket) -> Program:
    """Lower and compile one bucket for the plan's target, on this host.

    Raises:
        CompileError: the compiler for cards is missing.
        DevicesError: this process has fewer CPU devices than the plan.
        RuntimeError: XLA tells no memory figures.
    """
    executable = lower_program(plan, bucket).compile()
    analysis = executable.memory_analysis()
    if analysis is None:
        raise RuntimeError(f"XLA tells no memory figures of {bucket.name}; plans cannot be checked on this backend")
    cost = ProgramCost(
        argument_bytes=analysis.argument_size_in_bytes,
        output_bytes=analysis.output_size_in_bytes,
        alias_bytes=analysis.alias_size_in_bytes,
        temp_bytes=analysis.temp_size_in_bytes,
        code_bytes=analysis.generated_code_size_in_bytes,
        num_arguments=len(jax.tree.leaves(executable.args_info)),
    )
    return Program(bucket, executable, cost)


@dataclass(frozen=True, slots=True)
class SerialisedProgram:
    """A program whose executable is bytes, which only ``deserialise`` on an equal installation and device reads."""

    bucket: Bucket
    cost: ProgramCost
    payload: bytes


def serialise(program: Program) -> SerialisedProgram:
    """A program as bytes."""
    return SerialisedProgram(program.bucket, program.cost, serialize_executable.serialize(program.executable)[0])


def compile_serialised(plan: Plan, bucket: Bucket) -> SerialisedProgram:
    """Compile one bucket for another process; raises what ``compile_program`` raises."""
    return serialise(compile_program(plan, bucket))


def deserialise(plan: Plan, program: SerialisedProgram) -> Program:
    """Load an executable onto this process's devices without compiling.

    The payload is unpickled: verify its origin first.

    Raises:
        DevicesError: there are fewer devices than the plan has, or of another kind.
    """
    devices = Placement.of(plan, serving_devices(plan)).devices
    called = _signature(plan, program.bucket)
    trees = jax.tree.structure((called.arguments, {})), jax.tree.structure(called.result)
    executable = serialize_executable.deserialize_and_load(program.payload, *trees, execution_devices=devices)
    return Program(program.bucket, executable, program.cost)


def idle_arguments(plan: Plan, bucket: Bucket) -> tuple[np.ndarray, ...]:
    """Host arrays of an empty batch, for running a program once before it is needed."""
    shapes = host_shapes(bucket, plan.architecture.vocab)
    if bucket.phase is Phase.WRITE_PAGES:
        shapes = (*shapes, *(page_shape(state_shapes(plan).pages),) * bucket.slots)
    return tuple(np.zeros(leaf.shape, leaf.dtype) for leaf in shapes)
