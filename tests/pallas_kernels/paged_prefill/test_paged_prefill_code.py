"""The gate on the code of paged_prefill for an A100, which need not be present; skipped where the extra is missing."""

import dataclasses

import pytest

from appliance.bench import kernels_static
from appliance.bench.runner import BenchContext
from appliance.config import ApplianceConfig
from pallas_kernels.card import find_card
from pallas_kernels.compiled import missing
from pallas_kernels.paged_prefill import examine
from pallas_kernels.paged_prefill.cases import BLOCK_CASES, CASES, QUANTISED_CASES, PrefillCase

needs_compiler = pytest.mark.skipif(bool(missing()), reason=missing() or "present")


@needs_compiler
def test_every_case_keeps_within_an_a100():
    context = BenchContext(ApplianceConfig(), lambda *_: None)
    found = kernels_static.examine(context, "a100_sxm_80", "paged_prefill")
    cases = [*CASES, *QUANTISED_CASES]
    examined, unpacking = found[: len(cases)], found[len(cases) :]
    assert len(unpacking) == len(BLOCK_CASES)
    results = {result.name: result for result in kernels_static.figures(examined)}
    assert {name: result.met for name, result in results.items() if result.op} == {
        "spill_bytes_max": True,
        "cases_without_mma": True,
        "smem_prefill_max": True,
    }
    assert results["cases_without_cp_async"].value == 0
    assert results["smem_prefill_max"].value <= 98_304, "two tiles of keys and values and the queries"
    for case, found in zip(cases, examined, strict=True):
        tile = examine.tile_of(case)
        channels = sum(tile.chunks) * (4 if case.kv_format == "int8" else 1)
        products = tile.queries * tile.keys * channels // (16 * 8 * 16)
        # two products in each of four loops, and no warp repeats what another one does
        assert found.tensor_products == 4 * 2 * products // tile.warps, case.name

    results = {result.name: result for result in kernels_static.figures(unpacking)}
    assert {name: result.met for name, result in results.items() if result.op} == {
        "spill_bytes_max": True,
        "smem_unpack_max": True,
    }
    assert results["unpack_ctas_per_sm_min"].value >= 2
    assert all(case.tensor_products for case in unpacking), "values are turned back by tensor cores"


def named(name: str) -> PrefillCase:
    return next(case for case in CASES if case.name == name)


@needs_compiler
def test_a_tile_that_is_too_large_is_seen_to_spill():
    case = named("llama-3.1-8b-2k")
    code = examine.code(case, find_card("a100_sxm_80"), dataclasses.replace(examine.tile_of(case), warps=4))
    assert code.spill_bytes > 0


def test_flops_are_those_of_the_keys_that_are_seen():
    heads = 4 * 32 * 128
    assert examine.flops(named("llama-3.1-8b-2k")) == heads * 2048 * 2049 // 2
    assert examine.flops(named("llama-3.1-8b-late")) == heads * (2048 * 30_720 + 2048 * 2049 // 2)
    # a window of 64: 40 queries behind 700 positions see 64 each, 90 fresh ones see 1 to 64 and then 64
    assert examine.flops(named("gemma3-270m-window")) == 4 * 4 * 256 * (40 * 64 + 64 * 65 // 2 + 26 * 64)
