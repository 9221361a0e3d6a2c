"""Programs that move pages: bit for bit against NumPy in every format, in place, and for cards that are not there."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from pallas_kernels import compiled
from planner.buckets import Bucket, Phase
from planner.formats import KvFormat, WeightForm
from planner.host_tier import PAGES_ON_THE_WAY
from planner.memory import check, memory_plan, workspace_allowance
from planner.page_moves import page_shape
from planner.plan import MOST_MOVED, MOVED_BYTES, Plan, make_plan
from planner.program import compile_program, compile_serialised, deserialise, idle_arguments, state_shapes
from tests.planner.test_gpu_programs import LARGE, SMALL
from tests.support.spread_engine import MODEL, plan_of

needs_compiler = pytest.mark.skipif(bool(compiled.missing()), reason=compiled.missing() or "it is there")


def buckets_of(plan: Plan) -> tuple[Bucket, Bucket]:
    read, write = (b for b in plan.buckets() if b.phase in (Phase.READ_PAGES, Phase.WRITE_PAGES))
    return read, write


def a_plan(kv_format: KvFormat) -> Plan:
    return plan_of(MODEL, kv_format=kv_format, page_size=128, kv_bytes=0, slots=3)


def random_state(plan: Plan, seed: int):
    """A state of random bits, and the pool's words or numbers as NumPy sees them."""
    source = np.random.default_rng(seed)

    def bits(leaf) -> np.ndarray:
        count = int(np.prod(leaf.shape)) * leaf.dtype.itemsize
        return source.integers(0, 256, count, np.uint8).view(leaf.dtype).reshape(leaf.shape)

    state = jax.tree.map(bits, state_shapes(plan))
    return jax.device_put(state), np.array(jax.tree.leaves(state.pages)[0])


def raw(array) -> bytes:
    return np.asarray(array).tobytes()


@pytest.mark.parametrize("kv_format", KvFormat)
def test_pages_come_out_and_go_in_as_they_are(kv_format):
    plan = a_plan(kv_format)
    read, write = (compile_program(plan, bucket) for bucket in buckets_of(plan))
    state, pool = random_state(plan, 3)
    beside = [raw(leaf) for leaf in jax.tree.leaves(state)[1:]]
    count = read.bucket.slots
    ids = np.resize([5, 0, 11], count).astype(np.int32)
    state, pages = read(state, ids)
    assert len(pages) == count
    for page, number in zip(pages, ids, strict=True):
        assert raw(page) == raw(pool[:, number])
    target = np.arange(count, dtype=np.int32) % 12
    old, source = np.array(jax.tree.leaves(state.pages)[0]), [np.array(page) for page in pages]
    state = write(state, target, *pages)
    wanted = old.copy()
    for number, page in zip(target, source, strict=True):
        wanted[:, number] = page
    assert raw(jax.tree.leaves(state.pages)[0]) == raw(wanted)
    assert [raw(leaf) for leaf in jax.tree.leaves(state)[1:]] == beside, "nothing else is touched"


def test_the_pool_is_never_copied_and_the_figures_keep_to_the_plan():
    plan = a_plan(KvFormat.BMQ4)
    memory = memory_plan(plan)
    programs = {bucket: compile_program(plan, bucket) for bucket in buckets_of(plan)}
    moved = plan.moved_pages * plan.page_bytes
    for bucket, program in programs.items():
        cost = program.cost
        assert cost.alias_bytes == memory.pages_bytes + memory.slots_bytes
        extra = moved if bucket.phase is Phase.READ_PAGES else 0
        assert 0 <= cost.output_bytes - cost.alias_bytes - extra < 1_000
        assert cost.temp_bytes <= moved
    check(plan, {bucket: program.cost for bucket, program in programs.items()})


def test_programs_run_once_with_nothing_and_after_a_way_through_bytes():
    plan = a_plan(KvFormat.INT8)
    read, write = (deserialise(plan, compile_serialised(plan, bucket)) for bucket in buckets_of(plan))
    state, pool = random_state(plan, 5)
    state, pages = read(state, *idle_arguments(plan, read.bucket))
    assert {raw(page) for page in pages} == {raw(pool[:, 0])}
    state = write(state, *idle_arguments(plan, write.bucket))
    after = np.array(state.pages.words)
    assert not after[:, 0].any()
    assert raw(after[:, 1:]) == raw(pool[:, 1:])


def test_a_launch_moves_at_most_so_many_bytes_and_pages_and_always_one():
    assert plan_of(MODEL).moved_pages == MOST_MOVED
    whole = replace(LARGE, layers=80, windows=(), local_rope=())
    for page_size in (16, 128, 512):
        plan = gpu_plan(whole, KvFormat.BF16, devices=8, page_size=page_size)
        assert plan.moved_pages == max(1, min(MOST_MOVED, MOVED_BYTES // plan.page_bytes))
        assert workspace_allowance(plan) > PAGES_ON_THE_WAY * plan.moved_pages * plan.page_bytes
    one = gpu_plan(whole, KvFormat.BF16, page_size=512)
    assert (one.moved_pages, one.page_bytes > MOVED_BYTES) == (1, True)


def test_spread_contexts_have_no_such_programs():
    plan = plan_of(MODEL, devices=4, context_devices=2, shard_len=16)
    assert plan.moved_pages == 0
    assert not [b for b in plan.buckets() if b.phase in (Phase.READ_PAGES, Phase.WRITE_PAGES)]


def gpu_plan(architecture, kv_format: KvFormat, devices: int = 1, page_size: int = 128) -> Plan:
    return make_plan(
        architecture, target="a100_sxm_80", weight_form=WeightForm.BF16, kv_format=kv_format, context=4096, slots=4,
        prefill_chunk=128, prefill_slots=2, page_size=page_size, kv_bytes=0, implementation="pallas", devices=devices,
    )  # fmt: skip


@needs_compiler
@pytest.mark.parametrize(
    ("kv_format", "devices"), [(KvFormat.BF16, 1), (KvFormat.INT8, 1), (KvFormat.BMQ4, 1), (KvFormat.BF16, 2)]
)
def test_they_compile_for_a_card_and_hold_the_pool_once(kv_format, devices):
    plan = gpu_plan(SMALL, kv_format, devices)
    memory = memory_plan(plan)
    programs = {bucket: compile_program(plan, bucket) for bucket in buckets_of(plan)}
    held, moved = memory.pages_bytes + memory.slots_bytes, plan.moved_pages * plan.page_bytes
    for bucket, program in programs.items():
        cost = program.cost
        assert 0 <= cost.alias_bytes - held < 256 * cost.num_arguments
        assert cost.temp_bytes < moved + 65_536, "no second pool"
        extra = moved if bucket.phase is Phase.READ_PAGES else 0
        assert 0 <= cost.output_bytes - cost.alias_bytes - extra < 64 * 1024
    check(plan, {bucket: program.cost for bucket, program in programs.items()})


def test_a_page_outside_of_the_pool_has_all_layers_and_heads():
    plan = a_plan(KvFormat.FLOAT32)
    assert page_shape(state_shapes(plan).pages).shape == (2, 8, 2, 128, 16)
    plan = gpu_plan(SMALL, KvFormat.BMQ4, devices=2)
    shape = page_shape(state_shapes(plan).pages)
    assert shape.shape[:2] == (2, 2)
    assert int(np.prod(shape.shape)) * 4 == plan.page_bytes * plan.model_devices
