"""Hugging Face directories as people have them: shards, strays, shared tensors, damage."""

import json
import struct

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from appliance.model.checkpoint import CheckpointError
from appliance.model.opening import open_checkpoint
from planner.architecture import UnsupportedArchitectureError
from tests.support.tiny_models import save_hf

INDEX = "model.safetensors.index.json"


def sharded(path):
    save_hf(path, "llama", shard_size="60KB")
    shards = sorted(path.glob("model-*.safetensors"))
    assert len(shards) >= 3
    return shards


def refusal(path, kind=CheckpointError):
    with pytest.raises(kind) as caught:
        open_checkpoint(path)
    return str(caught.value)


def head_of(path):
    return dict(open_checkpoint(path).weights())["head"]


def test_missing_truncated_and_empty_shards_are_named(tmp_path):
    victim = sharded(tmp_path)[1]
    data = victim.read_bytes()
    for content in (data[:-1], b"", data[:100]):
        victim.write_bytes(content)
        assert victim.name in refusal(tmp_path)
    victim.unlink()
    assert f"{INDEX} names {victim.name}, not found" in refusal(tmp_path)


def test_shards_without_an_index_load_when_complete(tmp_path):
    shards = sharded(tmp_path)
    with_index = dict(open_checkpoint(tmp_path).weights())
    (tmp_path / INDEX).unlink()
    without = dict(open_checkpoint(tmp_path).weights())
    assert all(np.array_equal(with_index[name], without[name]) for name in with_index)
    shards[0].unlink()
    assert "nor a complete set" in refusal(tmp_path)


def test_the_index_wins_over_everything_beside_it(tmp_path):
    shards = sharded(tmp_path)
    expected = dict(open_checkpoint(tmp_path).weights())
    zeros = {name: np.zeros_like(values) for name, values in load_file(shards[0]).items()}
    for stray in ("model.safetensors", "model-4bit.safetensors", "consolidated.safetensors", "optimizer.safetensors"):
        save_file(zeros, tmp_path / stray)
    (tmp_path / "original").mkdir()
    save_file(zeros, tmp_path / "original" / shards[0].name)
    last = load_file(shards[-1])
    save_file({**last, **{k: v for k, v in zeros.items() if k not in last}}, shards[-1])
    found = open_checkpoint(tmp_path)
    tree = dict(found.weights())
    assert all(np.array_equal(tree[name], expected[name]) for name in expected)
    assert found.files == tuple(shards)


def test_an_index_that_promises_too_much_is_refused(tmp_path):
    sharded(tmp_path)
    index = json.loads((tmp_path / INDEX).read_text())
    name, shard = next(iter(index["weight_map"].items()))
    other = next(s for s in index["weight_map"].values() if s != shard)
    index["weight_map"][name] = other
    (tmp_path / INDEX).write_text(json.dumps(index))
    assert f"{name} in {other}" in refusal(tmp_path)
    (tmp_path / INDEX).write_text('{"metadata": {}}')
    assert "no weight_map" in refusal(tmp_path)
    (tmp_path / INDEX).write_text("{")
    assert "no valid JSON" in refusal(tmp_path)


def test_an_index_cannot_point_outside_the_directory(tmp_path):
    sharded(tmp_path / "m")
    index = json.loads((tmp_path / "m" / INDEX).read_text())
    index["weight_map"] = {name: f"../{shard}" for name, shard in index["weight_map"].items()}
    (tmp_path / "m" / INDEX).write_text(json.dumps(index))
    for shard in (tmp_path / "m").glob("*.safetensors"):
        shard.rename(tmp_path / shard.name)
    assert "not found" in refusal(tmp_path / "m")


def rewrite(path, change, metadata=None):
    tensors = load_file(path / "model.safetensors")
    save_file(change(tensors), path / "model.safetensors", metadata=metadata)


def set_config(path, **values):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **values}))


def without_head(tensors):
    return {name: values for name, values in tensors.items() if name != "lm_head.weight"}


def test_tie_flag_and_no_head_uses_the_embedding(tmp_path):
    save_hf(tmp_path, "llama", tie_word_embeddings=True)
    assert open_checkpoint(tmp_path).architecture.tied_embeddings


