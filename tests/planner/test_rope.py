"""Rotary frequencies against those of ``transformers``, for every kind and spelling of scaling."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from planner.architecture import (
    ModelArchitecture,
    RopeKind,
    RopeScaling,
    UnsupportedArchitectureError,
    from_hf_config,
)
from planner.rope import inverse_frequencies, rotary_tables, rotate

CONTEXT = 32_768
BASE = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_size": 256,
    "intermediate_size": 64,
    "vocab_size": 100,
    "max_position_embeddings": CONTEXT,
}
SPELLINGS = {
    "none": (None, {}),
    "default": ({"rope_type": "default"}, {}),
    "linear": ({"type": "linear", "factor": 2.0}, {}),
    "linear-new-name": ({"rope_type": "linear", "factor": 8.0}, {}),
    "llama3": (
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        {"rope_theta": 500_000.0},
    ),
    "llama3-beside-an-older-type": (
        {
            "rope_type": "llama3",
            "type": "linear",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 4096,
        },
        {},
    ),
    "yarn": ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}, {"rope_theta": 1_000_000.0}),
    "yarn-betas": (
        {
            "rope_type": "yarn",
            "factor": 16.0,
            "original_max_position_embeddings": 2048,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "truncate": False,
        },
        {},
    ),
    "yarn-attention-factor": (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192, "attention_factor": 1.5},
        {},
    ),
    "yarn-mscale": (
        {
            "rope_type": "yarn",
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
        },
        {},
    ),
    "theta-inside": ({"rope_type": "default", "rope_theta": 500_000.0}, {}),
}


def peer(scaling, extra) -> tuple[np.ndarray, float]:
    """Inverse frequencies and attention factor as ``transformers`` computes them."""
    rope = {"rope_theta": extra.get("rope_theta", 10_000.0), **(scaling or {})}
    rope["rope_type"] = rope.get("rope_type") or rope.pop("type", "default")
    rope.pop("type", None)
    arguments = {key: value for key, value in BASE.items() if key != "model_type"}
    config = transformers.LlamaConfig(**arguments, rope_parameters=rope)
    if rope["rope_type"] == "default":
        exponent = np.arange(0, 64, 2) / 64
        return 1.0 / rope["rope_theta"] ** exponent, 1.0
    frequencies, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, "cpu")
    return frequencies.double().numpy(), factor


@pytest.mark.parametrize("name", SPELLINGS)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_frequencies_and_attention_factor(name, key):
    scaling, extra = SPELLINGS[name]
    architecture = from_hf_config({**BASE, **extra, key: scaling})
    frequencies = inverse_frequencies(64, architecture.rope_theta, architecture.rope_scaling)
    wanted, factor = peer(scaling, extra)
    np.testing.assert_allclose(frequencies, wanted, rtol=1e-6, atol=0)
    assert architecture.rope_scaling.attention_factor == pytest.approx(factor, rel=1e-6)
    cos, sin = rotary_tables(architecture, jnp.array([0, 10, 9000, CONTEXT - 1]), local=False)
    for position, row_cos, row_sin in zip((0, 10, 9000, CONTEXT - 1), cos, sin, strict=True):
        angle = position * frequencies.astype(np.float32).astype(np.float64)
        allowed = 1e-6 + 2e-7 * position  # the product in float32
        np.testing.assert_allclose(row_cos, np.cos(angle) * factor, rtol=0, atol=allowed)
        np.testing.assert_allclose(row_sin, np.sin(angle) * factor, rtol=0, atol=allowed)


@pytest.mark.parametrize("kind", ["dynamic", "mystery", "longrope"])
def test_other_kinds_are_refused_by_name(kind):
    with pytest.raises(
        UnsupportedArchitectureError, match=f"rope scaling '{kind}' is not supported; supported: linear"
    ):
        from_hf_config({**BASE, "rope_scaling": {"type": kind, "factor": 2.0}})


@pytest.mark.parametrize("where", [{"partial_rotary_factor": 0.5}, {"rope_parameters": {"partial_rotary_factor": 0.5}}])
def test_partly_turned_heads_are_refused(where):
    with pytest.raises(UnsupportedArchitectureError, match=r"partial_rotary_factor 0\.5 is not supported"):
        from_hf_config({**BASE, **where})


def test_per_frequency_factors_say_the_same_as_llama3():
    scaling = RopeScaling(RopeKind.LLAMA3, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192)
    plain = inverse_frequencies(128, 500_000.0, RopeScaling())
    stretched = inverse_frequencies(128, 500_000.0, scaling)
    as_factors = RopeScaling(factors=tuple(plain / stretched))
    np.testing.assert_allclose(inverse_frequencies(128, 500_000.0, as_factors), stretched, rtol=1e-12)
    assert stretched[0] == plain[0], "short wavelengths are kept"
    assert stretched[-1] == pytest.approx(plain[-1] / 8), "long ones are divided"


def test_local_tables_are_unscaled_with_their_own_theta():
    architecture = ModelArchitecture(
        family="gemma3", layers=2, embed=64, ffw=64, q_heads=4, kv_heads=1, head_dim=16, vocab=50, context=4096,
        norm_eps=1e-6, rope_theta=1_000_000.0, query_scale=0.25, rope_local_theta=10_000.0, local_rope=(True, False),
        rope_scaling=RopeScaling(RopeKind.LINEAR, factor=8.0),
    )  # fmt: skip
    cos, _ = rotary_tables(architecture, jnp.array([100]), local=True)
    np.testing.assert_allclose(cos[0], np.cos(100 / 10_000.0 ** (np.arange(0, 16, 2) / 16)), rtol=0, atol=2e-5)
    cos, _ = rotary_tables(architecture, jnp.array([100]), local=False)
    np.testing.assert_allclose(cos[0], np.cos(12.5 / 1_000_000.0 ** (np.arange(0, 16, 2) / 16)), rtol=0, atol=2e-5)


def test_rotation_turns_the_half_split_pairs():
    x = np.random.default_rng(0).standard_normal((3, 2, 8)).astype(np.float32)
    angle = np.linspace(0, 3, 12).reshape(3, 4).astype(np.float32)
    out = np.asarray(rotate(jnp.asarray(x), jnp.cos(jnp.asarray(angle)), jnp.sin(jnp.asarray(angle))))
    pairs = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * angle)[:, None]
    np.testing.assert_allclose(out, np.concatenate([pairs.real, pairs.imag], -1), rtol=0, atol=1e-6)


def test_yarn_attention_factor_grows_with_the_logarithm_of_the_factor():
    architecture = from_hf_config({**BASE, "rope_scaling": {"type": "yarn", "factor": 4.0}})
    assert architecture.rope_scaling.attention_factor == pytest.approx(0.1 * math.log(4.0) + 1.0)
    assert architecture.rope_scaling.original_context == CONTEXT
