"""Plans: bounds, lattices, JSON, bytes."""

import json
from dataclasses import replace

import pytest

from pallas_kernels.platform import NATIVE_FEATURES
from planner.architecture import ModelArchitecture
from planner.buckets import Bucket, Phase
from planner.formats import KvFormat, WeightForm
from planner.memory import memory_plan
from planner.plan import Plan, PlanError, default_implementation, make_plan

ARCHITECTURE = ModelArchitecture(
    family="llama", layers=30, embed=576, ffw=1536, q_heads=9, kv_heads=3, head_dim=64, vocab=49152, context=8192,
    norm_eps=1e-5, rope_theta=10_000.0, query_scale=0.125, tied_embeddings=True,
)  # fmt: skip
SETTINGS = {
    "target": "cpu_native",
    "weight_form": WeightForm.INT8,
    "kv_format": KvFormat.FLOAT32,
    "context": 2048,
    "slots": 12,
    "prefill_chunk": 512,
    "prefill_slots": 8,
    "page_size": 64,
    "kv_bytes": 0,
    "implementation": "xla",
}
PAGE_BYTES = 64 * 2 * 30 * 3 * 64 * 4


def plan_of(**changes) -> Plan:
    return make_plan(changes.pop("architecture", ARCHITECTURE), **{**SETTINGS, **changes})


def test_sizes_follow_the_settings():
    plan = plan_of()
    assert (plan.page_bytes, plan.table_width, plan.num_pages) == (PAGE_BYTES, 32, 12 * 32)
    assert plan.lattice.decode_slots == (1, 2, 3, 6, 12)
    assert plan.lattice.prefill_chunks == (32, 64, 128, 256, 512)
    assert (plan.lattice.prefill_slots, plan.lattice.widths, plan.prefill_budget) == (8, (32,), 512)


def test_a_bf16_pool_holds_twice_the_pages_in_the_same_bytes():
    bytes_given = 100 * PAGE_BYTES + 17
    assert plan_of(kv_bytes=bytes_given).num_pages == 100
    assert plan_of(kv_bytes=bytes_given, kv_format=KvFormat.BF16).num_pages == 200
    assert plan_of(kv_bytes=10**12).num_pages == 12 * 32, "never more than every slot at full context"


def test_context_0_is_the_models_own():
    assert plan_of(context=0).context == 8192


@pytest.mark.parametrize(("chunk", "chunks"), [(32, (32,)), (48, (32, 48)), (496, (32, 62, 124, 248, 496))])
def test_odd_chunks(chunk, chunks):
    assert plan_of(prefill_chunk=chunk).lattice.prefill_chunks == chunks


@pytest.mark.parametrize(
    ("slots", "sizes"), [(1, (1,)), (2, (1, 2)), (5, (1, 2, 3, 5)), (64, (1, 2, 4, 8, 16, 32, 64))]
)
def test_slots(slots, sizes):
    assert plan_of(slots=slots).lattice.decode_slots == sizes


