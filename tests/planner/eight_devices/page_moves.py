"""Pages of a pool that is cut by heads go to host memory and come back whole; run where there are eight devices."""

from dataclasses import replace

import numpy as np
import pytest

from planner.formats import KvFormat
from tests.support.spread_engine import MODEL, RandomModel, assert_equal, plan_of

RNG = np.random.default_rng(3)
PROMPTS = [RNG.integers(0, MODEL.vocab, length).tolist() for length in (150, 137, 144)]


@pytest.mark.parametrize(
    ("devices", "kv_heads", "changes"),
    [(2, 8, {}), (4, 2, {"kv_format": KvFormat.INT8})],
    ids=["four heads each", "heads on two devices each, int8"],
)
def test_answers_with_a_tier_are_those_without(devices, kv_heads, changes):
    architecture = replace(MODEL, kv_heads=kv_heads)
    page_bytes = plan_of(architecture, devices=devices, **changes).page_bytes
    plan = plan_of(architecture, devices=devices, context=256, kv_bytes=18 * page_bytes, **changes)
    plan = replace(plan, lattice=replace(plan.lattice, prefill_chunks=(16,)))
    model, prompts = RandomModel(plan), [*PROMPTS, *PROMPTS, PROMPTS[0]]
    wanted = model.answers(prompts, 6, reuse=False, every=40)
    found = model.answers(prompts, 6, every=40, host_pages=64)
    assert_equal(found, wanted, 1e-3)
    assert found.tier.hits >= 16
    assert sum(found.cached) > 3 * 128
