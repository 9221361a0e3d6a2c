"""Null programs: executables that take and donate what a plan's programs take, and compute nothing of its model.

Owns their shapes, their compilation and the arrays that stand for weights and state. Reads a plan; its programs need
not exist here, and neither need its target. What a launch costs the host depends on how many arrays go in and out, on
their structure and on the sizes of those that the host makes itself, so all of these are the plan's own. Arrays that
stay on the device are shortened where they would not fit: to call with them costs the same.

Every executable goes through bytes and back, as one from a program store does.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import serialize_executable
from jax.sharding import SingleDeviceSharding
from jaxtyping import Array, Float, Int32

from appliance.engine_ports import ProgramSet
from pallas_kernels.sample.op import Sampled
from planner.batch import NUM_TOP_LOGPROBS
from planner.buckets import Bucket, Phase
from planner.decoder import DeviceState, set_slot
from planner.plan import Plan
from planner.program import host_shapes, state_shapes, weight_shapes

LARGEST_BYTES = 1 << 20
"""Bytes of one array, above which its leading dimensions become 1 one after the other."""

SAMPLED_ID = 1
"""What every row of a null program samples."""

_Tree = Any

_PHASES = (Phase.DECODE, Phase.PREFILL, Phase.SET_SLOT)
"""What a step of an engine without tiers launches."""


@dataclass(frozen=True, slots=True)
class NullDevice:
    """A device that computes nothing: what its programs take first, and the programs.

    ``num_arguments`` is the number of arrays that a decode program takes, ``shortened`` how many of them are smaller
    than the plan's. ``aliased`` says whether every program returns the whole state in the memory that it was given.
    """

    weights: object
    state: object
    programs: ProgramSet
    num_arguments: int
    shortened: int
    aliased: bool


def null_device(plan: Plan, progress: Callable[[int, int], None]) -> NullDevice:
    """Compile a null program for every bucket of a plan, on the first device of this process.

    Args:
        plan: of one device.
        progress: called with (compiled, all) after every program.

    Raises:
        ValueError: the plan has several devices.
    """
    if plan.devices > 1:
        raise ValueError(f"null programs stand for one device; the plan has {plan.devices}")
    place = SingleDeviceSharding(jax.devices()[0])
    whole = weight_shapes(plan), state_shapes(plan)
    weights, state = jax.tree.map(lambda leaf: _shortened(leaf, place), whole)
    loaded: dict[Bucket, jax.stages.Compiled] = {}
    aliased = True
    buckets = [bucket for bucket in plan.buckets() if bucket.phase in _PHASES]
    for done, bucket in enumerate(buckets, 1):
        host = jax.tree.map(lambda leaf: _on(leaf, place), host_shapes(bucket, plan.architecture.vocab))
        loaded[bucket], kept = _compiled(bucket, weights, state, host, place)
        aliased = aliased and kept
        progress(done, len(buckets))
    phases = {phase: {b: program for b, program in loaded.items() if b.phase is phase} for phase in Phase}
    (set_one,) = phases[Phase.SET_SLOT].values()
    before, after = jax.tree.leaves(whole), jax.tree.leaves((weights, state))
    return NullDevice(
        weights=_zeros(weights),
        state=_zeros(state),
        programs=ProgramSet(decode=phases[Phase.DECODE], prefill=phases[Phase.PREFILL], set_slot=set_one),
        num_arguments=len(after) + len(host_shapes(next(iter(phases[Phase.DECODE])), 1)),
        shortened=sum(b.shape != a.shape for b, a in zip(before, after, strict=True)),
        aliased=aliased,
    )


def decode(
    weights: _Tree, state: DeviceState, ints: Int32[Array, "slots columns"], floats: Float[Array, "slots columns"]
) -> tuple[DeviceState, Sampled]:
    """A decode launch that samples ``SAMPLED_ID`` in every row."""
    del weights, floats
    return _sampled(state, ints)


def prefill(
    weights: _Tree,
    state: DeviceState,
    tokens: Int32[Array, " ids"],
    ints: Int32[Array, "rows columns"],
    floats: Float[Array, "rows columns"],
) -> tuple[DeviceState, Sampled]:
    """A prefill launch that samples ``SAMPLED_ID`` in every row."""
    del weights, tokens, floats
    return _sampled(state, ints)


def _sampled(state: DeviceState, ints: Array) -> tuple[DeviceState, Sampled]:
    """The ids depend on nothing, but the newest id of a slot is written, so that the state goes through the program."""
    rows = ints.shape[0]
    ids = jnp.full((rows,), SAMPLED_ID, jnp.int32)
    top = rows, NUM_TOP_LOGPROBS
    out = Sampled._make((ids, jnp.zeros((rows,)), jnp.ones(top, jnp.int32), jnp.zeros(top)))
    return state._replace(last_ids=state.last_ids.at[: len(state.last_ids)].set(ints[0, 0])), out


def _compiled(
    bucket: Bucket, weights: _Tree, state: DeviceState, host: _Tree, place: SingleDeviceSharding
) -> tuple[jax.stages.Compiled, bool]:
    """The executable of a bucket after a way through bytes, and whether it returns the state where it lies."""
    if bucket.phase is Phase.SET_SLOT:
        function, arguments, donated, result = set_slot, (state, *host), 0, state
    else:
        function = decode if bucket.phase is Phase.DECODE else prefill
        arguments, donated, result = (weights, state, *host), 1, (state, Sampled._make(range(4)))
    made = jax.jit(function, donate_argnums=donated, keep_unused=True).lower(*arguments).compile()
    analysis = made.memory_analysis()
    state_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    payload: bytes = serialize_executable.serialize(made)[0]
    trees = jax.tree.structure((arguments, {})), jax.tree.structure(result)
    loaded = serialize_executable.deserialize_and_load(payload, *trees, execution_devices=list(place.device_set))
    return loaded, analysis is not None and analysis.alias_size_in_bytes >= state_bytes


def _shortened(leaf: jax.ShapeDtypeStruct, place: SingleDeviceSharding) -> jax.ShapeDtypeStruct:
    shape = list(leaf.shape)
    for axis in range(len(shape)):
        if int(np.prod(shape, dtype=np.int64)) * leaf.dtype.itemsize <= LARGEST_BYTES:
            break
        shape[axis] = 1
    return _on(jax.ShapeDtypeStruct(tuple(shape), leaf.dtype), place)


def _on(leaf: jax.ShapeDtypeStruct, place: SingleDeviceSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)


def _zeros(shapes: _Tree) -> _Tree:
    return jax.tree.map(lambda leaf: jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding), shapes)
