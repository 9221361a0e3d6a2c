"""Bytes of every format of keys and values against arrays and programs; the models that a format cannot hold."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from planner import kv
from planner.architecture import ModelArchitecture
from planner.buckets import Bucket, Phase
from planner.formats import KvFormat, WeightForm
from planner.memory import memory_plan
from planner.plan import PlanError, make_plan
from planner.program import compile_program, host_shapes, pool_shapes, state_shapes, weight_shapes

ARCHITECTURE = ModelArchitecture(
    family="llama", layers=2, embed=32, ffw=48, q_heads=4, kv_heads=2, head_dim=16, vocab=80, context=256,
    norm_eps=1e-6, rope_theta=10_000.0, query_scale=0.25, tied_embeddings=True,
)  # fmt: skip
QUANTISED = (KvFormat.INT8, KvFormat.BMQ4, KvFormat.BMQ2)
PER_TOKEN = {KvFormat.FLOAT32: (8, 0), KvFormat.BF16: (4, 0), KvFormat.INT8: (2, 4)}
"""Bytes of a token of one layer and head: so many for each channel, and so many more."""


def num_bytes(tree) -> int:
    return sum(int(np.prod(leaf.shape)) * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("head_dim", [8, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("kv_format", KvFormat)
def test_bytes_are_those_of_the_arrays(kv_format, head_dim):
    arch = replace(ARCHITECTURE, head_dim=head_dim)
    for page_size in (128, 256, 512) if kv_format in kv.BASE_BITS else (16, 32, 64, 128, 256, 512):
        pages, slots = 7, 5
        pool = pool_shapes(kv_format, arch, pages, page_size, slots)
        page, slot = kv.page_bytes(kv_format, arch, page_size), kv.slot_bytes(kv_format, arch)
        assert num_bytes(pool) == pages * page + slots * slot
        if kv_format in kv.BASE_BITS:
            factor = 35 if kv_format is KvFormat.BMQ4 else 29
            assert page * 128 == 2 * 2 * page_size * 4 * (factor * head_dim + 72)
            assert slot == 2 * 2 * 144 * 2 * head_dim * 2
        else:
            channel, more = PER_TOKEN[kv_format]
            assert page == 2 * 2 * page_size * (channel * head_dim + more)
            assert slot == 0
        assert kv.bits_per_element(kv_format, head_dim) == page * 8 / (2 * 2 * page_size * 2 * head_dim)


def plan_of(kv_format: KvFormat, **options: object):
    settings = {
        "target": "cpu_native", "weight_form": WeightForm.INT8, "kv_format": kv_format, "context": 0, "slots": 2,
        "prefill_chunk": 32, "prefill_slots": 2, "page_size": 128, "kv_bytes": 0, "implementation": "xla",
    }  # fmt: skip
    return make_plan(options.pop("architecture", ARCHITECTURE), **{**settings, **options})


@pytest.mark.parametrize("kv_format", [KvFormat.INT8, KvFormat.BMQ4])
def test_argument_bytes_are_the_memory_plan_and_no_pool_is_copied(kv_format):
    plan = plan_of(kv_format, slots=1)
    memory, bucket = memory_plan(plan), Bucket(Phase.DECODE, 1, 1, 2)
    assert num_bytes(state_shapes(plan)) == memory.pages_bytes + memory.slots_bytes
    assert num_bytes(weight_shapes(plan)) == memory.weights_bytes
    cost = compile_program(plan, bucket).cost
    held = memory.weights_bytes + memory.pages_bytes + memory.slots_bytes
    assert cost.argument_bytes == held + num_bytes(host_shapes(bucket, ARCHITECTURE.vocab))
    assert cost.alias_bytes == memory.pages_bytes + memory.slots_bytes
    assert cost.output_bytes - cost.alias_bytes < 1_000


@pytest.mark.parametrize(
    ("kv_format", "options", "message"),
    [
        (KvFormat.BMQ4, {"page_size": 64}, "page_size 64 must be a multiple of 128 for kv_format bmq4"),
        (KvFormat.BMQ2, {"architecture": replace(ARCHITECTURE, head_dim=48)}, "this model has 48: use int8"),
        (KvFormat.INT8, {"architecture": replace(ARCHITECTURE, head_dim=18)}, "this model has 18: use bf16 or float32"),
    ],
)
def test_what_a_format_cannot_hold_is_refused(kv_format, options, message):
    with pytest.raises(PlanError, match=message):
        plan_of(kv_format, **options)


def test_attention_over_quantised_pages_is_native_where_the_plan_is():
    for kv_format in QUANTISED:
        for implementation in ("native", "xla"):
            plan = plan_of(kv_format, implementation=implementation)
            assert (plan.implementation, plan.attention) == (implementation, implementation)
    with pytest.raises(PlanError, match="implementation native needs a head_dim that 16 divides, this model has 8"):
        plan_of(KvFormat.BMQ4, implementation="native", architecture=replace(ARCHITECTURE, head_dim=8))
