"""Programs for a GPU that is not there: they compile, hold their pool once, and carry code for the card."""

import multiprocessing
import re

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import compiled
from pallas_kernels.card import find_card
from planner import build as build_module
from planner.architecture import ModelArchitecture
from planner.buckets import Bucket, Phase
from planner.formats import KvFormat, WeightForm
from planner.memory import memory_plan
from planner.plan import Plan, make_plan
from planner.program import compile_program, compile_serialised, deserialise, host_shapes, state_shapes
from planner.sharding import DevicesError
from tests.support.ending import ends_at_once

needs_compiler = pytest.mark.skipif(bool(compiled.missing()), reason=compiled.missing() or "it is there")
SMALL = ModelArchitecture(
    family="llama", layers=2, embed=256, ffw=512, q_heads=8, kv_heads=2, head_dim=64, vocab=512, context=4096,
    norm_eps=1e-5, rope_theta=10_000.0, query_scale=0.125,
)  # fmt: skip

LARGE = ModelArchitecture(
    family="llama", layers=2, embed=8192, ffw=28672, q_heads=64, kv_heads=8, head_dim=128, vocab=128256, context=131072,
    norm_eps=1e-5, rope_theta=500_000.0, query_scale=128**-0.5,
)  # fmt: skip
"""Two layers as wide as those of llama-3.3-70b."""


def plan_of(kv_format: KvFormat) -> Plan:
    return make_plan(
        SMALL, target="a100_sxm_80", weight_form=WeightForm.BF16, kv_format=kv_format, context=0, slots=32,
        prefill_chunk=128, prefill_slots=2, page_size=128, kv_bytes=0, implementation="pallas",
    )  # fmt: skip


def bucket_of(plan: Plan, phase: Phase) -> Bucket:
    slots, chunk = {Phase.DECODE: (4, 1), Phase.PREFILL: (2, 128), Phase.SET_SLOT: (4, 1)}[phase]
    return Bucket(phase, slots, chunk, plan.table_width)


@needs_compiler
@pytest.mark.parametrize("phase", [Phase.DECODE, Phase.PREFILL])
@pytest.mark.parametrize("kv_format", [KvFormat.BF16, KvFormat.INT8, KvFormat.BMQ4])
def test_a_program_compiles_and_holds_the_pool_once(kv_format, phase):
    plan = plan_of(kv_format)
    bucket = bucket_of(plan, phase)
    program = compile_program(plan, bucket)
    memory, cost = memory_plan(plan), program.cost
    host = sum(leaf.size * leaf.dtype.itemsize for leaf in host_shapes(bucket, SMALL.vocab))
    held = memory.pages_bytes + memory.slots_bytes
    assert 0 <= cost.argument_bytes - (memory.weights_bytes + held + host) < 256 * cost.num_arguments, "each aligned"
    assert 0 <= cost.alias_bytes - held < 256 * cost.num_arguments
    assert cost.output_bytes - cost.alias_bytes < 64 * 1024
    assert cost.temp_bytes < memory.pages_bytes, "no second pool"
    text = program.executable.as_text()
    kernels = set(re.findall(r"\b(paged_decode|paged_prefill|page_write|sample)\w*", text))
    assert kernels == {f"paged_{phase}", "page_write", "sample"}


@needs_compiler
@pytest.mark.parametrize("kv_format", [KvFormat.BF16, KvFormat.BMQ4])
@pytest.mark.parametrize("devices", [1, 2])
def test_an_empty_state_is_made_where_it_lies(kv_format, devices):
    plan = make_plan(
        SMALL, target="a100_sxm_80", weight_form=WeightForm.BF16, kv_format=kv_format, context=0, slots=32,
        prefill_chunk=128, prefill_slots=2, page_size=128, kv_bytes=0, implementation="pallas", devices=devices,
    )  # fmt: skip
    program = compile_program(plan, Bucket(Phase.EMPTY, 32, 1, 1))
    memory, cost = memory_plan(plan), program.cost
    held = memory.pages_bytes + memory.slots_bytes
    assert (cost.num_arguments, cost.argument_bytes) == (0, 0)
    assert 0 <= cost.output_bytes - held < 4096
    assert cost.temp_bytes < 4096


