"""int8 weights: rotation changes nothing, error feedback pays, and every kind of model comes out whole."""

from dataclasses import replace

import numpy as np
import pytest

from planner.architecture import Activation, ModelArchitecture
from planner.decoder import Numerics
from planner.formats import WeightForm
from planner.quantize import MAX_CODE, CalibrationError, quantize, rotated, round_with_feedback
from planner.weights import random_weights, weight_specs
from tests.support.decoder_rig import whole_logits

LLAMA = ModelArchitecture(
    family="llama", layers=3, embed=64, ffw=96, q_heads=6, kv_heads=2, head_dim=16, vocab=160, context=512,
    norm_eps=1e-6, rope_theta=10_000.0, query_scale=0.25,
)  # fmt: skip
GEMMA = replace(
    LLAMA, family="gemma3", activation=Activation.GELU_TANH, windows=(20, 5, 0), local_rope=(True, True, False),
    rope_local_theta=500.0, tied_embeddings=True, qk_norm=True, post_norms=True, embed_scale=8.0,
)  # fmt: skip
MODELS = {
    "untied": LLAMA,
    "tied": replace(LLAMA, tied_embeddings=True),
    "bias-and-more-layers-than-channels": replace(
        LLAMA, qkv_bias=True, layers=5, embed=4, tied_embeddings=True, windows=(), local_rope=()
    ),
    "qk-norm": replace(LLAMA, family="qwen3", qk_norm=True),
    "gemma3": GEMMA,
}
IDS = np.random.default_rng(9).integers(0, LLAMA.vocab, (4, 128)).astype(np.int32)
INT8 = Numerics(WeightForm.INT8, "xla", "xla")


def outliers(architecture, seed=0):
    """Weights with a few channels that stand out, as real checkpoints have them."""
    weights = random_weights(architecture, seed)
    weights["attn_norm"][:, ::16] *= 8.0
    weights["embed"][:, ::16] *= 6.0
    return weights


def noted():
    calls = []
    return calls, lambda done, total: calls.append((done, total))


@pytest.mark.parametrize("name", ["untied", "tied", "qk-norm", "bias-and-more-layers-than-channels"])
def test_rotation_leaves_the_logits(name):
    architecture = MODELS[name]
    weights = outliers(architecture)
    before = {key: array.copy() for key, array in weights.items()}
    turned = rotated(architecture, weights)
    for key, array in before.items():
        np.testing.assert_array_equal(weights[key], array, err_msg="the given tree is not changed")
    wanted = whole_logits(architecture, weights, IDS[0, :40])
    got = whole_logits(replace(architecture, tied_embeddings=False), turned, IDS[0, :40])
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-4 * max(1.0, np.abs(wanted).max()))
    for norm in ("attn_norm", "ffw_norm", "final_norm"):
        np.testing.assert_array_equal(turned[norm], 1.0)
    peak = np.abs(before["embed"]).max(0)
    turned_peak = np.abs(turned["embed"]).max(0)
    if architecture.embed > 16:
        assert turned_peak.max() / np.median(turned_peak) < 0.6 * peak.max() / np.median(peak), "no channel stands out"


@pytest.mark.parametrize("name", MODELS)
def test_the_tree_is_the_specified_one(name):
    architecture = MODELS[name]
    calls, progress = noted()
    tree = quantize(architecture, outliers(architecture), IDS, progress)
    specs = weight_specs(architecture, WeightForm.INT8)
    assert {key: (array.shape, array.dtype.name) for key, array in tree.items()} == {
        key: (spec.shape, spec.dtype) for key, spec in specs.items()
    }
    for key, array in tree.items():
        if key.endswith(".codes"):
            assert array.min() >= -MAX_CODE, key
            assert array.max() <= MAX_CODE, key
            assert np.abs(array.astype(int)).max() > 100, "the range is used"
        if key.endswith(".scale"):
            assert (array > 0).all(), key
    assert calls == [(done, architecture.layers + 1) for done in range(1, architecture.layers + 2)]


@pytest.mark.parametrize("name", ["untied", "tied", "gemma3"])
def test_int8_logits_stay_near_the_float_ones(name):
    architecture = MODELS[name]
    weights = outliers(architecture)
    tree = quantize(architecture, dict(weights), IDS, lambda *_: None)
    ids = np.random.default_rng(1).integers(0, architecture.vocab, 40)  # fewer rows than take the bf16 way
    wanted = whole_logits(architecture, weights, ids)
    got = whole_logits(architecture, tree, ids, INT8)
    error = np.sqrt(np.mean((got - wanted) ** 2) / np.mean((wanted - wanted.mean(-1, keepdims=True)) ** 2))
    assert error < 0.05


def test_feedback_beats_plain_rounding_on_correlated_inputs():
    rng = np.random.default_rng(2)
    inputs = rng.standard_normal((2_000, 12)) @ rng.standard_normal((12, 200)) + 0.1 * rng.standard_normal((2_000, 200))
    weight = rng.standard_normal((200, 90)).astype(np.float32)
    gram = inputs.T @ inputs
    codes, scale = round_with_feedback(weight, gram)
    plain = np.clip(np.rint(weight / scale), -MAX_CODE, MAX_CODE)

    def error(rounded):
        return np.linalg.norm(inputs @ (rounded * scale - weight))

    assert error(codes) < 0.5 * error(plain)
    assert np.abs(codes * scale - weight).max() < 60 * scale.max(), "feedback stays bounded"


def test_independent_inputs_are_rounded_to_the_nearest_code():
    rng = np.random.default_rng(3)
    weight = rng.standard_normal((150, 20)).astype(np.float32)
    codes, scale = round_with_feedback(weight, np.eye(150) * 7.0)
    np.testing.assert_array_equal(codes, np.rint(weight / scale))
    np.testing.assert_allclose(scale, np.abs(weight).max(0) / MAX_CODE, rtol=1e-6)


def test_dead_inputs_and_empty_channels_are_no_trouble():
    weight = np.random.default_rng(4).standard_normal((40, 6)).astype(np.float32)
    weight[:, 2] = 0.0
    gram = np.diag(np.r_[np.zeros(20), np.ones(20)])
    codes, scale = round_with_feedback(weight, gram)
    assert np.isfinite(scale).all()
    assert (codes[:, 2] == 0).all()
    codes, _ = round_with_feedback(weight, np.zeros((40, 40)))
    np.testing.assert_array_equal(codes, np.rint(weight / scale))


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (IDS[0], r"calibration ids of shape \(128,\); at least 512 ids in \[windows, length\] are needed"),
        (IDS[:3], r"calibration ids of shape \(3, 128\); at least 512"),
        (np.where(IDS == 5, 160, IDS), r"calibration ids lie in 0\.\.160; the vocabulary has the ids 0\.\.159"),
        (np.where(IDS == 5, -1, IDS), r"calibration ids lie in -1\.\.159; the vocabulary"),
    ],
)
def test_ids_that_cannot_be_used(ids, message):
    with pytest.raises(CalibrationError, match=message):
        quantize(LLAMA, random_weights(LLAMA, 0), ids, lambda *_: None)
