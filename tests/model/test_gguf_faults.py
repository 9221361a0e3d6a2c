"""GGUF files as people have them: mixed types, missing keys, wrong files and damaged ones."""

import logging
import struct

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from appliance.model.checkpoint import CheckpointError
from appliance.model.gguf_file import open_gguf
from appliance.model.opening import open_checkpoint
from planner.architecture import UnsupportedArchitectureError
from tests.support.tiny_models import gguf_tensors, save_gguf, tiny_model


def tiny(tmp_path, family="llama", **arguments):
    path = tmp_path / "tiny.gguf"
    save_gguf(path, family, **arguments)
    return path


def refusal(path, kind=CheckpointError):
    with pytest.raises(kind) as caught:
        open_checkpoint(path)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_every_quantised_type_decodes_as_the_gguf_package_does(tmp_path, kind):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_attention_heads": 4}
    path = tmp_path / "q.gguf"
    model = save_gguf(path, "llama", types={"ffn_up.weight": Kind[kind], "token_embd.weight": Kind[kind]}, **sizes)
    tree = dict(open_checkpoint(path).weights())
    tensors = gguf_tensors(model, "llama")

    def reference(name):
        return gguf.quants.dequantize(gguf.quants.quantize(tensors[name], Kind[kind]), Kind[kind])

    np.testing.assert_array_equal(tree["embed"], reference("token_embd.weight"))
    np.testing.assert_array_equal(tree["gate_up"][1][:, 96:], reference("blk.1.ffn_up.weight").T)
    np.testing.assert_array_equal(tree["gate_up"][1][:, :96], tensors["blk.1.ffn_gate.weight"].T)


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL"])
def test_k_quants_decode_by_their_own_type(tmp_path, kind):
    """Random bytes are valid blocks of these types once their scales are finite."""
    rng = np.random.default_rng(0)
    block, block_bytes = gguf.GGML_QUANT_SIZES[Kind[kind]]
    raw = rng.integers(0, 60, (96, 256 // block * block_bytes), dtype=np.uint8)
    path = tmp_path / "k.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("a", raw, raw_dtype=Kind[kind])
    writer.add_tensor("b", np.ones((2, 3), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = open_gguf(path)
    np.testing.assert_array_equal(file.values("a"), gguf.quants.dequantize(raw, Kind[kind]))
    assert file.values("a").shape == (96, 256)
    np.testing.assert_array_equal(file.values("b"), np.ones((2, 3)))


@pytest.mark.parametrize(
    ("key", "check"),
    [
        ("rope.freq_base", lambda a: a.rope_theta == 10_000.0),
        ("attention.key_length", lambda a: a.head_dim == 8),
        ("attention.value_length", lambda a: a.head_dim == 8),
        ("rope.dimension_count", lambda a: a.head_dim == 8),
    ],
)
def test_optional_keys_have_documented_defaults(tmp_path, key, check):
    assert check(open_checkpoint(tiny(tmp_path, drop_keys=(key,))).architecture)


def test_head_count_kv_defaults_to_head_count(tmp_path):
    path = tiny(tmp_path, drop_keys=("attention.head_count_kv",), num_key_value_heads=6)
    assert open_checkpoint(path).architecture.kv_heads == 6


@pytest.mark.parametrize("key", ["context_length", "block_count", "attention.layer_norm_rms_epsilon"])
def test_needed_keys_are_named(tmp_path, key):
    message = refusal(tiny(tmp_path, drop_keys=(key,)), UnsupportedArchitectureError)
    assert f"llama.{key} is missing" in message


@pytest.mark.parametrize("kind", ["uint64", "int32", "float32", "array"])
def test_whole_numbers_of_any_kind(tmp_path, kind):
    path = tmp_path / "n.gguf"
    model = tiny_model("llama")
    writer = gguf.GGUFWriter(path, "llama")
    add = {"uint64": writer.add_uint64, "int32": writer.add_int32, "float32": writer.add_float32}.get(
        kind, lambda key, value: writer.add_array(key, [value] * 3)
    )
    for key, value in {
        "block_count": 3, "context_length": 512, "embedding_length": 48, "feed_forward_length": 80,
        "attention.head_count": 6, "attention.head_count_kv": 2,
    }.items():  # fmt: skip
        add(f"llama.{key}", value)
    writer.add_float64("llama.attention.layer_norm_rms_epsilon", 1e-5)
    for name, values in gguf_tensors(model, "llama").items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    architecture = open_checkpoint(path).architecture
    assert (architecture.layers, architecture.kv_heads, architecture.context) == (3, 2, 512)
    assert architecture.norm_eps == 1e-5


def _rewritten(tmp_path, edit):
    """The tiny file with further metadata or another alignment."""
    path = tmp_path / "e.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    edit(writer)
    for key, value in {
        "block_count": 3, "context_length": 512, "embedding_length": 48, "feed_forward_length": 80,
        "attention.head_count": 6, "attention.head_count_kv": 2,
    }.items():  # fmt: skip
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    model = tiny_model("llama")
    for name, values in gguf_tensors(model, "llama").items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, model


def test_alignment_64(tmp_path):
    path, model = _rewritten(tmp_path, lambda writer: writer.add_custom_alignment(64))
    expected = gguf_tensors(model, "llama")["blk.2.ffn_down.weight"]
    np.testing.assert_array_equal(open_gguf(path).values("blk.2.ffn_down.weight"), expected)


def test_yarn_and_linear_scaling(tmp_path):
    def yarn(writer):
        writer.add_string("llama.rope.scaling.type", "yarn")
        writer.add_float32("llama.rope.scaling.factor", 4.0)
        writer.add_uint32("llama.rope.scaling.original_context_length", 128)

    scaling = open_checkpoint(_rewritten(tmp_path, yarn)[0]).architecture.rope_scaling
    assert (scaling.kind, scaling.factor, scaling.original_context) == ("yarn", 4.0, 128)
    assert scaling.attention_factor == pytest.approx(0.1 * np.log(4) + 1)
    path, _ = _rewritten(tmp_path, lambda writer: writer.add_float32("llama.rope.scale_linear", 2.0))
    assert open_checkpoint(path).architecture.rope_scaling.kind == "linear"


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda w: [w.add_string("llama.rope.scaling.type", "longrope"), w.add_float32("llama.rope.scaling.factor", 2)],
         "rope scaling 'longrope'"),
        (lambda w: w.add_uint32("llama.expert_count", 8), "8 experts"),
        (lambda w: w.add_uint32("llama.attention.value_length", 16), "value_length is 16"),
        (lambda w: w.add_uint32("llama.rope.dimension_count", 4), "rope.dimension_count is 4"),
        (lambda w: w.add_string("llama.attention.key_length", "8"), "key_length is '8'"),
    ],
)  # fmt: skip
def test_computations_that_are_not_supported_are_named(tmp_path, edit, words):
    path, _ = _rewritten(tmp_path, edit)
    assert words in refusal(path, UnsupportedArchitectureError)


def test_missing_and_misshapen_tensors_come_in_one_error(tmp_path):
    path = tiny(
        tmp_path,
        drop_tensors=("blk.1.ffn_up.weight", "output_norm.weight", "blk.2.attn_v.weight"),
        extra_tensors={"blk.0.attn_norm.weight": np.ones(7, np.float32), "blk.0.attn_q.bias": np.ones(48, np.float32)},
    )
    message = refusal(path)
    for words in (
        "blk.1.ffn_up.weight is missing",
        "output_norm.weight is missing",
        "blk.2.attn_v.weight is missing",
        "blk.0.attn_norm.weight has shape [7], [48] is needed",
        "blk.0.attn_q.bias is not supported for llama",
    ):
        assert words in message


def test_missing_embedding_is_named(tmp_path):
    assert "token_embd.weight is missing" in refusal(tiny(tmp_path, drop_tensors=("token_embd.weight",)))


def test_unknown_extra_tensors_are_left_out_with_a_warning(tmp_path, caplog):
    path = tiny(tmp_path, extra_tensors={"novel.weight": np.ones(4, np.float32)})
    with caplog.at_level(logging.WARNING):
        open_checkpoint(path)
    assert "novel.weight has no meaning for llama" in caplog.text


def _patched_type(path, name, type_id):
    """Overwrite the type of one tensor in the directory."""
    data = bytearray(path.read_bytes())
    at = data.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name)
    dims = struct.unpack_from("<I", data, at)[0]
    struct.pack_into("<I", data, at + 4 + 8 * dims, type_id)
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("type_id", "words"), [(99, "type 99"), (int(Kind.IQ2_XXS), "IQ2_XXS"), (int(Kind.I32), "I32")]
)
def test_unknown_tensor_type_is_refused_by_name(tmp_path, type_id, words):
    path = tiny(tmp_path)
    _patched_type(path, "blk.1.attn_k.weight", type_id)
    assert f"blk.1.attn_k.weight is {words}" in refusal(path)