@needs_compiler
def test_processes_compile_what_this_one_would():
    plan = plan_of(KvFormat.INT8)
    buckets = [bucket_of(plan, Phase.SET_SLOT), Bucket(Phase.EMPTY, 32, 1, 1)]
    found = {program.bucket: program for program in build_module.compiled(plan, buckets, 2)}
    assert set(found) == set(buckets)
    for bucket, program in found.items():
        assert program.cost == compile_serialised(plan, bucket).cost
        assert program.payload
    assert multiprocessing.active_children() == []


@needs_compiler
def test_a_compiling_process_that_is_killed_is_told(monkeypatch):
    plan = plan_of(KvFormat.INT8)
    monkeypatch.setattr(build_module, "compile_serialised", ends_at_once)
    with pytest.raises(compiled.CompileError, match="was killed, probably for want of memory: take fewer --threads"):
        list(build_module.compiled(plan, plan.buckets()[:2], 2))
    assert multiprocessing.active_children() == []


@needs_compiler
@pytest.mark.parametrize(
    ("context_devices", "exchanges"), [(1, {"all-reduce": 5}), (2, {"all-reduce": 7, "reduce-scatter": 2})]
)
def test_a_large_model_is_cut_over_eight_cards(context_devices, exchanges):
    # after the embedding, and in each layer after o and down; where contexts are spread, in each layer also the peaks
    # of their parts, and then their sums at once
    plan = make_plan(
        LARGE, target="a100_sxm_80", weight_form=WeightForm.BF16, kv_format=KvFormat.BF16, context=0, slots=16,
        prefill_chunk=2048, prefill_slots=8, page_size=128, kv_bytes=1 << 30, implementation="pallas",
        devices=8, context_devices=context_devices,
    )  # fmt: skip
    program = compile_program(plan, Bucket(Phase.DECODE, 16, 1, plan.table_width))
    memory, cost = memory_plan(plan), program.cost
    assert 0 <= cost.alias_bytes - memory.pages_bytes - memory.slots_bytes < 256 * cost.num_arguments
    assert cost.temp_bytes < 0.03 * find_card("a100_sxm_80").memory_bytes
    text = program.executable.as_text()
    found = {kind: len(re.findall(rf" {kind}(?:-start)?\(", text)) for kind in exchanges}
    assert found == exchanges


@needs_compiler
def test_no_weights_are_copied_before_they_are_multiplied():
    plan = make_plan(
        LARGE, target="a100_sxm_80", weight_form=WeightForm.BF16, kv_format=KvFormat.BF16, context=32768, slots=4,
        prefill_chunk=128, prefill_slots=2, page_size=128, kv_bytes=0, implementation="pallas", devices=8,
    )  # fmt: skip
    program = compile_program(plan, Bucket(Phase.DECODE, 4, 1, plan.table_width))
    smallest = 8192 * 10 * 128 * 2  # bytes of a layer's qkv on one card
    assert program.cost.temp_bytes < smallest
    assert program.cost.num_arguments == 2 * 6 + 3 + 4 + 2


@needs_compiler
def test_nothing_is_computed_twice_for_want_of_memory():
    plan = make_plan(
        LARGE, target="a100_sxm_80", weight_form=WeightForm.BF16, kv_format=KvFormat.BF16, context=0, slots=64,
        prefill_chunk=128, prefill_slots=2, page_size=128, kv_bytes=64 << 30, implementation="pallas",
    )  # fmt: skip
    assert memory_plan(plan).pages_bytes > 0.75 * find_card("a100_sxm_80").memory_bytes
    text = compile_program(plan, Bucket(Phase.DECODE, 4, 1, plan.table_width)).executable.as_text()
    assert ".remat" not in text


def test_a_pool_for_a_gpu_holds_numbers_and_one_for_a_cpu_bits():
    assert state_shapes(plan_of(KvFormat.BF16)).pages.dtype == jnp.bfloat16
    assert state_shapes(plan_of(KvFormat.BMQ4)).pages.recent.dtype == jnp.bfloat16
    assert state_shapes(plan_of(KvFormat.INT8)).pages.words.dtype == jnp.int32


@needs_compiler
def test_a_process_without_the_cards_refuses_to_load_and_says_so():
    plan = plan_of(KvFormat.INT8)
    bucket = bucket_of(plan, Phase.SET_SLOT)
    serialised = compile_serialised(plan, bucket)
    with pytest.raises(
        DevicesError, match=f"the plan is for target a100_sxm_80, .*; this process has {len(jax.devices())} of kind cpu"
    ):
        deserialise(plan, serialised)