def test_every_bucket_once_and_those_that_are_no_steps():
    plan = plan_of(slots=2, prefill_chunk=64, prefill_slots=48)
    assert plan.buckets() == (
        Bucket(Phase.DECODE, 1, 1, 32),
        Bucket(Phase.DECODE, 2, 1, 32),
        Bucket(Phase.PREFILL, 32, 32, 32),
        Bucket(Phase.PREFILL, 48, 64, 32),
        Bucket(Phase.SET_SLOT, 2, 1, 1),
        Bucket(Phase.EMPTY, 2, 1, 1),
        Bucket(Phase.READ_PAGES, 8, 1, 1),
        Bucket(Phase.WRITE_PAGES, 8, 1, 1),
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context": 8193}, r"context 8193 is outside 1\.\.8192, the positions that the model was made for"),
        ({"context": -1}, r"context -1 is outside 1\.\.8192"),
        ({"page_size": 48}, r"page_size 48 is not one of \(16, 32, 64, 128, 256, 512\)"),
        ({"kv_format": KvFormat.BMQ4}, "page_size 64 must be a multiple of 128 for kv_format bmq4"),
        (
            {"kv_format": KvFormat.BMQ2, "page_size": 128, "architecture": replace(ARCHITECTURE, head_dim=48)},
            r"kv_format bmq2 takes the head dims \(8, 16, 32, 64, 80, 96, 128, 256\), this model has 48: use int8",
        ),
        (
            {"kv_format": KvFormat.INT8, "architecture": replace(ARCHITECTURE, head_dim=6)},
            "kv_format int8 takes head dims that 4 divides, this model has 6: use bf16 or float32",
        ),
        ({"slots": 0}, r"slots 0 is outside 1\.\.1024"),
        ({"slots": 1025}, r"slots 1025 is outside 1\.\.1024"),
        ({"prefill_chunk": 31}, r"prefill_chunk 31 must be a multiple of 16 in 32\.\.8192"),
        ({"prefill_chunk": 40}, "prefill_chunk 40 must be a multiple of 16"),
        ({"prefill_chunk": 8208}, "prefill_chunk 8208 must be a multiple of 16"),
        ({"prefill_slots": 0}, r"prefill_slots 0 is outside 1\.\.512, the prefill chunk"),
        ({"prefill_slots": 513}, r"prefill_slots 513 is outside 1\.\.512"),
        ({"kv_bytes": 31 * PAGE_BYTES}, f"a page pool of {31 * PAGE_BYTES} bytes holds 31 pages of {PAGE_BYTES} bytes"),
        (
            {"kv_bytes": 31 * PAGE_BYTES},
            f"one sequence of 2048 tokens needs 32: raise the pool to {32 * PAGE_BYTES} bytes",
        ),
        ({"kv_bytes": -1}, "a page pool of -1 bytes holds -1 pages"),
        ({"implementation": "triton"}, r"implementation 'triton' is not one of \('xla', 'native'\)"),
        (
            {"implementation": "native", "architecture": replace(ARCHITECTURE, head_dim=72)},
            "implementation native needs a head_dim that 16 divides, this model has 72: use implementation xla",
        ),
    ],
)
def test_what_cannot_be_planned(changes, message):
    with pytest.raises(PlanError, match=message):
        plan_of(**changes)


GPU = {
    "target": "a100_sxm_80", "weight_form": WeightForm.BF16, "kv_format": KvFormat.BF16, "implementation": "pallas",
    "architecture": replace(ARCHITECTURE, q_heads=16, kv_heads=8, ffw=1536, context=131072), "context": 0,
}  # fmt: skip


