"""Models cut over 2, 4 and 8 devices answer as on one, through the engine; run where there are eight."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from planner.buckets import Phase
from planner.formats import KvFormat, WeightForm
from planner.memory import memory_plan
from planner.program import (
    compile_program,
    compile_serialised,
    deserialise,
    idle_arguments,
    placed_weight_specs,
    weight_shapes,
)
from planner.sharding import DevicesError, Placement
from tests.support.spread_engine import MODEL, answers, assert_equal, plan_of

RNG = np.random.default_rng(3)
PROMPTS = [RNG.integers(0, MODEL.vocab, length).tolist() for length in (150, 37, 5)]
FEW = replace(MODEL, kv_heads=2)
EVERYTHING = replace(
    MODEL, qkv_bias=True, qk_norm=True, post_norms=True, embed_scale=8.0, attn_softcap=20.0, logit_softcap=15.0,
    windows=(24, 0), local_rope=(True, False), rope_local_theta=1_000.0, tied_embeddings=True,
)  # fmt: skip
CASES = [
    pytest.param(2, FEW, {}, 1e-4, id="a head each"),
    pytest.param(8, FEW, {}, 1e-4, id="heads on four devices each"),
    pytest.param(4, EVERYTHING, {}, 1e-4, id="two heads each of a model with everything"),
    # what is stored is rounded, and so goes another way where sums differ in their last bits
    pytest.param(4, FEW, {"kv_format": KvFormat.INT8}, 1e-2, id="int8"),
    pytest.param(8, FEW, {"kv_format": KvFormat.BMQ4, "page_size": 128}, 1e-2, id="bmq4"),
    # activations are rounded by what a device has of a row
    pytest.param(2, MODEL, {"weight_form": WeightForm.INT8}, 1e-2, id="four heads each, int8 weights"),
]


@pytest.fixture(scope="module")
def on_one():
    known = {}

    def find(architecture, changes):
        key = repr((architecture, changes))
        if key not in known:
            known[key] = answers(plan_of(architecture, **changes), PROMPTS, 6)
        return known[key]

    return find


@pytest.mark.parametrize(("devices", "architecture", "changes", "tolerance"), CASES)
def test_ids_and_probabilities_are_those_of_one_device(on_one, devices, architecture, changes, tolerance):
    found = answers(plan_of(architecture, devices=devices, **changes), PROMPTS, 6)
    assert_equal(found, on_one(architecture, changes), tolerance)


def test_programs_of_several_devices_are_saved_and_loaded():
    plan = plan_of(FEW, devices=4)
    loaded = {}
    for bucket in plan.buckets():
        if bucket.phase in (Phase.SET_SLOT, Phase.EMPTY):
            loaded[bucket.phase] = deserialise(plan, compile_serialised(plan, bucket))
    set_slot = loaded[Phase.SET_SLOT]
    _, counts, bias = idle_arguments(plan, set_slot.bucket)
    state = set_slot(loaded[Phase.EMPTY](), np.int32(1), counts + 3, bias)
    assert np.asarray(state.counts).tolist() == [[0] * 160, [3] * 160]
    assert {shard.device for shard in state.pages.addressable_shards} == set(jax.devices()[:4])
    assert state.pages.addressable_shards[0].data.shape[2] == plan.served.kv_heads // 4


@pytest.mark.parametrize("kv_format", KvFormat)
@pytest.mark.parametrize("context_devices", [1, 4])
def test_a_device_holds_what_the_memory_plan_says(kv_format, context_devices):
    plan = plan_of(FEW, devices=8, context_devices=context_devices, kv_format=kv_format, page_size=128, shard_len=128)
    memory = memory_plan(plan)
    program = compile_program(plan, next(bucket for bucket in plan.buckets() if bucket.phase is Phase.SET_SLOT))
    assert program.cost.alias_bytes == memory.pages_bytes + memory.slots_bytes
    placement = Placement.of(plan, jax.devices())
    parts = jax.tree.map(
        lambda leaf, spec: np.prod(placement.sharding(spec).shard_shape(leaf.shape)) * leaf.dtype.itemsize,
        weight_shapes(plan),
        placed_weight_specs(plan),
    )
    assert sum(parts.values()) == memory.weights_bytes


def test_a_plan_for_more_devices_than_there_are_is_refused():
    plan = replace(plan_of(replace(MODEL, kv_heads=16), devices=8), devices=16)
    with pytest.raises(DevicesError, match="the plan has 16 devices and this process has 8: plan for fewer"):
        compile_program(plan, plan.buckets()[-1])