def test_blocks_that_do_not_fit_the_rows_are_refused(tmp_path):
    path = tiny(tmp_path)
    _patched_type(path, "blk.1.attn_k.weight", int(Kind.Q4_K))
    assert "rows of (48,) in blocks of 256" in refusal(path)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.3, 0.9, 0.999])
def test_truncated_files_are_refused_with_their_name(tmp_path, share):
    path = tiny(tmp_path)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    message = refusal(path)
    assert "tiny.gguf" in message
    assert "fetch it again" in message


def test_every_truncation_of_the_head_is_a_clear_error(tmp_path):
    path = tiny(tmp_path)
    data = path.read_bytes()[:3000]
    for cut in range(0, 3000, 7):
        path.write_bytes(data[:cut])
        refusal(path)


def test_damaged_counts_do_not_allocate(tmp_path):
    path = tiny(tmp_path)
    data = bytearray(path.read_bytes())
    struct.pack_into("<Q", data, 8, 2**62)
    path.write_bytes(data)
    assert "damaged or cut short" in refusal(path)
    struct.pack_into("<Q", data, 24, 2**60)  # the length of the first key
    path.write_bytes(data)
    assert "bytes are announced" in refusal(path)


def test_other_formats_and_versions(tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(64))
    assert "this is no GGUF file" in refusal(path)
    path.write_bytes(b"GGUF" + struct.pack("<I", 1) + bytes(64))
    assert "version 1 is not read" in refusal(path)
    path.write_bytes(b"GGUF" + struct.pack(">I", 3) + bytes(64))
    assert "big-endian" in refusal(path)
    assert "not found" in refusal(tmp_path / "absent.gguf")
    (tmp_path / "x.bin").write_bytes(b"")
    assert "neither a .gguf file nor a directory" in refusal(tmp_path / "x.bin")


