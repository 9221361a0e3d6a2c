"""Memory plans: bytes on each device by hand, what is left for pages, sequences that fit, and the two contracts."""

from dataclasses import dataclass, replace

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.card import find_card
from planner.architecture import ModelArchitecture
from planner.buckets import Bucket, Phase
from planner.catalogue import find_architecture
from planner.formats import KvFormat, WeightForm
from planner.host_tier import PAGES_ON_THE_WAY
from planner.memory import (
    LENGTHS,
    MemoryPlanError,
    check,
    memory_plan,
    pool_bytes,
    prefill_rows,
    resident,
    workspace_allowance,
)
from planner.pages import PagePool
from planner.plan import MOVED_BYTES, Plan, make_plan, with_pool
from planner.program import host_shapes
from planner.target import find_target

GIB = 1 << 30
ARCHITECTURE = ModelArchitecture(
    family="llama", layers=2, embed=64, ffw=96, q_heads=8, kv_heads=4, head_dim=16, vocab=160, context=131072,
    norm_eps=1e-6, rope_theta=10_000.0, query_scale=0.25,
)  # fmt: skip
USABLE = find_target("a100_sxm_80").usable_bytes
DEVICE = find_card("a100_sxm_80").memory_bytes


@dataclass(frozen=True)
class Figures:
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int


def plan_of(**changes: object) -> Plan:
    settings = {
        "target": "a100_sxm_80", "weight_form": WeightForm.BF16, "kv_format": KvFormat.BF16, "context": 0, "slots": 8,
        "prefill_chunk": 64, "prefill_slots": 2, "page_size": 128, "kv_bytes": 0, "implementation": "pallas",
    }  # fmt: skip
    return make_plan(changes.pop("architecture", ARCHITECTURE), **{**settings, **changes})


def test_weights_are_cut_where_an_axis_is_and_pages_by_heads_and_positions():
    whole, cut = 2 * 160 * 64 + 2 * 64 * (16 * 16) + 2 * 128 * 64 + 2 * 3 * 64 * 96, 2 * 2 * 64 + 64
    assert memory_plan(plan_of()).weights_bytes == 2 * whole + 4 * cut
    memory = memory_plan(plan_of(devices=4))
    assert memory.weights_bytes == 2 * whole // 4 + 4 * cut, "norms are on every device"
    page = 2 * 2 * 128 * 16 * 2  # of one head
    assert memory.pages_bytes == 8 * 1024 * page
    assert memory.slots_bytes == 8 * (4 + 2 * 4 * 160)
    spread = memory_plan(plan_of(devices=4, context_devices=2))
    assert spread.weights_bytes == memory.weights_bytes
    assert spread.pages_bytes == 8 * 512 * 2 * page


def test_what_a_slot_keeps_and_the_energies_go_with_the_heads_of_pages():
    one, four = memory_plan(plan_of(kv_format=KvFormat.BMQ4)), memory_plan(plan_of(kv_format=KvFormat.BMQ4, devices=4))
    kept = 2 * 2 * 144 * 16 * 2  # layers, keys and values, positions, head_dim, bf16; of one head
    assert one.slots_bytes == 8 * (4 + 2 * 4 * 160 + 4 * kept)
    assert four.slots_bytes == 8 * (4 + 2 * 4 * 160 + kept)
    bare = memory_plan(plan_of())
    assert one.weights_bytes - bare.weights_bytes == 4 * 2 * 4 * 16
    assert four.weights_bytes - memory_plan(plan_of(devices=4)).weights_bytes == 4 * 2 * 16


def test_the_reserve_and_the_workspace_of_a_gpu():
    memory = memory_plan(plan_of())
    assert (memory.usable_bytes, memory.reserve_bytes) == (USABLE, DEVICE - USABLE)
    assert memory.workspace_bytes == workspace_allowance(plan_of()) > int(0.03 * DEVICE)
    assert memory_plan(plan_of(), workspace_bytes=5).workspace_bytes == 5
    assert memory_plan(plan_of(), usable_bytes=GIB).reserve_bytes == DEVICE - GIB
    assert memory_plan(plan_of(), usable_bytes=500 * GIB).usable_bytes == USABLE, "never more than the target has"
    cpu = memory_plan(plan_of(target="cpu_native", weight_form=WeightForm.INT8, implementation="xla"))
    assert (cpu.workspace_bytes, cpu.reserve_bytes, cpu.usable_bytes, cpu.fits) == (0, 0, 0, True)


