"""Contexts spread over 2 and 4 devices answer as on one, through the engine; run where there are eight."""

from dataclasses import replace

import numpy as np
import pytest

from planner.formats import KvFormat
from tests.support.spread_engine import MODEL, answers, assert_equal, plan_of

RNG = np.random.default_rng(5)
PROMPTS = [RNG.integers(0, MODEL.vocab, length).tolist() for length in (386, 128, 200, 17)]
FEW = replace(MODEL, kv_heads=2)
PAGES = {"page_size": 128, "shard_len": 128}
CASES = [
    pytest.param({"devices": 2, "context_devices": 2, "shard_len": 64}, {}, 1e-4, id="2 devices"),
    pytest.param({"devices": 8, "context_devices": 4, "shard_len": 32}, {}, 1e-4, id="4 by 2 devices"),
    pytest.param(
        {"devices": 4, "context_devices": 2, "shard_len": 64}, {"kv_format": KvFormat.INT8}, 1e-2, id="2 by 2, int8"
    ),
    pytest.param(
        {"devices": 2, "context_devices": 2, **PAGES}, {"kv_format": KvFormat.BMQ4, "page_size": 128}, 1e-2,
        id="2 devices, bmq4",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("spread", "changes", "tolerance"), CASES)
def test_ids_and_probabilities_are_those_of_one_device(spread, changes, tolerance):
    prompts = PROMPTS if "kv_format" not in changes else PROMPTS[:3]
    wanted = answers(plan_of(FEW, **changes), prompts, 9)
    assert_equal(answers(plan_of(FEW, **{**changes, **spread}), prompts, 9), wanted, tolerance)
