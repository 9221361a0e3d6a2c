"""The gate on the code of paged_decode for an A100, which need not be present; skipped where the extra is missing."""

import dataclasses
import functools

import pytest

from appliance.bench import kernels_static
from appliance.bench.runner import BenchContext
from appliance.config import ApplianceConfig
from pallas_kernels.card import find_card
from pallas_kernels.compiled import CompileError, compile_kernel, missing
from pallas_kernels.paged_decode import examine, pallas
from pallas_kernels.paged_decode.cases import CASES, QUANTISED_CASES

needs_compiler = pytest.mark.skipif(bool(missing()), reason=missing() or "present")


LONG_CASES = [case for case in (*CASES, *QUANTISED_CASES) if case.name.endswith("-8k")]
"""Every head shape and format once; the bench examines all cases, which takes three times as long."""


@needs_compiler
def test_long_cases_keep_within_an_a100():
    seen: list[int] = []
    context = BenchContext(ApplianceConfig(), lambda _what, done, _total: seen.append(done))
    results = kernels_static.figures(kernels_static.examine(context, "a100_sxm_80", "-8k"))
    assert len(seen) == len(LONG_CASES)
    assert {case.kv_format for case in LONG_CASES} == {"bf16", "int8", "bmq4", "bmq2"}
    assert {result.name: result.met for result in results if result.op} == {
        "spill_bytes_max": True,
        "cases_without_mma": True,
        "smem_decode_max": True,
        "decode_ctas_per_sm_min": True,
        "bytes_over_minimum_max": True,
    }
    assert {result.name: result.value for result in results}["cases_without_cp_async"] == 0


@needs_compiler
def test_a_kernel_that_is_not_there_is_named():
    with pytest.raises(CompileError, match="the compiler's reports name no kernel 'other', or several"):
        compile_kernel(find_card("a100_sxm_80"), "other", lambda x: x + x, examine.shapes(CASES[0], 1, 1, 1)[0])


@needs_compiler
def test_a_tile_that_is_too_large_is_seen_to_spill():
    case = next(case for case in CASES if case.name == "starcoder-48:1-d128-ragged")
    tile = dataclasses.replace(examine.tile_of(case), positions=128, warps=4)
    run = functools.partial(pallas.paged_decode, scale=examine.SCALE, tile=tile)
    code = compile_kernel(find_card("a100_sxm_80"), "paged_decode", run, *examine.shapes(case, 10, 1, 1))
    assert code.spill_bytes > 0
    assert code.stack_bytes > 0


LONG = next(case for case in CASES if case.name == "llama-3.1-8b-32:8-d128-8k")


@pytest.mark.interpret
def test_long_histories_are_read_once():
    found = examine.traffic(LONG)
    vectors = (2 * 4 + 2) * 128 * 2  # queries, new key and value, result: 4 heads a group
    assert found.least == 2 * 8192 * 128 * 2 + vectors
    # 7 stretches: partial sums of 4 heads in float32 written and read, their two scalars in one sector each, queries
    # read by each, and a sector for the length, the window and the layer and for the page of each tile of 32 positions
    partial = 7 * 4 * 128 * 4 * 2 + 7 * 2 * 32 + 7 * 4 * 2 * 4
    read = 7 * 4 * 128 * 2 + 7 * 3 * 32 + 8192 // 32 * 32
    assert found.moved == found.least + partial + read


@pytest.mark.interpret
def test_blocks_are_read_once():
    case = next(case for case in QUANTISED_CASES if case.name == "bmq4-llama-3.1-8b-32:8-d128-8k")
    found = examine.traffic(case)
    vectors, kept = (2 * 4 + 2) * 128 * 2, 2 * 144 * 128 * 2
    block = 4 * (64 * 32 + 32 * 8 + 32 * 64 + 128 + 64 + 8)
    assert found.least == 64 * block + vectors + kept
    # 11 stretches of 6 blocks, the last of 4: partial sums of 4 heads in float32 written and read, their two scalars in
    # a sector each, queries read by each, and a sector for each of the length, how many positions are kept outside of
    # blocks, the window, the layer and two constants; a block has a sector more for its page, and one for the mask,
    # which each half of the channels reads
    partial = 11 * 4 * 128 * 4 * 2 + 11 * 2 * 32 + 11 * 4 * 2 * 4
    read = 11 * 4 * 128 * 2 + 11 * 6 * 32 + 64 * 2 * 32
    assert found.moved == found.least + partial + read
