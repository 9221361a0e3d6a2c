"""From configuration to plans: defaults of each platform, formats, what is left of a GPU, and errors that name keys."""

from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from appliance.config import ApplianceConfig, build
from appliance.planning import free_bytes, plan_to_serve, plans_by_format, store_directory, usable_bytes
from appliance.wiring import tell_of_context
from planner.catalogue import find_architecture
from planner.decide import terms_of
from planner.formats import KvFormat, WeightForm
from planner.memory import MemoryPlanError, memory_plan, pool_bytes
from planner.plan import Plan, PlanError
from planner.target import UnknownTargetError, find_target

SMALL, LLAMA, LARGE = (find_architecture(name) for name in ("smollm2-135m", "llama-3.1-8b", "llama-3.3-70b"))
GPU = {"target": "a100_sxm_80"}
MIB = 1 << 20


def config_of(engine: dict[str, object] | None = None, **sections: dict[str, object]) -> ApplianceConfig:
    return build({"engine": engine or {}, **sections}, {})


def served(architecture=LLAMA, engine=GPU, **sections: dict[str, object]) -> Plan:
    return plan_to_serve(config_of(engine, **sections), architecture, architecture.context)


def test_a_cpu_plan_is_as_small_as_it_was() -> None:
    plan = served(SMALL, {})
    assert (plan.target, plan.weight_form, plan.kv_format) == ("cpu_native", WeightForm.INT8, KvFormat.FLOAT32)
    assert (plan.slots, plan.prefill_budget, plan.page_size, plan.context) == (16, 512, 64, 8192)
    assert plan.lattice.decode_slots == (1, 2, 4, 8, 16)
    assert plan.lattice.prefill_chunks == (32, 64, 128, 256, 512)
    assert plan.lattice.widths == (128,)
    assert plan.lattice.prefill_slots == 4
    assert plan.num_pages * plan.page_bytes <= 2 << 30 < (plan.num_pages + 1) * plan.page_bytes


def test_a_gpu_plan_fills_what_is_left() -> None:
    plan = served()
    assert (plan.weight_form, plan.kv_format, plan.implementation) == (WeightForm.BF16, KvFormat.BF16, "pallas")
    assert (plan.slots, plan.prefill_budget, plan.page_size, plan.context) == (64, 1024, 128, 131072)
    left = pool_bytes(plan)
    assert plan.num_pages == left // plan.page_bytes
    assert memory_plan(plan).fits
    assert len(plan.buckets()) == 37


def test_bitmask_plans_have_fewer_prompts_a_launch_where_unpacking_takes_much_unless_told_otherwise() -> None:
    gemma = find_architecture("gemma-3-27b")
    assert served(gemma, engine={**GPU, "kv_format": "bmq4"}).lattice.prefill_slots == 6
    assert served(gemma, engine={**GPU, "kv_format": "bmq4", "prefill_rows": 8}).lattice.prefill_slots == 8
    assert served(engine={**GPU, "kv_format": "bmq4"}).lattice.prefill_slots == 8


def test_configured_memory_wins_and_a_limit_lowers_what_is_left() -> None:
    plan = served(engine={**GPU, "kv_memory_mb": 20_000})
    assert plan.num_pages == 20_000 * MIB // plan.page_bytes
    limited = served(gpu={"memory_limit_mb": 40_000})
    assert memory_plan(limited, usable_bytes=40_000 * MIB).fits
    assert (limited.num_pages + 1) * plan.page_bytes > pool_bytes(limited, 40_000 * MIB)
    assert usable_bytes(config_of(GPU, gpu={"memory_limit_mb": 40_000})) == 40_000 * MIB
    assert usable_bytes(config_of({}, gpu={"memory_limit_mb": 40_000})) == 0, "without a GPU it has no effect"


def test_devices_share_weights_and_heads_and_spread_contexts() -> None:
    one, eight = served(), served(engine={**GPU, "devices": 8})
    assert memory_plan(eight).weights_bytes < memory_plan(one).weights_bytes / 7
    assert eight.page_bytes * 8 == one.page_bytes
    spread = served(engine={**GPU, "devices": 8, "context_devices": 4})
    assert (spread.model_devices, spread.num_pages % 4) == (2, 0)


def test_every_format_that_a_model_can_take_has_a_plan() -> None:
    plans = plans_by_format(config_of(GPU), LLAMA, LLAMA.context)
    assert list(plans) == [KvFormat.BF16, KvFormat.INT8, KvFormat.BMQ4, KvFormat.BMQ2]
    assert all(isinstance(plan, Plan) and plan.kv_format is kv_format for kv_format, plan in plans.items())
    assert list(plans_by_format(config_of({**GPU, "kv_format": "int8"}), LLAMA, LLAMA.context)) == [KvFormat.INT8]
    assert list(plans_by_format(config_of({}), SMALL, 8192)) == list(KvFormat)
    odd = replace(LLAMA, head_dim=112)
    assert list(plans_by_format(config_of(GPU), odd, odd.context)) == [KvFormat.BF16, KvFormat.INT8]