def test_heads_of_a_page_are_cut_over_model_devices_and_pages_spread_over_context_devices():
    page = 64 * 2 * 30 * 8 * 64 * 2
    one = plan_of(**GPU, kv_bytes=3000 * page)
    assert (one.implementation, one.attention, one.page_bytes, one.num_pages) == ("pallas", "pallas", page, 3000)
    four = plan_of(**GPU, kv_bytes=3000 * page, devices=4)
    assert (four.model_devices, four.page_bytes, four.num_pages) == (4, page // 4, 12_000)
    spread = plan_of(**GPU, kv_bytes=3001 * page, devices=4, context_devices=4)
    assert (spread.model_devices, spread.page_bytes, spread.num_pages) == (1, page, 12_004)
    both = plan_of(**GPU, kv_bytes=1025 * page // 2, devices=4, context_devices=2)
    assert (both.model_devices, both.page_bytes, both.num_pages) == (2, page // 2, 2050)
    assert Plan.from_json(both.to_json()) == both


def test_shards_of_a_context_go_to_its_devices_in_turn():
    page = 64 * 2 * 30 * 8 * 64 * 2
    settings = {**GPU, "context": 70_000, "devices": 2, "context_devices": 2}
    assert plan_of(**settings).shard_pages == 512
    with pytest.raises(PlanError, match="one sequence of 70000 tokens needs 582"):  # 512, and 70 of the third shard
        plan_of(**settings, kv_bytes=581 * page)
    assert plan_of(**settings, kv_bytes=582 * page).num_pages == 2 * 582
    with pytest.raises(PlanError, match="shard_len 1000 is no multiple of page_size 64: shards are whole pages"):
        plan_of(**settings, shard_len=1000)


def test_native_code_takes_no_part_of_a_context():
    settings = {"implementation": "native", "architecture": GPU["architecture"], "context": 2048, "devices": 2}
    assert plan_of(**settings).attention == "native"
    assert plan_of(**settings, context_devices=2).attention == "xla"


def test_more_devices_than_heads_repeat_them():
    few = replace(GPU["architecture"], kv_heads=2)
    plan = plan_of(**{**GPU, "architecture": few}, devices=8)
    assert (plan.architecture.kv_heads, plan.served.kv_heads, plan.served.q_heads) == (2, 8, 16)
    assert plan.page_bytes == 64 * 2 * 30 * 64 * 2
    assert plan_of(**{**GPU, "architecture": few}, devices=2).served == few


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_format": KvFormat.FLOAT32}, "kv_format float32 is never built for a GPU such as a100_sxm_80: use bf16"),
        ({"weight_form": WeightForm.INT8}, "weight_form int8 is not built for a GPU such as a100_sxm_80: use bf16"),
        ({"weight_form": WeightForm.FLOAT32}, "weight_form float32 is not built for a GPU"),
        ({"implementation": "xla"}, r"implementation 'xla' is not one of \('pallas',\), those of target a100_sxm_80"),
        ({"devices": 9}, r"devices 9 is outside 1\.\.8, those of a host with target a100_sxm_80"),
        ({"devices": 0}, r"devices 0 is outside 1\.\.8"),
        ({"devices": 4, "context_devices": 3}, "context_devices 3 is no divisor of devices 4"),
        ({"context_devices": 2}, "context_devices 2 is no divisor of devices 1"),
        ({"devices": 3}, "devices 3 do not divide the model's q_heads 16: use one of"),
        (
            {"devices": 2, "context_devices": 2, "architecture": replace(GPU["architecture"], windows=(64,) * 30)},
            "context_devices 2: a model with sliding windows is not spread by positions; use context_devices 1",
        ),
    ],
)
def test_what_devices_cannot_take(changes, message):
    with pytest.raises(PlanError, match=message):
        plan_of(**{**GPU, **changes})


def test_json_and_back():
    plan = plan_of(architecture=replace(ARCHITECTURE, windows=(64,) * 30))
    text = json.dumps(plan.to_json())
    assert Plan.from_json(json.loads(text)) == plan
    assert json.loads(text) == plan.to_json(), "plain values: what comes back compares equal"
    assert Plan.from_json(json.loads(text)).digest() == plan.digest()
    assert plan_of(slots=11).digest() != plan_of().digest()


@pytest.mark.parametrize(
    "damage",
    [
        lambda document: document.pop("slots"),
        lambda document: document.update(colour="blue"),
        lambda document: document.update(weight_form="int3"),
        lambda document: document["lattice"].update(widths=[3, 2]),
        lambda document: document["architecture"].pop("layers"),
    ],
)
def test_damaged_json_is_refused(damage):
    document = plan_of().to_json()
    damage(document)
    with pytest.raises(PlanError, match="not a plan: "):
        Plan.from_json(document)


def test_memory_adds_up():
    memory = memory_plan(plan_of(), workspace_bytes=1000)
    embed, linears = 49152 * 576, 576 * 960 + 576 * 576 + 576 * 3072 + 1536 * 576
    scales = 960 + 576 + 3072 + 576
    weights = 4 * embed + 30 * (linears + 4 * scales + 2 * 4 * 576) + 4 * 576 + embed + 4 * 49152
    assert memory.weights_bytes == weights
    assert memory.pages_bytes == 384 * PAGE_BYTES
    assert memory.slots_bytes == 12 * 4 + 2 * 12 * 49152 * 4
    assert memory.total_bytes == weights + 384 * PAGE_BYTES + memory.slots_bytes + 1000


def test_the_default_code_path():
    def chosen(target="cpu_native", kv_format=KvFormat.FLOAT32, head_dim=64, features=NATIVE_FEATURES):
        return default_implementation(replace(ARCHITECTURE, head_dim=head_dim), target, kv_format, features)

    assert chosen() == "native"
    assert chosen(features={*NATIVE_FEATURES, "amx_int8"}) == "native"
    assert chosen(features=set(NATIVE_FEATURES) - {"avx512_vnni"}) == "xla"
    assert chosen(target="a100_sxm_80") == chosen(target="a100_sxm_80", features=()) == "pallas"
    assert chosen(target="cpu_x86_64_v3") == chosen(head_dim=72) == "xla"
    assert {chosen(kv_format=kv_format) for kv_format in KvFormat} == {"native"}
    assert plan_of(implementation="native").attention == "native"
    native = {f for f in KvFormat if plan_of(implementation="native", page_size=128, kv_format=f).attention == "native"}
    assert native == set(KvFormat) - {KvFormat.BF16}
    assert {plan_of(page_size=128, kv_format=f).attention for f in KvFormat} == {"xla"}
    assert chosen(kv_format=KvFormat.INT8, head_dim=72) == "xla"
    assert chosen(kv_format=KvFormat.BF16, head_dim=72) == "native"
