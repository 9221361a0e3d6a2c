"""Program: one compiled executable with its bucket and cost; and how programs are lowered, saved and loaded.

Owns the argument shapes of every phase. A program takes arrays of exactly these shapes and refuses all others; nothing
is ever compiled by calling one.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import serialize_executable

from pallas_kernels.kv_layout import BLOCK, RECENT, BitmaskLayout, int8_page_words
from pallas_kernels.pages import BitmaskPages, Int8Pages, Pages
from pallas_kernels.sample.op import Sampled
from planner.architecture import ModelArchitecture
from planner.batch import NUM_FLOATS, NUM_INTS
from planner.buckets import Bucket, Phase
from planner.decoder import QUERY_ENERGY, DeviceState, Numerics, decode_step, prefill_step, set_slot
from planner.formats import KvFormat
from planner.kv import BASE_BITS, energy_shape
from planner.plan import Plan
from planner.weights import weight_specs

_BF16 = jnp.uint16  # its bits, see pallas_kernels.pages: every target is a CPU
_FLOAT_DTYPES = {KvFormat.FLOAT32: jnp.float32, KvFormat.BF16: _BF16}


@dataclass(frozen=True, slots=True)
class ProgramCost:
    """XLA's own figures of a program, in bytes, and its number of argument arrays."""

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
    """Shapes of what lives on the device between steps."""
    arch = plan.architecture
    shape = jax.ShapeDtypeStruct
    return DeviceState._make(
        (
            pool_shapes(plan.kv_format, arch, plan.num_pages, plan.page_size, plan.slots),
            shape((plan.slots,), jnp.int32),
            shape((plan.slots, arch.vocab), jnp.int32),
            shape((plan.slots, arch.vocab), jnp.float32),
        )
    )


def empty_state(plan: Plan) -> DeviceState:
    """A fresh device state: no keys and values, no ids. Allocates, compiles nothing."""
    return _zeros(state_shapes(plan))


def pool_shapes(
    kv_format: KvFormat, architecture: ModelArchitecture, num_pages: int, page_size: int, slots: int
) -> BitmaskPages | Int8Pages | jax.ShapeDtypeStruct:
    """Shapes of a page pool, in the structure that the ops take."""
    shape = jax.ShapeDtypeStruct
    pool, head_dim = (architecture.layers, num_pages, architecture.kv_heads), architecture.head_dim
    if kv_format in BASE_BITS:
        words = (*pool, page_size // BLOCK, BitmaskLayout(head_dim, BASE_BITS[kv_format]).words)
        recent = (architecture.layers, slots, architecture.kv_heads, 2, RECENT, head_dim)
        return BitmaskPages._make((shape(words, jnp.int32), shape(recent, _BF16)))
    if kv_format is KvFormat.INT8:
        return Int8Pages._make((shape((*pool, int8_page_words(page_size, head_dim)), jnp.int32),))
    return shape((*pool, 2, page_size, head_dim), _FLOAT_DTYPES[kv_format])


def empty_pool(plan: Plan, num_pages: int, slots: int) -> Pages:
    """A page pool of a plan's format without keys and values."""
    return _zeros(pool_shapes(plan.kv_format, plan.architecture, num_pages, plan.page_size, slots))


def _zeros(shapes: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.device_put(np.zeros(leaf.shape, leaf.dtype)), shapes)


def weight_shapes(plan: Plan) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of the weight tree, with the query energies where the format of keys and values needs them."""
    arch, shape = plan.architecture, jax.ShapeDtypeStruct
    specs = weight_specs(arch, plan.weight_form)
    shapes = {name: shape(spec.shape, jnp.dtype(spec.dtype)) for name, spec in specs.items()}
    if plan.kv_format in BASE_BITS:
        shapes[QUERY_ENERGY] = shape(energy_shape(arch), jnp.dtype(jnp.float32))
    return shapes


def host_shapes(bucket: Bucket, vocab: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes of the arrays that the host gives a program."""
    shape = jax.ShapeDtypeStruct
    if bucket.phase is Phase.SET_SLOT:
        return shape((), jnp.int32), shape((vocab,), jnp.int32), shape((vocab,), jnp.float32)
    ints = shape((bucket.slots, NUM_INTS + bucket.width), jnp.int32)
    floats = shape((bucket.slots, NUM_FLOATS), jnp.float32)
    if bucket.phase is Phase.DECODE:
        return ints, floats
    return shape((bucket.chunk,), jnp.int32), ints, floats


def numerics_of(plan: Plan) -> Numerics:
    """How a plan's programs do their arithmetic."""
    return Numerics(plan.weight_form, plan.implementation, plan.attention)


def _function(plan: Plan, bucket: Bucket) -> tuple[Callable[..., Any], tuple[Any, ...], int]:
    """What a bucket computes, its argument shapes, and the index of the donated state."""
    numerics = numerics_of(plan)
    host = host_shapes(bucket, plan.architecture.vocab)
    state = state_shapes(plan)
    match bucket.phase:
        case Phase.SET_SLOT:
            return set_slot, (state, *host), 0
        case Phase.DECODE:
            step = functools.partial(decode_step, plan.architecture, numerics)
        case Phase.PREFILL:
            step = functools.partial(prefill_step, plan.architecture, numerics)
    return step, (weight_shapes(plan), state, *host), 1


def compile_program(plan: Plan, bucket: Bucket) -> Program:
    """Lower and compile one bucket on this host's backend."""
    function, arguments, state_index = _function(plan, bucket)
    executable = jax.jit(function, donate_argnums=state_index).lower(*arguments).compile()
    analysis = executable.memory_analysis()
    if analysis is None:
        raise RuntimeError(f"XLA tells no memory figures of {bucket.name}; plans cannot be checked on this backend")
    cost = ProgramCost(
        argument_bytes=analysis.argument_size_in_bytes,
        output_bytes=analysis.output_size_in_bytes,
        alias_bytes=analysis.alias_size_in_bytes,
        temp_bytes=analysis.temp_size_in_bytes,
        code_bytes=analysis.generated_code_size_in_bytes,
        num_arguments=len(jax.tree.leaves(arguments)),
    )
    return Program(bucket, executable, cost)


def serialise(program: Program) -> bytes:
    """The executable as bytes, which only ``deserialise`` on an equal installation and device reads."""
    return serialize_executable.serialize(program.executable)[0]


def deserialise(plan: Plan, bucket: Bucket, cost: ProgramCost, payload: bytes) -> Program:
    """Load an executable without compiling. The payload is unpickled: verify its origin first."""
    _, arguments, state_index = _function(plan, bucket)
    in_tree = jax.tree.structure((arguments, {}))
    state = state_shapes(plan)
    result = state if state_index == 0 else (state, Sampled._make(range(4)))
    executable = serialize_executable.deserialize_and_load(payload, in_tree, jax.tree.structure(result))
    return Program(bucket, executable, cost)


def idle_arguments(plan: Plan, bucket: Bucket) -> tuple[np.ndarray, ...]:
    """Host arrays of an empty batch, for running a program once before it is needed."""
    return tuple(np.zeros(leaf.shape, leaf.dtype) for leaf in host_shapes(bucket, plan.architecture.vocab))