def test_auto_takes_the_most_bits_with_which_the_longest_context_fits() -> None:
    auto = {**GPU, "kv_format": "auto"}
    assert served(engine=auto).kv_format is KvFormat.BF16
    tight = {**auto, "devices": 2}
    plans = plans_by_format(config_of(tight), LARGE, LARGE.context)
    assert {kv_format: isinstance(plan, Plan) for kv_format, plan in plans.items()} == {
        KvFormat.BF16: False, KvFormat.INT8: False, KvFormat.BMQ4: True, KvFormat.BMQ2: True,
    }  # fmt: skip
    assert plan_to_serve(config_of(tight), LARGE, LARGE.context) == plans[KvFormat.BMQ4]
    assert served(SMALL, {"kv_format": "auto"}).kv_format is KvFormat.FLOAT32
    terms = terms_of(plan for plan in plans.values() if isinstance(plan, Plan))
    assert free_bytes(terms) == memory_plan(plans[KvFormat.BMQ4]).pages_bytes


@pytest.mark.parametrize(
    ("architecture", "engine", "sections", "message"),
    [
        (
            LLAMA, {**GPU, "kv_memory_mb": 10_000}, {},
            "engine.kv_memory_mb 10000 holds no sequence of 131072 ids in bf16: raise it to 16384 or lower engine.cont",
        ),
        (
            LARGE, {**GPU, "devices": 2}, {},
            r"leaves \d+ MiB for pages, and one sequence of 131072 ids takes 20480 MiB in bf16: lower engine.context",
        ),
        (
            LLAMA, GPU, {"gpu": {"memory_limit_mb": 90_000}},
            "gpu.memory_limit_mb 90000 is above the 79109 MiB that target a100_sxm_80 has for programs",
        ),
        (
            LLAMA, {**GPU, "kv_memory_mb": 70_000}, {},
            "engine.kv_memory_mb 70000 passes the 60785 MiB that target a100_sxm_80 leaves for pages in bf16: lower it",
        ),
        (LLAMA, {**GPU, "kv_memory_mb": 70_000}, {"gpu": {"memory_limit_mb": 50_000}}, r"passes the \d+ MiB"),
        (LLAMA, {**GPU, "kv_format": "float32"}, {}, "kv_format float32 is never built for a GPU"),
        (LLAMA, {**GPU, "implementation": "xla"}, {}, "implementation 'xla' is not one of"),
        (LLAMA, {**GPU, "devices": 3}, {}, "devices 3 do not divide the model's q_heads 32"),
        (LLAMA, {**GPU, "devices": 4, "context_devices": 3}, {}, "context_devices 3 is no divisor of devices 4"),
        (LLAMA, {"implementation": "pallas"}, {}, "implementation 'pallas' is not one of"),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_names_the_key(architecture, engine, sections, message) -> None:
    with pytest.raises(PlanError, match=message):
        served(architecture, engine, **sections)


def test_no_format_at_all_gives_the_reason_of_the_first() -> None:
    with pytest.raises(
        MemoryPlanError, match="usable bytes of each device hold no pages beside 141110050816 bytes of we"
    ):
        plans_by_format(config_of(GPU), LARGE, LARGE.context)
    with pytest.raises(UnknownTargetError):
        served(engine={"target": "b300"})
    assert find_target("a100_sxm_80").usable_bytes // MIB == 79_109


def test_devices_have_a_store_of_their_own() -> None:
    def place(**engine: object) -> Path:
        return store_directory(Path("/h"), Path("/m/llama"), served(engine={**GPU, **engine}))

    assert place() == Path("/h/programs/llama/a100_sxm_80-bf16-bf16-pallas")
    assert place(devices=8).name == "a100_sxm_80-bf16-bf16-pallas-d8"
    assert place(devices=8, context_devices=4).name == "a100_sxm_80-bf16-bf16-pallas-d8x4"


def test_a_context_that_is_lowered_is_told_unless_it_was_asked_for() -> None:
    cases = [({}, 131_072, []), ({}, 200_000, [(200_000, 131_072)]), ({"context": 512}, 200_000, [])]
    for given, model_context, told in cases:
        with capture_logs() as lines:
            tell_of_context(model_context, config_of(given))
        assert [(line["of_model"], line["served"]) for line in lines] == told
        assert all("set engine.context" in line["event"] for line in lines)