def test_tie_flag_and_a_different_head_uses_the_head(tmp_path):
    model = save_hf(tmp_path, "llama")
    set_config(tmp_path, tie_word_embeddings=True)
    np.testing.assert_array_equal(head_of(tmp_path), model.lm_head.weight.detach().numpy().T)


def test_a_head_equal_to_the_embedding_is_stored_once(tmp_path):
    save_hf(tmp_path, "llama")
    rewrite(tmp_path, lambda t: {**t, "lm_head.weight": t["model.embed_tokens.weight"].copy()})
    assert open_checkpoint(tmp_path).architecture.tied_embeddings
    assert "head" not in dict(open_checkpoint(tmp_path).weights())


def test_a_shared_tensor_is_found_through_the_note(tmp_path):
    save_hf(tmp_path, "llama")
    rewrite(tmp_path, without_head, {"lm_head.weight": "model.embed_tokens.weight", "format": "pt"})
    assert open_checkpoint(tmp_path).architecture.tied_embeddings


def test_no_head_and_no_tie_is_refused(tmp_path):
    save_hf(tmp_path, "llama")
    rewrite(tmp_path, without_head, {"format": "np"})
    assert "lm_head.weight is missing and config.json does not tie" in refusal(tmp_path)


def test_null_metadata_is_read(tmp_path):
    save_hf(tmp_path, "llama")
    data = (tmp_path / "model.safetensors").read_bytes()
    size = struct.unpack_from("<Q", data)[0]
    header = json.dumps({**json.loads(data[8 : 8 + size]), "__metadata__": None}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + data[8 + size :])
    assert open_checkpoint(tmp_path).architecture.layers == 3


def test_unreadable_dtypes_and_shapes_are_named(tmp_path):
    import ml_dtypes

    save_hf(tmp_path, "llama")
    rewrite(
        tmp_path,
        lambda t: {
            **t,
            "model.layers.0.mlp.up_proj.weight": t["model.layers.0.mlp.up_proj.weight"].astype(ml_dtypes.float8_e4m3fn),
            "model.norm.weight": np.ones(3, np.float32),
            "model.layers.1.self_attn.q_proj.bias": np.ones(48, np.float32),
        },
    )
    message = refusal(tmp_path)
    assert "model.layers.0.mlp.up_proj.weight is F8_E4M3" in message
    assert "model.norm.weight has shape [3], config.json asks for [48]" in message
    assert "model.layers.1.self_attn.q_proj.bias is not supported for llama" in message


def test_dtype_in_config_json_does_not_matter(tmp_path):
    save_hf(tmp_path, "llama")
    expected = dict(open_checkpoint(tmp_path).weights())
    set_config(tmp_path, torch_dtype="float16", dtype="float16")
    assert all(np.array_equal(a, expected[n]) for n, a in open_checkpoint(tmp_path).weights())


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_text_part_of_a_multimodal_checkpoint(tmp_path, prefix):
    save_hf(tmp_path, "gemma3")
    expected = dict(open_checkpoint(tmp_path).weights())
    text = json.loads((tmp_path / "config.json").read_text())
    wrapper = {"model_type": "gemma3", "text_config": text, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(wrapper))
    vision = {"vision_tower.encoder.bias": np.ones(3, np.float32)}
    rewrite(tmp_path, lambda t: {**{name.replace("model.", prefix, 1): v for name, v in t.items()}, **vision})
    assert all(np.array_equal(a, expected[n]) for n, a in open_checkpoint(tmp_path).weights())


def test_quantised_directories_and_unknown_families_are_named(tmp_path):
    save_hf(tmp_path, "llama")
    set_config(tmp_path, quantization_config={"quant_method": "gptq"})
    assert "quantised by 'gptq'" in refusal(tmp_path, UnsupportedArchitectureError)
    set_config(tmp_path, quantization_config=None, model_type="mamba")
    assert "'mamba' is not supported" in refusal(tmp_path, UnsupportedArchitectureError)


def test_a_directory_without_a_model(tmp_path):
    assert "neither config.json nor a .gguf file" in refusal(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    assert "holds a list" in refusal(tmp_path)
    assert "not found" in refusal(tmp_path / "absent")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert "num_hidden_layers" in refusal(tmp_path, UnsupportedArchitectureError)
