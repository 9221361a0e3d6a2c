"""Decisions: the tree by hand, and its properties for every input."""

import functools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner import kv
from planner.architecture import ModelArchitecture
from planner.buckets import Bucket, Phase
from planner.catalogue import find_architecture
from planner.decide import MOST_SHARDS, Decision, Declined, Reason, Terms, decide, decisions_per_s, explain, terms_of
from planner.formats import KvFormat, WeightForm
from planner.memory import memory_plan
from planner.pages import PagePool
from planner.plan import Plan, PlanError, make_plan

GPU_FORMATS = (KvFormat.BF16, KvFormat.INT8, KvFormat.BMQ4, KvFormat.BMQ2)
GB = 10**9


@functools.cache
def plan_of(kv_format: KvFormat, devices: int = 1, context: int = 131072, name: str = "llama-3.1-8b") -> Plan:
    architecture = find_architecture(name)
    if context > architecture.context:
        architecture = replace(architecture, context=context)
    return make_plan(
        architecture, target="a100_sxm_80", weight_form=WeightForm.BF16, kv_format=kv_format, context=context, slots=2,
        prefill_chunk=1024, prefill_slots=8, page_size=128, kv_bytes=0, implementation="pallas", devices=devices,
        context_devices=devices,
    )  # fmt: skip


@functools.cache
def terms_for(formats: tuple[KvFormat, ...] = GPU_FORMATS, devices: int = 1, context: int = 131072) -> Terms:
    return terms_of([plan_of(kv_format, devices, context) for kv_format in formats])


TOKEN = 2 * 32 * 8 * 128 * 2
"""Bytes of a position in bf16."""
NATIVE = plan_of(KvFormat.BF16)


def made(terms: Terms, context_len: int, free_bytes: int, expected_output: int = 0) -> Decision:
    decision = decide(terms, context_len, expected_output, free_bytes)
    assert isinstance(decision, Decision)
    return decision


def test_up_to_32k_is_one_shard_in_the_format_with_most_bits_that_fits():
    decision = made(terms_for(), 32_000, 32_000 * TOKEN, expected_output=768 - 128 - 128)
    assert (decision.plan.kv_format, decision.shards) == (KvFormat.INT8, 1)
    decision = made(terms_for(), 32_000, 32_768 * TOKEN, expected_output=768)
    assert (decision.plan.kv_format, decision.shards, decision.num_bytes) == (KvFormat.BF16, 1, 32_768 * TOKEN)
    assert decision.prefill == Bucket(Phase.PREFILL, 8, 1024, 256)
    assert decision.decode == Bucket(Phase.DECODE, 1, 1, 256)
    assert decision.programs == (
        "prefill-s8-c1024-w256-bf16-bf16-d1-a100_sxm_80",
        "decode-s1-c1-w256-bf16-bf16-d1-a100_sxm_80",
    )
    assert made(terms_for(), 100, GB).prefill.chunk == 128


def test_up_to_64k_is_one_shard_where_all_of_it_has_room_and_two_otherwise():
    whole = 65_536 * TOKEN
    assert made(terms_for(), 40_000, whole).shards == 1
    assert made(terms_for(), 40_000, whole).num_bytes == 40_064 * TOKEN, "whole pages"
    less = made(terms_for(), 40_000, whole - 1)
    assert (less.plan.kv_format, less.shards, less.devices, less.num_bytes) == (KvFormat.BF16, 2, 1, 40_064 * TOKEN)
    least = made(terms_for(), 40_000, 40_064 * TOKEN - 1)
    assert (least.plan.kv_format, least.shards) == (KvFormat.INT8, 2)


def test_up_to_64k_goes_to_two_devices_where_a_context_is_spread():
    decision = made(terms_for(devices=4), 40_000, 100 * GB)
    assert (decision.shards, decision.devices, decision.num_bytes) == (2, 2, 32_768 * TOKEN)


