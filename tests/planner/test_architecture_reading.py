"""config.json as models carry it: rope spellings, head dimensions, windows, and what is refused by name."""

import math

import numpy as np
import pytest
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from planner.architecture import RopeKind, RopeScaling, UnsupportedArchitectureError, from_hf_config, read_rope_scaling
from planner.rope import inverse_frequencies

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 2048,
}

STRETCHED = {
    "linear": {"type": "linear", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "yarn": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    "default": {"rope_type": "default"},
}


@pytest.mark.parametrize("kind", STRETCHED)
def test_stretched_frequencies_equal_transformers(kind):
    scaling = STRETCHED[kind]
    ours = from_hf_config({**LLAMA, "rope_scaling": scaling, "rope_theta": 10_000.0})
    frequencies = inverse_frequencies(ours.head_dim, ours.rope_theta, ours.rope_scaling)
    theirs = transformers.LlamaConfig(
        **{key: value for key, value in LLAMA.items() if key != "model_type"},
        rope_parameters={
            "rope_theta": 10_000.0,
            **{("rope_type" if key == "type" else key): value for key, value in scaling.items()},
        },
    )
    if kind == "default":
        expected, attention = 1 / 10_000.0 ** (np.arange(0, 16, 2) / 16), 1.0
    else:
        expected, attention = ROPE_INIT_FUNCTIONS[kind](theirs, "cpu")
    np.testing.assert_allclose(frequencies, np.asarray(expected), rtol=1e-6)
    assert ours.rope_scaling.attention_factor == pytest.approx(attention, abs=1e-6)


def test_absent_scaling_and_the_newer_spelling():
    assert from_hf_config({**LLAMA, "rope_scaling": None}).rope_scaling == RopeScaling()
    assert read_rope_scaling({"rope_type": "llama3", "type": "linear", "factor": 8.0}, 64).kind is RopeKind.LLAMA3


@pytest.mark.parametrize(
    "change",
    [
        {"rope_theta": 500_000.0},
        {"rope_parameters": {"rope_theta": 500_000.0, "rope_type": "default"}},
        {"rope_scaling": {"rope_theta": 500_000.0, "rope_type": "default"}},
    ],
)
def test_theta_from_either_place(change):
    assert from_hf_config({**LLAMA, **change}).rope_theta == 500_000.0


@pytest.mark.parametrize("kind", ["mystery", "dynamic", "longrope"])
def test_unknown_scalings_are_named(kind):
    with pytest.raises(UnsupportedArchitectureError, match=f"rope scaling '{kind}' is not supported"):
        from_hf_config({**LLAMA, "rope_scaling": {"type": kind, "factor": 2.0}})


@pytest.mark.parametrize(
    ("change", "head_dim"),
    [
        ({"hidden_size": 640, "num_attention_heads": 4, "head_dim": 256}, 256),
        ({"hidden_size": 1024, "num_attention_heads": 16, "head_dim": 128}, 128),
        ({"head_dim": None}, 16),
    ],
)
def test_head_dim_given_explicitly(change, head_dim):
    architecture = from_hf_config({**LLAMA, **change})
    assert architecture.head_dim == head_dim
    assert architecture.query_scale == pytest.approx(1 / math.sqrt(head_dim))


def test_head_dim_that_cannot_be_known():
    with pytest.raises(UnsupportedArchitectureError, match="hidden_size 66 is no multiple of num_attention_heads 4"):
        from_hf_config({**LLAMA, "hidden_size": 66})


def test_gemma_query_scale_from_its_own_key():
    gemma = {**LLAMA, "model_type": "gemma3_text", "head_dim": 16, "query_pre_attn_scalar": 168}
    assert from_hf_config(gemma).query_scale == pytest.approx(168**-0.5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 10**30}, r"hidden_size is 1000000000000000000000000000000; it must be .* in 1\.\.16777216"),
        ({"num_hidden_layers": 10**9}, r"num_hidden_layers is 1000000000; it must be a whole number in 1\.\.1024"),
        ({"num_hidden_layers": float("nan")}, "num_hidden_layers is nan"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan; it must be a number above 0"),
        ({"rope_theta": float("inf")}, "rope_theta is inf; it must be a number above 0"),
        ({"rope_theta": -1}, "rope_theta is -1; it must be a number above 0"),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn'; it must be an object"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor is 0; it must be a number above 0"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing; it must be a number above 0"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": "x"}}, "a value of the wrong kind"),
        ({"vocab_size": None}, r"vocab_size is missing; it must be a whole number"),
    ],
)
def test_numbers_that_are_none_are_refused(changes, message):
    with pytest.raises(UnsupportedArchitectureError, match=message):
        from_hf_config({**LLAMA, **changes})
