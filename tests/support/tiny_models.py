"""Tiny random checkpoints of every architecture, as Hugging Face directories and GGUF files; equal calls, equal files.

``save_hf`` writes a directory (weights, configuration, tokenizer) with ``transformers``; ``save_gguf`` writes the same
weights in the layout of GGUF files. The tokenizer is a byte-level BPE of 384 ids that is trained here.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCAB = 384
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = (
    "The appliance serves open models. It keeps pages of keys and values, and it counts every token.",
    "def step(batch):\n    return [row + 1 for row in batch if row]\n",
    "Wer früh plant, rechnet später weniger. 漢字とかな。 👍🏽 1234567890",
    "    indented   text\twith\ttabs\n\n\nand empty lines",
)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"rms_norm_eps": 1e-5},
    "mistral": {"sliding_window": 24, "head_dim": 16},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 16},
    "gemma3": {
        "head_dim": 16,
        "num_hidden_layers": 6,
        "num_key_value_heads": 1,
        "num_attention_heads": 4,
        "sliding_window": 24,
        "query_pre_attn_scalar": 16,
        "tie_word_embeddings": True,
    },
}
FAMILIES = tuple(CONFIGS)
_CLASSES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "gemma3": (transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM),
}


def tiny_model(family: str, seed: int = 0, **overrides: Any) -> transformers.PreTrainedModel:
    """A random float32 model in evaluation mode; norm weights and biases are random too, so that each one counts."""
    config_class, model_class = _CLASSES[family]
    config = config_class(**{**_COMMON, **CONFIGS[family], **overrides})
    config._attn_implementation = "eager"
    generator = torch.Generator().manual_seed(seed)
    model = model_class(config).to(torch.float32).eval()
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            noise = torch.randn(weight.shape, generator=generator)
            centre = 0.0 if weight.ndim > 1 or name.endswith("bias") or family == "gemma3" else 1.0
            weight.copy_(centre + noise * (0.2 if weight.ndim == 1 else weight.shape[-1] ** -0.5))
    return model


def tiny_tokenizer() -> Tokenizer:
    """A byte-level BPE with three control tokens in front."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in SPECIALS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    return tokenizer


def save_hf(
    directory: Path, family: str, seed: int = 0, shard_size: str = "1GB", **overrides: Any
) -> transformers.PreTrainedModel:
    """Write a Hugging Face directory; ``shard_size`` of some KB gives several files and an index."""
    model = tiny_model(family, seed, **overrides)
    model.save_pretrained(directory, max_shard_size=shard_size)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tiny_tokenizer(), bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(directory)
    return model


def save_gguf(
    path: Path,
    family: str,
    seed: int = 0,
    *,
    types: Mapping[str, gguf.GGMLQuantizationType] | None = None,
    drop_keys: tuple[str, ...] = (),
    extra_tensors: Mapping[str, np.ndarray] | None = None,
    drop_tensors: tuple[str, ...] = (),
    split_tensors: int = 0,
    **overrides: Any,
) -> transformers.PreTrainedModel:
    """Write the same model as a GGUF file.

    ``types`` gives the tensor type by name ending (default F32); ``split_tensors`` > 0 splits the file;
    ``drop_keys`` leaves metadata out, by the part after the family's name.
    """
    model = tiny_model(family, seed, **overrides)
    writer = gguf.GGUFWriter(path, _gguf_family(family), split_max_tensors=split_tensors)
    _write_metadata(writer, model.config, family, drop_keys)
    tensors = {**gguf_tensors(model, family), **(extra_tensors or {})}
    for name, values in tensors.items():
        if name in drop_tensors:
            continue
        kind = next((t for ending, t in (types or {}).items() if name.endswith(ending)), gguf.GGMLQuantizationType.F32)
        if kind is gguf.GGMLQuantizationType.F32:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def gguf_tensors(model: transformers.PreTrainedModel, family: str) -> dict[str, np.ndarray]:
    """The model's weights under their GGUF names and in GGUF layout."""
    endings = {
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "post_attention_layernorm": "post_attention_norm" if family == "gemma3" else "ffn_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    whole = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    config = model.config
    tensors: dict[str, np.ndarray] = {}
    for name, weight in model.state_dict().items():
        values = weight.numpy().astype(np.float32)
        if name == "lm_head.weight":
            if config.tie_word_embeddings:
                continue
            tensors["output.weight"] = values
            continue
        if family == "gemma3" and "norm" in name:
            values = values + 1
        if name in whole:
            tensors[whole[name]] = values
            continue
        _, _, layer, rest = name.split(".", 3)
        stem, _, kind = rest.rpartition(".")
        if family in ("llama", "mistral") and stem.endswith(("q_proj", "k_proj")):
            heads = config.num_attention_heads if "q_proj" in stem else config.num_key_value_heads
            values = values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        tensors[f"blk.{layer}.{endings[stem]}.{kind}"] = values
    return tensors


def _gguf_family(family: str) -> str:
    return "llama" if family == "mistral" else family


def _write_metadata(writer: gguf.GGUFWriter, config: Any, family: str, drop_keys: tuple[str, ...]) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters or {}
    theta = (rope.get("full_attention") or rope).get("rope_theta", 10_000.0)
    values: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.dimension_count": head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(theta),
    }
    if family in ("mistral", "gemma3"):
        values["attention.sliding_window"] = config.sliding_window
    for key, value in values.items():
        if key in drop_keys:
            continue
        full = f"{_gguf_family(family)}.{key}"
        writer.add_float32(full, value) if isinstance(value, float) else writer.add_uint32(full, value)
    write_tokenizer(writer)


def write_tokenizer(writer: gguf.GGUFWriter) -> None:
    """The tiny tokenizer as GGUF metadata."""
    tokenizer = tiny_tokenizer()
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    tokens = [text for text, _ in vocabulary]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if text in SPECIALS else 1 for text in tokens])
    writer.add_token_merges(merges_of(tokenizer))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_bool("tokenizer.ggml.add_bos_token", val=False)
    writer.add_chat_template(CHAT_TEMPLATE)


def merges_of(tokenizer: Tokenizer) -> list[str]:
    """The merges of a BPE tokenizer, each as ``left right``."""
    import json

    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