def test_above_64k_are_as_many_shards_as_needed_and_fewer_bits_only_where_even_spreading_does_not_do():
    one = made(terms_for(), 90_000, 11 * GB)
    assert (one.plan.kv_format, one.shards, one.devices) == (KvFormat.INT8, 3, 1)
    assert made(terms_for(), 90_000, 12 * GB).plan.kv_format is KvFormat.BF16
    spread = made(terms_for(devices=4), 90_000, 5 * GB)
    assert (spread.plan.kv_format, spread.shards, spread.devices) == (KvFormat.BF16, 3, 3)
    assert spread.num_bytes == 32_768 * TOKEN
    bitmask = made(terms_for((KvFormat.BF16, KvFormat.BMQ4)), 90_000, 11 * GB)
    assert (bitmask.plan.kv_format, bitmask.shards) == (KvFormat.BMQ4, 3)


def test_two_devices_take_turns_so_that_one_gets_two_of_three_shards():
    decision = made(terms_for(devices=2), 90_000, 100 * GB)
    third = 90_112 - 2 * 32_768  # whole pages
    assert (decision.devices, decision.num_bytes) == (2, (32_768 + third) * TOKEN)


def test_beyond_16_shards_neighbours_merge():
    terms = terms_for(context=2_000_000)
    assert (made(terms, 524_288, 10**12).shards, made(terms, 524_288, 10**12).shard_len) == (16, 32_768)
    merged = made(terms, 524_289, 10**12)
    assert (merged.shards, merged.shard_len) == (9, 65_536)
    assert (made(terms, 1_999_999, 10**12).shards, made(terms, 1_999_999, 10**12).shard_len) == (16, 131_072)


def test_what_a_format_takes_before_any_page_counts():
    terms = terms_for()
    bf16, bmq4 = plan_of(KvFormat.BF16), plan_of(KvFormat.BMQ4)
    first, third = memory_plan(bf16), memory_plan(bmq4)
    extra = third.slots_bytes + third.weights_bytes - first.slots_bytes - first.weights_bytes
    assert extra > 0
    pages = 79 * bmq4.page_bytes
    assert made(terms, 10_000, extra + pages).plan.kv_format is KvFormat.BMQ4
    assert isinstance(decide(terms_of([bf16, bmq4]), 10_000, 0, extra + pages - 1), Declined)


@pytest.mark.parametrize(
    ("asked", "reason", "message"),
    [
        ((0, 5, GB), Reason.EMPTY, "0 ids with 5 to come; at least 1 and 0 are needed"),
        ((5, -1, GB), Reason.EMPTY, "5 ids with -1 to come"),
        (
            (131072, 0, 10**12),
            Reason.TOO_LONG,
            "131072 ids leave no room for an answer in the longest context of 131072",
        ),
        ((128, 0, 0), Reason.NO_MEMORY, "128 positions take 8519680 bytes on a device at least and 0 are free; wait"),
    ],
)
def test_what_is_declined(asked, reason, message):
    found = decide(terms_for(), *asked)
    assert isinstance(found, Declined)
    assert found.reason is reason
    assert message in found.message


def test_an_answer_longer_than_the_context_counts_as_far_as_it_can_go():
    assert made(terms_for(), 1000, 10**12, expected_output=10**9).num_bytes == 131_072 * TOKEN


def test_the_path_says_every_comparison():
    assert explain(terms_for(), 90_000, 0, 11 * GB) == (
        "90000 ids and 0 to come: 90000 positions of 131072",
        "above 65536: 3 shards of at most 32768 positions",
        "bf16: 11.81 GB; 11.00 GB free: does not fit",
        "int8: 6.00 GB; 11.00 GB free: fits",
        "int8, 3 shards on 1 device",
        "program prefill-s8-c1024-w1024-int8-bf16-d1-a100_sxm_80",
        "program decode-s1-c1-w1024-int8-bf16-d1-a100_sxm_80",
    )
    assert explain(terms_for(), 40_000, 0, 8 * GB)[1:3] == (
        "at most 65536: one shard or two",
        "bf16: all of two shards take 8.59 GB; 8.00 GB free: two shards, whose pages are taken as they are needed",
    )
    assert explain(terms_for(devices=4), 90_000, 0, 5 * GB)[2] == (
        "bf16: 4.29 GB on the fullest of 4 devices; 5.00 GB free: fits"
    )
    assert explain(terms_for(), 0, 0, 5)[-1].startswith("declined (empty): 0 ids")
    assert explain(terms_for(context=2_000_000), 524_289, 0, 10**12)[1].endswith(
        "9 shards of at most 65536 positions, since 16 are the most"
    )