@pytest.mark.parametrize("kv_format", [KvFormat.BF16, KvFormat.INT8, KvFormat.BMQ4, KvFormat.BMQ2])
def test_a_pool_of_what_is_left_fits_and_a_larger_one_does_not(kv_format):
    draft = plan_of(architecture=find_architecture("llama-3.1-8b"), kv_format=kv_format, slots=64)
    left = pool_bytes(draft)
    assert left == pool_bytes(with_pool(draft, left)), "whatever the draft's pool is"
    full = with_pool(draft, left)
    assert memory_plan(full).fits
    assert memory_plan(full).total_bytes > USABLE - full.page_bytes
    assert not memory_plan(with_pool(draft, left + full.page_bytes)).fits


def test_what_leaves_nothing_is_refused_with_every_part():
    large = find_architecture("llama-3.3-70b")
    weights = 2 * large.parameters() + 2 * (2 * 80 + 1) * 8192  # norms are float32
    with pytest.raises(
        MemoryPlanError,
        match=f"{USABLE} usable bytes of each device hold no pages beside {weights} bytes of weights, "
        r"\d+ of slots and \d+ of workspace: take more devices than 1, fewer slots than 8",
    ):
        pool_bytes(plan_of(architecture=large))
    with pytest.raises(MemoryPlanError, match="target cpu_native has no memory of its own to fill"):
        pool_bytes(plan_of(target="cpu_native", weight_form=WeightForm.INT8, implementation="xla"))


@pytest.mark.parametrize(
    ("name", "devices", "context_devices", "kv_format", "rows"),
    [
        ("llama-3.1-8b", 1, 1, KvFormat.BMQ4, 8),  # 134 MB of a stretch of a layer each, of 1.70 GB
        ("gemma-3-27b", 1, 1, KvFormat.BMQ4, 6),  # 268 MB
        ("gemma-3-27b", 1, 1, KvFormat.INT8, 8),
        ("gemma-3-27b", 2, 1, KvFormat.BMQ2, 8),
    ],
)
def test_bitmask_prefills_hold_as_many_rows_as_can_be_unpacked(name, devices, context_devices, kv_format, rows):
    plan = plan_of(
        architecture=find_architecture(name), kv_format=kv_format, prefill_slots=8, devices=devices,
        context_devices=context_devices,
    )  # fmt: skip
    assert prefill_rows(plan) == rows


def test_one_row_is_the_least_and_a_cpu_unpacks_nothing():
    huge = replace(find_architecture("gemma-3-27b"), q_heads=64, kv_heads=64, head_dim=256)
    assert prefill_rows(plan_of(architecture=huge, kv_format=KvFormat.BMQ4, prefill_slots=8, target="a100_sxm_40")) == 1
    cpu = plan_of(
        target="cpu_native", weight_form=WeightForm.INT8, implementation="xla", prefill_slots=5, kv_format=KvFormat.BMQ4
    )
    assert prefill_rows(cpu) == 5


def test_resident_sequences_by_hand():
    plan = with_pool(plan_of(slots=64), 1024 * 3 * plan_of().page_bytes + 77)
    assert [resident(plan, length) for length in LENGTHS] == [12, 6, 3]
    assert resident(plan, 200_000) == 0
    assert resident(replace(plan, slots=5), 32 * 1024) == 5
    assert resident(plan, 1) == 64


