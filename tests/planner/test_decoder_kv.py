"""Steps over int8, bmq4 and bmq2 pools stay close to one forward pass without any, and depend on nobody else."""

import functools

import jax
import numpy as np
import pytest

from planner.architecture import ModelArchitecture
from planner.decoder import QUERY_ENERGY
from planner.formats import KvFormat
from planner.weights import random_weights
from tests.support.decoder_rig import DecoderRig, Row, whole_logits

ARCHITECTURE = ModelArchitecture(
    family="llama", layers=2, embed=32, ffw=48, q_heads=4, kv_heads=2, head_dim=16, vocab=96, context=384,
    norm_eps=1e-6, rope_theta=10_000.0, query_scale=0.25, windows=(0, 200),
)  # fmt: skip
WEIGHTS = random_weights(ARCHITECTURE, 1)
ENERGY = np.ones((2, 2, 16), np.float32)
BOUND = {KvFormat.INT8: (0.06, 0.03), KvFormat.BMQ4: (0.8, 0.3), KvFormat.BMQ2: (1.2, 0.6)}
"""Largest and mean error of the best log-probabilities that the rounding of keys and values may make. Random weights
make it large: nothing in their keys and values is alike. About twice what is measured."""

LENGTH, CHUNK = 275, 64
PROMPT = np.random.default_rng(0).integers(0, 96, LENGTH).tolist()
OTHER = np.random.default_rng(1).integers(0, 96, LENGTH).tolist()
ENDS = (64, 120, 184, 240)
"""Of the chunks; what follows is decoded id by id."""


@functools.cache
def rig(kv_format: KvFormat) -> DecoderRig:
    weights = {**WEIGHTS, QUERY_ENERGY: ENERGY}
    return DecoderRig(
        ARCHITECTURE, weights, num_pages=8, page_size=128, width=3, slots=3, kv_format=kv_format,
    )  # fmt: skip


@functools.cache
def wanted() -> np.ndarray:
    return np.asarray(jax.nn.log_softmax(whole_logits(ARCHITECTURE, WEIGHTS, PROMPT)))


def outputs(kv_format: KvFormat, slot: int, pages: list[int], other: tuple[int, list[int]] | None = None):
    """Position, best ids and their log-probabilities at the end of each chunk and of each decoded id.

    ``other`` is the slot and the pages of another sequence that goes the same way in the same launches.
    """
    driven, found = rig(kv_format), []
    driven.reset()
    start = 0
    for end in ENDS:
        rows = [Row(slot, pages, start, PROMPT[start:end])]
        if other:
            rows.insert(0, Row(*other, start, OTHER[start:end]))
        out = driven.prefill(rows, chunk=2 * CHUNK)
        found.append((end - 1, out.top_ids[len(rows) - 1], out.top_logprobs[len(rows) - 1]))
        start = end
    for position in range(ENDS[-1], LENGTH):
        rows = [Row(slot, pages, position, PROMPT[position : position + 1])]
        if other:
            rows.append(Row(*other, position, OTHER[position : position + 1]))
        out = driven.decode(rows)
        found.append((position, out.top_ids[slot], out.top_logprobs[slot]))
    return found


@pytest.mark.parametrize("kv_format", BOUND)
def test_chunked_prefill_and_decode_stay_close_to_one_forward(kv_format):
    found = outputs(kv_format, 1, [5, 0, 3])
    errors = [np.abs(logprobs - wanted()[position, ids]).max() for position, ids, logprobs in found]
    assert errors[0] < 1e-4, "the first chunk reads no page"
    largest, mean = BOUND[kv_format]
    assert max(errors) < largest
    assert np.mean(errors) < mean


@pytest.mark.parametrize("kv_format", BOUND)
def test_slots_pages_and_neighbours_change_nothing(kv_format):
    alone = outputs(kv_format, 1, [5, 0, 3])
    for slot, pages, other in ((2, [7, 6, 1], None), (0, [1, 2, 4], (2, [3, 7, 0]))):
        for one, another in zip(alone, outputs(kv_format, slot, pages, other), strict=True):
            np.testing.assert_array_equal(one[1][:5], another[1][:5])
            np.testing.assert_allclose(one[2], another[2], rtol=0, atol=2e-5)