def test_terms_come_with_most_bits_first_and_only_of_plans_that_belong_together():
    terms = terms_of([plan_of(KvFormat.BMQ2), plan_of(KvFormat.BF16), plan_of(KvFormat.INT8)])
    assert [offer.plan.kv_format for offer in terms.offers] == [KvFormat.BF16, KvFormat.INT8, KvFormat.BMQ2]
    with pytest.raises(PlanError, match="there is no format to decide about"):
        terms_of([])
    with pytest.raises(PlanError, match="must differ in kv_format"):
        terms_of([NATIVE, NATIVE])
    with pytest.raises(PlanError, match="must differ in kv_format, and in nothing"):
        terms_of([NATIVE, plan_of(KvFormat.INT8, context=65536)])


def test_a_model_of_fewer_positions_than_two_shards():
    architecture = ModelArchitecture(
        family="llama", layers=1, embed=32, ffw=32, q_heads=1, kv_heads=1, head_dim=32, vocab=64, context=40_000,
        norm_eps=1e-6, rope_theta=1e4, query_scale=0.1,
    )  # fmt: skip
    plan = replace(NATIVE, architecture=architecture, context=40_000)
    terms = terms_of([plan])
    assert made(terms, 35_000, 313 * plan.page_bytes).shards == 1, "all of two shards is all of the context"
    assert made(terms, 35_000, 313 * plan.page_bytes - 1).shards == 2


# ---------------------------------------------------------------------- for every input

formats = st.sets(st.sampled_from(GPU_FORMATS), min_size=1).map(lambda chosen: tuple(sorted(chosen)))
asked_for = st.tuples(formats, st.sampled_from([1, 2, 4, 8]), st.sampled_from([4096, 40_000, 131_072, 4_000_000]))
free = st.one_of(st.integers(-5, 10**9), st.integers(0, 10**12))


@given(asked_for, st.integers(), st.integers(), st.integers())
def test_there_is_an_answer_for_every_input(asked, context_len, expected_output, free_bytes):
    found = decide(terms_for(*asked), context_len, expected_output, free_bytes)
    assert isinstance(found, Decision | Declined)
    if isinstance(found, Declined):
        assert (found.reason is Reason.NO_MEMORY) == (0 < context_len < asked[2] and expected_output >= 0)
    assert explain(terms_for(*asked), context_len, expected_output, free_bytes)


@given(asked_for, st.integers(1, 4_000_000), st.integers(0, 10_000), free)
def test_a_decision_never_takes_more_than_is_free_and_has_buckets_that_hold_it(asked, context_len, output, free_bytes):
    terms = terms_for(*asked)
    found = decide(terms, context_len, output, free_bytes)
    if isinstance(found, Declined):
        return
    length, plan = min(context_len + output, terms.context), found.plan
    assert found.num_bytes <= free_bytes
    assert 1 <= found.shards <= MOST_SHARDS
    assert found.devices == min(found.shards, terms.devices)
    assert found.shards * found.shard_len >= length
    assert (found.shards - 1) * found.shard_len < length
    pages = -(-length // plan.page_size)
    assert {found.prefill, found.decode} <= set(plan.buckets())
    assert found.decode.width == found.prefill.width >= pages
    assert found.prefill.chunk >= min(context_len, 1024)
    pool = PagePool(8, plan.page_size, terms.devices, found.shard_len // plan.page_size)
    most = max(pool.on_devices(0, 0, pages))
    assert found.num_bytes - most * plan.page_bytes == sum(
        offer.extra_bytes for offer in terms.offers if offer.plan is plan
    )


@given(asked_for, st.integers(1, 4_000_000), st.integers(0, 10_000), free, free)
def test_more_free_memory_never_gives_fewer_bits_or_more_shards(asked, context_len, output, one, other):
    terms = terms_for(*asked)
    less, more = (decide(terms, context_len, output, free_bytes) for free_bytes in sorted((one, other)))
    if isinstance(less, Declined):
        return
    assert isinstance(more, Decision)
    bits = [kv.bits_per_element(found.plan.kv_format, 128) for found in (less, more)]
    assert bits[0] <= bits[1]
    assert less.shards >= more.shards
    assert less.devices >= more.devices


def test_the_rate_is_that_of_the_clock():
    times = iter([10.0, 12.5])
    assert decisions_per_s(terms_for(), lambda: next(times), count=1000) == 400.0