@given(st.integers(1, 4), st.integers(1, 60), st.integers(1, 20_000))
def test_resident_sequences_are_those_that_the_page_pool_takes(devices, on_one, length):
    plan = replace(
        plan_of(context=32768), context_devices=devices, num_pages=devices * on_one, shard_len=1024, slots=40,
        devices=devices,
    )  # fmt: skip
    pool = PagePool(plan.num_pages, plan.page_size, devices, plan.shard_pages)
    pages, found = pool.pages_for(length), 0
    while found < plan.slots:
        home = pool.homes()[0]
        wanted = pool.on_devices(home, 0, pages)
        if any(count > pool.free_on(device) for device, count in enumerate(wanted)):
            break
        pool.take(pages, home)
        found += 1
    assert resident(plan, length) == found


def test_the_workspace_holds_what_a_step_exchanges_twice():
    for name in ("llama-3.1-8b", "gemma-3-27b"):
        plan = plan_of(architecture=find_architecture(name), slots=64, prefill_chunk=1024, prefill_slots=8)
        given_to = sum(
            int(np.prod(leaf.shape)) * leaf.dtype.itemsize
            for bucket in (
                Bucket(Phase.DECODE, 64, 1, plan.table_width), Bucket(Phase.PREFILL, 8, 1024, plan.table_width),
                *[Bucket(Phase.SET_SLOT, 64, 1, 1)] * 64,
            )
            for leaf in jax.tree.leaves(host_shapes(bucket, plan.architecture.vocab))
        )  # fmt: skip
        back = 72 * 4 * (1 + 1 + 20 + 20)
        moving = PAGES_ON_THE_WAY * MOVED_BYTES
        allowed = workspace_allowance(plan) - int(0.03 * DEVICE) - moving
        assert 2 * (given_to + back) <= allowed < 2 * (given_to + back) + 1000


def figures_of(plan: Plan, **changes: int) -> Figures:
    memory = memory_plan(plan)
    donated = memory.pages_bytes + memory.slots_bytes
    good = Figures(memory.weights_bytes + donated + 1000, donated + 500, donated, int(0.03 * DEVICE))
    return replace(good, **changes)


DECODE, PREFILL = Bucket(Phase.DECODE, 8, 1, 1024), Bucket(Phase.PREFILL, 2, 64, 1024)


def test_programs_that_keep_to_the_plan_pass():
    plan = plan_of()
    check(plan, {DECODE: figures_of(plan), PREFILL: figures_of(plan, temp_bytes=0)})
    cpu = plan_of(target="cpu_native", weight_form=WeightForm.INT8, implementation="xla")
    check(cpu, {DECODE: figures_of(cpu, temp_bytes=DEVICE)})


def test_programs_that_do_not_are_named_with_their_bytes():
    plan = plan_of()
    good = figures_of(plan)
    second_pool = replace(good, alias_bytes=good.alias_bytes - 1)
    with pytest.raises(
        MemoryPlanError,
        match=f"decode-s8-c1-w1024: {good.alias_bytes - 1} bytes of the {good.alias_bytes} donated are updated in",
    ):
        check(plan, {PREFILL: good, DECODE: second_pool})
    wide = replace(good, temp_bytes=int(0.03 * DEVICE) + 1)
    message = rf"prefill-s2-c64-w1024: {wide.temp_bytes} bytes of temporaries pass {int(0.03 * DEVICE)}, 3% of the dev"
    with pytest.raises(MemoryPlanError, match=message):
        check(plan, {PREFILL: wide, DECODE: good})
    large = replace(good, argument_bytes=USABLE)
    over = USABLE + good.temp_bytes + 500
    with pytest.raises(
        MemoryPlanError, match=rf"decode-s8-c1-w1024: {over} bytes .* pass the {USABLE} usable"
    ) as raised:
        check(plan, {DECODE: large})
    assert f"make the page pool {over - USABLE} bytes smaller" in str(raised.value)
    with pytest.raises(MemoryPlanError, match=r"(?s)decode-.*decode-.*prefill-"):
        check(plan, {DECODE: replace(large, alias_bytes=0), PREFILL: wide})


def test_a_smaller_bound_is_held_too():
    plan = plan_of()
    with pytest.raises(MemoryPlanError, match=f"pass the {GIB} usable ones of a100_sxm_80"):
        check(plan, {DECODE: figures_of(plan)}, usable_bytes=GIB)
