"""Mixes: drawing, the count of padding by hand, and the bound on padding for a mix that travels with the appliance."""

import json
from dataclasses import replace
from importlib import resources

import pytest

from planner.catalogue import find_architecture
from planner.formats import KvFormat, WeightForm
from planner.mixes import Mix, MixError, simulate, simulate_all
from planner.plan import Plan, make_plan

DOCUMENT = {
    "description": "", "source": "", "seed": 1, "requests": 1, "load": 0,
    "prompt": [[0, 40], [1, 40]], "output": [[0, 3], [1, 3]],
}  # fmt: skip
COMMITTED = {
    name: Mix.from_json(name, json.loads(resources.files("appliance.bench.mixes").joinpath(f"{name}.json").read_text()))
    for name in ("chat", "code", "documents", "extraction")
}


def mix_of(**changes: object) -> Mix:
    return Mix.from_json("made", {**DOCUMENT, **changes})


def cpu_plan(**changes: object) -> Plan:
    settings = {
        "target": "cpu_native", "weight_form": WeightForm.INT8, "kv_format": KvFormat.FLOAT32, "context": 1024,
        "slots": 4, "prefill_chunk": 64, "prefill_slots": 2, "page_size": 64, "kv_bytes": 0, "implementation": "native",
    }  # fmt: skip
    return make_plan(find_architecture("smollm2-135m"), **{**settings, **changes})


def gpu_plan(kv_format: KvFormat) -> Plan:
    return make_plan(
        find_architecture("llama-3.1-8b"), target="a100_sxm_80", weight_form=WeightForm.BF16, kv_format=kv_format,
        context=0, slots=64, prefill_chunk=1024, prefill_slots=8, page_size=128, kv_bytes=60 << 30,
        implementation="pallas",
    )  # fmt: skip


def test_one_request_by_hand():
    waste = simulate(cpu_plan(), mix_of())
    # 40 ids in a chunk of 64, which samples the first id; two more ids in decode launches of one row
    assert (waste.launches, waste.computed, waste.useful, waste.refused) == (3, 66, 42, 0)
    assert waste.mean == 1 - 42 / 66
    assert waste.p99 == 1 - 40 / 64
    assert waste.table_mean == 0


def test_three_requests_by_hand():
    waste = simulate(cpu_plan(prefill_slots=4), mix_of(requests=3, prompt=[[0, 16], [1, 16]]))
    # 48 ids in a chunk of 64, then three rows in a bucket of four, twice
    assert (waste.launches, waste.computed, waste.useful) == (3, 64 + 2 * 4, 48 + 2 * 3)


def test_several_mixes_are_told_each_and_together():
    one, three = mix_of(), replace(mix_of(requests=3, prompt=[[0, 16], [1, 16]]), name="three")
    first, second, both = simulate_all(cpu_plan(prefill_slots=4), [one, three])
    assert (first, second) == (simulate(cpu_plan(prefill_slots=4), one), simulate(cpu_plan(prefill_slots=4), three))
    assert (both.mix, both.launches, both.computed, both.useful) == ("all", 6, 66 + 72, 42 + 54)
    assert both.p99 == 1 - 40 / 64, "the launch that wastes most holds more than 1 %"


def test_table_width_counts_where_it_is_computed():
    plan = cpu_plan(implementation="xla")
    waste = simulate(plan, mix_of())
    assert plan.lattice.widths == (16,)
    # a prefill launch of two rows, nothing before it; decode rows of lengths 41 and 42 with their own position
    assert waste.table_mean == 1 - (0 + 41 + 42) / ((2 + 1 + 1) * 16 * 64)


def test_requests_longer_than_the_context_are_counted_and_not_run():
    waste = simulate(cpu_plan(), mix_of(prompt=[[0, 2000], [1, 2000]]))
    assert (waste.launches, waste.refused, waste.mean, waste.p99) == (0, 1, 0, 0)


def test_a_mix_draws_the_same_lengths_every_time_within_its_quantiles():
    mix = mix_of(requests=2000, prompt=[[0, 10], [0.5, 100], [1, 1000]])
    drawn = mix.draw()
    assert drawn == mix.draw()
    prompts = sorted(prompt for prompt, _ in drawn)
    assert 10 <= prompts[0] < 12
    assert 900 < prompts[-1] <= 1000
    assert 90 < prompts[1000] < 110
    assert 28 < prompts[500] < 36  # the geometric middle of 10 and 100
    assert {output for _, output in drawn} == {3}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"colour": 1}, "mix made: .*colour"),
        ({"prompt": [[0, 5]]}, "prompt must be rising pairs of a share, from 0 to 1"),
        ({"output": [[0, 5], [1, 4]]}, "output must be rising pairs"),
        ({"output": [[0, 0], [1, 4]]}, "output must be rising pairs"),
        ({"output": [[0, "x"], [1, 4]]}, "mix made: invalid literal"),
        ({"load": 1.5}, r"load 1\.5 within 0\.\.1"),
        ({"requests": 0}, "requests 0 must be above 0"),
    ],
)
def test_what_is_no_mix(changes, message):
    with pytest.raises(MixError, match=message):
        mix_of(**changes)


def test_a_committed_mix_pads_less_than_a_quarter():
    plan = gpu_plan(KvFormat.BMQ4)
    assert len(plan.buckets()) == 37
    waste = simulate(plan, replace(COMMITTED["code"], requests=200))
    assert 0.03 < waste.mean < 0.25
    assert waste.mean < waste.p99 < 1


@pytest.mark.parametrize("name", COMMITTED)
def test_a_committed_mix_names_its_source(name):
    assert "requests" in COMMITTED[name].source
    assert "arXiv" in COMMITTED[name].source