def test_version_2_is_read(tmp_path):
    path = tiny(tmp_path)
    data = bytearray(path.read_bytes())
    struct.pack_into("<I", data, 4, 2)
    path.write_bytes(data)
    assert open_checkpoint(path).architecture.layers == 3


def _head_only(path, family, **strings):
    writer = gguf.GGUFWriter(path, family)
    for key, value in strings.items():
        writer.add_string(key.replace("__", "."), value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_wrong_kinds_of_file_say_what_they_are(tmp_path):
    assert "holds a vocabulary and no tensors" in refusal(_head_only(tmp_path / "v.gguf", "llama"))
    assert "LoRA adapter" in refusal(_head_only(tmp_path / "l.gguf", "llama", general__type="adapter"))
    assert "image projector" in refusal(_head_only(tmp_path / "p.gguf", "clip"))
    path = tmp_path / "b.gguf"
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_tensor("token_embd.weight", np.ones((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "'bert' is not supported; supported in GGUF: llama, qwen2, qwen3, gemma3" in refusal(
        path, UnsupportedArchitectureError
    )


def _split(tmp_path, **arguments):
    save_gguf(tmp_path / "tiny.gguf", "llama", split_tensors=20, **arguments)
    return sorted(tmp_path.glob("*.gguf"))


def test_a_missing_split_file_is_named(tmp_path):
    first, second = _split(tmp_path)
    second.unlink()
    for path in (first, tmp_path):
        assert f"{second.name} not found" in refusal(path)


def test_a_missing_first_split_file_is_named(tmp_path):
    first, second = _split(tmp_path)
    first.unlink()
    for path in (second, tmp_path):
        assert f"{first.name} not found" in refusal(path)


def test_a_split_file_of_another_model_is_named(tmp_path):
    first, second = _split(tmp_path)
    (tmp_path / "other").mkdir()
    save_gguf(tmp_path / "other" / "big.gguf", "llama", split_tensors=20, num_hidden_layers=6)
    other = sorted((tmp_path / "other").glob("*.gguf"))
    second.write_bytes(other[1].read_bytes())
    message = refusal(first)
    assert second.name in message
    second.write_bytes(first.read_bytes())
    assert f"{second.name}: says it is split 0" in refusal(first)


def test_a_directory_with_two_models_asks_which(tmp_path):
    tiny(tmp_path)
    save_gguf(tmp_path / "second.gguf", "llama")
    assert "exactly one GGUF model is needed and found: second.gguf, tiny.gguf" in refusal(tmp_path)
