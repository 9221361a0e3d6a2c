"""Programs: memory figures against the arithmetic, donation, refusal of other shapes, every combination traced."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.sample.op import Sampled
from planner.buckets import Bucket, Phase
from planner.build import require_isa
from planner.decoder import Numerics, decode_step, prefill_step
from planner.formats import KvFormat, WeightForm
from planner.memory import memory_plan
from planner.plan import make_plan
from planner.program import empty_state, host_shapes, idle_arguments, state_shapes, weight_shapes
from planner.target import Target, TargetHostError
from planner.weights import weight_specs

MOVES = (Phase.READ_PAGES, Phase.WRITE_PAGES)
PHASES = (Phase.DECODE, Phase.PREFILL, Phase.SET_SLOT)


def arguments_of(plan, bucket):
    host = host_shapes(bucket, plan.architecture.vocab)
    state = state_shapes(plan)
    return (state, *host) if bucket.phase is Phase.SET_SLOT else (weight_shapes(plan), state, *host)


def num_bytes(tree) -> int:
    return sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def test_progress_names_every_program_once(built_store):
    calls, names = built_store.calls, {bucket.name for bucket in built_store.plan.buckets()}
    assert [call[:2] for call in calls] == [(done, 6) for done in range(1, 7)]
    assert {call[2] for call in calls} == names
    assert tuple(built_store.programs) == built_store.plan.buckets()


@pytest.mark.parametrize("phase", PHASES)
def test_argument_bytes_are_the_memory_plan_and_the_host_arrays(built_store, phase):
    plan = built_store.plan
    bucket, program = next((b, p) for b, p in built_store.programs.items() if b.phase is phase)
    memory = memory_plan(plan)
    held = memory.pages_bytes + memory.slots_bytes + (0 if phase is Phase.SET_SLOT else memory.weights_bytes)
    assert num_bytes(state_shapes(plan)) == memory.pages_bytes + memory.slots_bytes
    assert num_bytes(weight_shapes(plan)) == memory.weights_bytes
    assert program.cost.argument_bytes == held + num_bytes(host_shapes(bucket, plan.architecture.vocab))
    assert program.cost.num_arguments == len(jax.tree.leaves(arguments_of(plan, bucket)))


@pytest.mark.parametrize("phase", PHASES)
def test_the_state_is_donated_and_the_pool_is_never_copied(built_store, phase):
    program = next(p for b, p in built_store.programs.items() if b.phase is phase)
    memory = memory_plan(built_store.plan)
    assert program.cost.alias_bytes == memory.pages_bytes + memory.slots_bytes
    assert program.cost.output_bytes - program.cost.alias_bytes < 1_000


def test_idle_arguments_run_every_program_and_write_nothing(built_store):
    plan = built_store.plan
    weights = {n: np.zeros(s.shape, s.dtype) for n, s in weight_specs(plan.architecture, plan.weight_form).items()}
    weights = jax.device_put(weights)
    for bucket, program in built_store.programs.items():
        if bucket.phase is Phase.EMPTY or bucket.phase in MOVES:
            continue
        state = empty_state(built_store.programs)
        pages = state.pages
        if bucket.phase is Phase.SET_SLOT:
            state = program(state, *idle_arguments(plan, bucket))
        else:
            state, out = program(weights, state, *idle_arguments(plan, bucket))
            assert out.ids.shape == (bucket.slots,)
            assert out.top_logprobs.shape == (bucket.slots, 20)
        assert pages.is_deleted(), "donated"
        assert all(not np.asarray(leaf).any() for leaf in state)


def test_an_empty_state_is_made_by_a_program_of_the_store(built_store):
    plan = built_store.plan
    program = next(p for b, p in built_store.programs.items() if b.phase is Phase.EMPTY)
    memory, state = memory_plan(plan), program()
    assert jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state) == state_shapes(plan)
    assert all(not np.asarray(leaf).any() for leaf in jax.tree.leaves(state))
    assert (program.cost.num_arguments, program.cost.argument_bytes, program.cost.temp_bytes) == (0, 0, 0)
    assert 0 <= program.cost.output_bytes - memory.pages_bytes - memory.slots_bytes < 1_000
    with pytest.raises(TypeError):
        program(state)


def test_a_program_refuses_other_shapes_and_dtypes(built_store):
    plan = built_store.plan
    bucket, program = next((b, p) for b, p in built_store.programs.items() if b.phase is Phase.SET_SLOT)
    slot, counts, bias = idle_arguments(plan, bucket)
    with pytest.raises(TypeError, match=re.escape("float32[79]")):
        program(empty_state(built_store.programs), slot, counts, bias[:-1])
    with pytest.raises(TypeError, match="int32"):
        program(empty_state(built_store.programs), slot, counts, bias.astype(np.int32))


@pytest.mark.parametrize("kv_format", [KvFormat.FLOAT32, KvFormat.BF16])
@pytest.mark.parametrize("form", WeightForm)
@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_every_combination_traces_and_returns_the_state_it_took(built_store, kv_format, form, implementation):
    plan = make_plan(
        built_store.plan.architecture, target="cpu_native", weight_form=form, kv_format=kv_format, context=0, slots=3,
        prefill_chunk=64, prefill_slots=2, page_size=16, kv_bytes=0, implementation="xla",
    )  # fmt: skip
    numerics = Numerics(form, implementation, implementation, implementation)
    for step, bucket in ((decode_step, Bucket(Phase.DECODE, 2, 1, 4)), (prefill_step, Bucket(Phase.PREFILL, 2, 64, 4))):
        run = functools.partial(step, plan.architecture, numerics)
        state, out = jax.eval_shape(run, *arguments_of(plan, bucket))
        assert state == state_shapes(plan)
        rows, top = bucket.slots, 20
        assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype.name), out) == Sampled(
            ((rows,), "int32"), ((rows,), "float32"), ((rows, top), "int32"), ((rows, top), "float32")
        )


def test_a_process_that_would_exceed_the_target_is_refused(monkeypatch):
    bound = Target("somewhere", "cpu", "", max_isa="AVX2", features=("avx2",))
    require_isa(Target("here", "cpu", ""))
    payloads = iter([b"\x00+avx2,+avx512f,-avxvnni,+amx-int8,\x00", b"+avx2,+fma,-avx512f,-amx-int8,-avxvnni"])
    monkeypatch.setattr("planner.build.serialize_executable.serialize", lambda _: (next(payloads), None, None))
    with pytest.raises(
        TargetHostError,
        match=r"target somewhere is bound to AVX2, .* may use amx-int8, avx512f; start it with XLA_FLAGS=--xla_cpu_max",
    ):
        require_isa(bound)
    require_isa(bound)


def test_the_feature_list_is_where_the_check_looks():
    from jax.experimental import serialize_executable

    probe = jax.jit(jnp.negative).lower(jax.ShapeDtypeStruct((16,), jnp.float32)).compile()
    assert re.search(rb"[+-]avx512f\b", serialize_executable.serialize(probe)[0])
