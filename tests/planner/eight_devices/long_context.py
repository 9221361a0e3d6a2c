"""A context of 70,000 tokens in two and in three shards on two devices, through the engine."""

from dataclasses import replace

import numpy as np
import pytest

from planner.pages import SHARD_LEN
from tests.support.spread_engine import MODEL, answers, assert_equal, plan_of

LENGTH = 70_000
LONG = replace(MODEL, q_heads=2, kv_heads=2, context=72 * 1024)
SETTINGS = {"slots": 1, "prefill_chunk": 1024, "prefill_slots": 1, "page_size": 512}
PROMPTS = [np.random.default_rng(9).integers(0, MODEL.vocab, LENGTH).tolist()]


@pytest.fixture(scope="module")
def on_one():
    return answers(plan_of(LONG, **SETTINGS), PROMPTS, 4)


@pytest.mark.parametrize(("shards", "shard_len"), [(2, 36 * 1024), (3, SHARD_LEN)])
def test_ids_and_probabilities_are_those_of_one_device(on_one, shards, shard_len):
    assert -(-LENGTH // shard_len) == shards
    plan = plan_of(LONG, **SETTINGS, devices=2, context_devices=2, shard_len=shard_len)
    assert_equal(answers(plan, PROMPTS, 4), on_one, 1e-4)
