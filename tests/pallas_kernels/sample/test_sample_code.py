"""The gate on the code of sample for an A100, which need not be present; skipped where the compiler is missing."""

import pytest

from pallas_kernels.card import find_card
from pallas_kernels.compiled import missing
from pallas_kernels.sample import examine
from pallas_kernels.sample.cases import CASES
from pallas_kernels.sample.passes import tiling

SHARED_BYTES = 83_456  # room for two blocks on a multiprocessor


@pytest.mark.skipif(bool(missing()), reason=missing() or "present")
@pytest.mark.parametrize(
    "case", [case for case in CASES if not case.small or case.name == "tiny-checkpoint"], ids=lambda c: c.name
)
def test_a_case_keeps_within_an_a100(case):
    code = examine.code(case, find_card("a100_sxm_80"))
    assert (code.spill_bytes, code.stack_bytes) == (0, 0)
    assert code.grid == (case.rows, 1, 1)
    assert code.threads == tiling(case.vocab).warps * 32
    assert code.shared_bytes <= SHARED_BYTES
    assert code.blocks >= 1


@pytest.mark.parametrize(
    ("vocab", "width", "few", "wanted", "warps"),
    [(1, 32, 32, 24, 4), (37, 64, 64, 48, 4), (5_003, 8192, 2048, 1536, 16), (262_144, 8192, 2048, 1536, 16)],
)
def test_sizes_of_a_launch(vocab, width, few, wanted, warps):
    tile = tiling(vocab)
    assert (tile.width, tile.few, tile.wanted, tile.warps) == (width, few, wanted, warps)
