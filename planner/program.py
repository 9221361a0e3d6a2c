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

from pallas_kernels.sample.op import Sampled
from planner.batch import NUM_FLOATS, NUM_INTS
from planner.buckets import Bucket, Phase
from planner.decoder import DeviceState, Numerics, decode_step, prefill_step, set_slot
from planner.formats import KvFormat
from planner.plan import Plan
from planner.weights import weight_specs

KV_DTYPES = {KvFormat.FLOAT32: jnp.float32, KvFormat.BF16: jnp.bfloat16}


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
    pages = (arch.layers, plan.num_pages, arch.kv_heads, 2, plan.page_size, arch.head_dim)
    return DeviceState._make(
        (
            shape(pages, KV_DTYPES[plan.kv_format]),
            shape((plan.slots,), jnp.int32),
            shape((plan.slots, arch.vocab), jnp.int32),
            shape((plan.slots, arch.vocab), jnp.float32),
        )
    )


def empty_state(plan: Plan) -> DeviceState:
    """A fresh device state: no keys and values, no ids. Allocates, compiles nothing."""
    shapes = state_shapes(plan)
    return DeviceState(*(jax.device_put(np.zeros(leaf.shape, leaf.dtype)) for leaf in shapes))


def weight_shapes(plan: Plan) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of the weight tree."""
    specs = weight_specs(plan.architecture, plan.weight_form)
    return {name: jax.ShapeDtypeStruct(spec.shape, jnp.dtype(spec.dtype)) for name, spec in specs.items()}


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


def _function(plan: Plan, bucket: Bucket) -> tuple[Callable[..., Any], tuple[Any, ...], int]:
    """What a bucket computes, its argument shapes, and the index of the donated state."""
    numerics = Numerics(plan.weight_form, plan.implementation)
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
