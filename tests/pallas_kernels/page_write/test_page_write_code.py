"""The gate on the code of page_write for an A100, which need not be present; skipped where the extra is missing."""

import math

import jax
import pytest

from pallas_kernels.card import find_card
from pallas_kernels.compiled import missing
from pallas_kernels.page_write import examine
from pallas_kernels.page_write.cases import GPU_CASES

needs_compiler = pytest.mark.skipif(bool(missing()), reason=missing() or "present")
SHARED_BYTES = 83_456


@needs_compiler
def test_every_case_keeps_within_an_a100():
    for case in GPU_CASES:
        code = examine.code(case, find_card("a100_sxm_80"))
        assert (code.spill_bytes, code.stack_bytes) == (0, 0), case.name
        assert code.shared_bytes <= SHARED_BYTES, case.name
        assert code.blocks >= 2, case.name
        assert (code.tensor_products > 0) == case.kv_format.startswith("bmq"), case.name


@needs_compiler
@pytest.mark.parametrize("kv_format", ["bf16", "int8", "bmq4", "bmq2"])
def test_no_pool_is_copied_on_an_a100(kv_format):
    (case,) = (case for case in GPU_CASES if case.name == f"llama-3.1-8b-{kv_format}-prefill")
    memory = examine.memory(case, find_card("a100_sxm_80"))
    pool = jax.tree.leaves(examine.shapes(case)[0])
    assert memory.aliased_bytes == sum(math.prod(part.shape) * part.dtype.itemsize for part in pool)
    assert memory.temporary_bytes < 2**16
