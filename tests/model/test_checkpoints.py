"""Every family, in both file formats, gives the weight tree that its transformers model holds."""

import dataclasses
import math

import numpy as np
import pytest

from appliance.model.opening import open_checkpoint
from planner.architecture import Activation, RopeKind
from planner.formats import WeightForm
from planner.weights import weight_specs
from tests.support.tiny_models import CONFIGS, FAMILIES, save_gguf, save_hf


def expected_tree(model, family):
    """The weight tree written down a second time, from the state dict and by explicit loops."""
    config, state = model.config, {name: w.numpy() for name, w in model.state_dict().items()}
    q_heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // q_heads
    one = 1.0 if family == "gemma3" else 0.0

    def stack(name, change=lambda w: w):
        return np.stack([change(state[f"model.layers.{i}.{name}"]) for i in range(config.num_hidden_layers)])

    def qkv(layer, kind):
        q, k, v = (state[f"model.layers.{layer}.self_attn.{part}_proj.{kind}"] for part in "qkv")
        rows = []
        for kv_head in range(kv_heads):
            own = [head for head in range(q_heads) if head // (q_heads // kv_heads) == kv_head]
            rows += [q[head * head_dim : (head + 1) * head_dim] for head in own]
            rows.append(k[kv_head * head_dim : (kv_head + 1) * head_dim])
            rows.append(v[kv_head * head_dim : (kv_head + 1) * head_dim])
        return np.concatenate(rows).T

    layers = range(config.num_hidden_layers)
    gemma = family == "gemma3"
    tree = {
        "embed": state["model.embed_tokens.weight"],
        "attn_norm": stack("input_layernorm.weight") + one,
        "qkv": np.stack([qkv(layer, "weight") for layer in layers]),
        "o": stack("self_attn.o_proj.weight", np.transpose),
        "ffw_norm": stack(("pre_feedforward_layernorm" if gemma else "post_attention_layernorm") + ".weight") + one,
        "gate_up": np.concatenate(
            [stack("mlp.gate_proj.weight", np.transpose), stack("mlp.up_proj.weight", np.transpose)], axis=2
        ),
        "down": stack("mlp.down_proj.weight", np.transpose),
        "final_norm": state["model.norm.weight"] + one,
    }
    if family == "qwen2":
        tree["qkv_bias"] = np.stack([qkv(layer, "bias") for layer in layers])
    if family in ("qwen3", "gemma3"):
        tree |= {f"{x}_norm": stack(f"self_attn.{x}_norm.weight") + one for x in "qk"}
    if gemma:
        tree["post_attn_norm"] = stack("post_attention_layernorm.weight") + one
        tree["post_ffw_norm"] = stack("post_feedforward_layernorm.weight") + one
    if not config.tie_word_embeddings:
        tree["head"] = state["lm_head.weight"].T
    return tree


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, array in found.items():
        assert array.dtype == np.float32, name
        np.testing.assert_array_equal(array, expected[name], err_msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_huggingface_directory_gives_the_models_weights(tmp_path, family):
    model = save_hf(tmp_path, family)
    checkpoint = open_checkpoint(tmp_path)
    weights = dict(checkpoint.weights())
    assert_same(weights, expected_tree(model, family))
    assert list(weights) == list(weight_specs(checkpoint.architecture, WeightForm.FLOAT32))


@pytest.mark.parametrize("family", FAMILIES)
def test_gguf_file_gives_the_models_weights(tmp_path, family):
    model = save_gguf(tmp_path / "tiny.gguf", family)
    assert_same(dict(open_checkpoint(tmp_path / "tiny.gguf").weights()), expected_tree(model, family))


@pytest.mark.parametrize("family", FAMILIES)
def test_both_formats_agree_on_the_architecture(tmp_path, family):
    save_hf(tmp_path / "hf", family)
    save_gguf(tmp_path / "tiny.gguf", family)
    ours = open_checkpoint(tmp_path / "hf").architecture
    assert open_checkpoint(tmp_path / "tiny.gguf").architecture == ours
    assert ours.family == family
    assert ours.tied_embeddings == CONFIGS[family].get("tie_word_embeddings", False)
    assert ours.query_scale == pytest.approx(1 / math.sqrt(ours.head_dim))


def test_gemma_and_mistral_particulars(tmp_path):
    save_gguf(tmp_path / "gemma.gguf", "gemma3")
    save_gguf(tmp_path / "mistral.gguf", "mistral")
    gemma = open_checkpoint(tmp_path / "gemma.gguf").architecture
    assert gemma.windows == (24, 24, 24, 24, 24, 0)
    assert gemma.local_rope == (True, True, True, True, True, False)
    assert (gemma.rope_theta, gemma.rope_local_theta) == (1e6, 1e4)
    assert gemma.activation is Activation.GELU_TANH
    assert gemma.embed_scale == math.sqrt(48)
    assert open_checkpoint(tmp_path / "mistral.gguf").architecture.windows == (24, 24, 24)


def test_progress_ends_at_the_number_of_weights(tmp_path):
    save_gguf(tmp_path / "tiny.gguf", "llama")
    checkpoint = open_checkpoint(tmp_path / "tiny.gguf")
    seen = []
    for _ in checkpoint.weights(lambda what, done, total: seen.append((what, done, total))):
        pass
    total = checkpoint.architecture.parameters()
    assert seen[-1] == ("reading weights", total, total)
    assert [done for _, done, _ in seen] == sorted({done for _, done, _ in seen})


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_untied_head_in_the_second_split_file(tmp_path, family):
    model = save_gguf(tmp_path / "tiny.gguf", family, split_tensors=20)
    files = sorted(tmp_path.glob("*.gguf"))
    assert len(files) == 2
    for path in (*files, tmp_path):
        checkpoint = open_checkpoint(path)
        assert checkpoint.files == tuple(files)
        assert_same(dict(checkpoint.weights()), expected_tree(model, family))


def test_single_file_named_like_a_split(tmp_path):
    model = save_gguf(tmp_path / "tiny-00001-of-00001.gguf", "llama")
    assert_same(dict(open_checkpoint(tmp_path / "tiny-00001-of-00001.gguf").weights()), expected_tree(model, "llama"))


def test_rope_factors_are_the_llama3_stretch(tmp_path):
    """The same model, once with llama3 scaling in config.json and once as a GGUF file with its factor tensor."""
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    model = save_hf(tmp_path / "hf", "llama", rope_parameters=scaling)
    stretched = model.model.rotary_emb.inv_freq.numpy().astype(np.float64)
    plain = 1.0 / 10_000.0 ** (np.arange(0, 8, 2) / 8)
    save_gguf(tmp_path / "t.gguf", "llama", extra_tensors={"rope_freqs.weight": (plain / stretched).astype(np.float32)})
    from_config = open_checkpoint(tmp_path / "hf").architecture.rope_scaling
    from_file = open_checkpoint(tmp_path / "t.gguf").architecture.rope_scaling
    assert (from_config.kind, from_config.factor) == (RopeKind.LLAMA3, 8.0)
    assert from_file.kind is RopeKind.NONE
    np.testing.assert_allclose(plain / np.array(from_file.factors), stretched, rtol=1e-6)


@pytest.mark.parametrize("shard_size", ["1GB", "40KB"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_and_mixed_dtypes_per_tensor(tmp_path, dtype, shard_size):
    import torch

    from tests.support.tiny_models import tiny_model

    model = tiny_model("llama").to(getattr(torch, dtype))
    model.model.norm.to(torch.float32)
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    wide = dataclasses.replace(open_checkpoint(tmp_path).architecture)
    tree = dict(open_checkpoint(tmp_path).weights())
    assert wide.family == "llama"
    assert_same(tree, expected_tree(model.to(torch.float32), "llama"))
