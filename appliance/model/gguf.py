"""GGUF models: metadata to ModelArchitecture, tensor names to roles, and everything checked before it is read.

Owns what each model family calls its parts in GGUF files and how its layout differs from the weight tree: llama files
hold query and key rows in interleaved rotary order, gemma files already hold norm weights plus one. The llama3 rotary
stretch lies in the tensor ``rope_freqs.weight`` and becomes ``RopeScaling.factors``.

Source: the tensor and key names of the llama.cpp project (MIT licence).
"""

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from appliance.model.checkpoint import CheckpointError, Progress, no_progress
from appliance.model.gguf_file import SUPPORTED_TYPES, GgufFile, MetadataValue, open_gguf
from appliance.model.gguf_tokenizer import rebuild_text_assets
from appliance.model.layout import Role, roles, stacked
from appliance.model.tokenizer import TextAssets
from planner.architecture import Activation, ModelArchitecture, RopeKind, RopeScaling, UnsupportedArchitectureError

_log = logging.getLogger(__name__)

_FAMILIES = ("llama", "qwen2", "qwen3", "gemma3")
"""Values of general.architecture that are read; mistral models call themselves llama."""

_NAMES = {
    "embed": "token_embd.weight",
    "head": "output.weight",
    "final_norm": "output_norm.weight",
    "attn_norm": "blk.{}.attn_norm.weight",
    "q": "blk.{}.attn_q.weight",
    "k": "blk.{}.attn_k.weight",
    "v": "blk.{}.attn_v.weight",
    "q_bias": "blk.{}.attn_q.bias",
    "k_bias": "blk.{}.attn_k.bias",
    "v_bias": "blk.{}.attn_v.bias",
    "q_norm": "blk.{}.attn_q_norm.weight",
    "k_norm": "blk.{}.attn_k_norm.weight",
    "o": "blk.{}.attn_output.weight",
    "ffw_norm": "blk.{}.ffn_norm.weight",
    "gate": "blk.{}.ffn_gate.weight",
    "up": "blk.{}.ffn_up.weight",
    "down": "blk.{}.ffn_down.weight",
    "post_attn_norm": "blk.{}.post_attention_norm.weight",
    "post_ffw_norm": "blk.{}.post_ffw_norm.weight",
}
_ROPE_FACTORS = "rope_freqs.weight"
_INERT = (_ROPE_FACTORS, "attn_rot_embd", "rope.freqs")
_GEMMA3_27B_LAYERS = 62
"""The one gemma3 size whose queries are scaled by embed / q_heads instead of head_dim; its files do not say so."""


@dataclass(frozen=True, slots=True)
class GgufCheckpoint:
    """A checked GGUF model, ready to be read."""

    file: GgufFile
    architecture: ModelArchitecture

    @property
    def files(self) -> tuple[Path, ...]:
        """The file, or all files of a split set."""
        return self.file.paths

    def narrowed(self, vocab: int) -> "GgufCheckpoint":
        """The same model without the padding rows of its embedding and head."""
        return replace(self, architecture=replace(self.architecture, vocab=vocab))

    def text_assets(self) -> TextAssets:
        """Tokenizer and chat templates, rebuilt from the metadata.

        Raises:
            TokenizerError: the tokenizer kind cannot be rebuilt exactly.
        """
        return rebuild_text_assets(self.file.metadata)

    def weights(self, progress: Progress = no_progress) -> Iterator[tuple[str, np.ndarray]]:
        """The float32 weight tree, one stacked array at a time."""
        yield from stacked(self.architecture, self._read, progress)

    def _read(self, role: str, layer: int) -> np.ndarray:
        values = self.file.values(_NAMES[role].format(layer))
        if self.architecture.family in ("llama", "mistral") and role in ("q", "k"):
            heads = self.architecture.q_heads if role == "q" else self.architecture.kv_heads
            return _half_split(values, heads)
        return values


def open_gguf_checkpoint(path: Path) -> GgufCheckpoint:
    """Open and check a GGUF model.

    Args:
        path: a file, any member of a split set, or a directory with one model.

    Raises:
        CheckpointError: the file is damaged, is no language model, or its tensors do not fit; one error names them all.
        UnsupportedArchitectureError: the model computes something that is not supported.
    """
    file = open_gguf(path)
    family = _family(file, path)
    architecture = _architecture(file, _Keys(file.metadata, family), family)
    _check_tensors(file, architecture, path)
    if _ROPE_FACTORS in file.tensors:
        factors = tuple(file.values(_ROPE_FACTORS).ravel().tolist())
        architecture = replace(architecture, rope_scaling=replace(architecture.rope_scaling, factors=factors))
    return GgufCheckpoint(file, architecture)


def _family(file: GgufFile, path: Path) -> str:
    name = str(file.metadata.get("general.architecture", ""))
    kind = str(file.metadata.get("general.type", "model"))
    if kind == "adapter":
        raise CheckpointError(f"{path.name}: this is a LoRA adapter, not a model; name the file of the model itself")
    if kind == "mmproj" or name == "clip":
        raise CheckpointError(f"{path.name}: this is an image projector, not a language model; name the model's file")
    if not file.tensors:
        raise CheckpointError(f"{path.name}: holds a vocabulary and no tensors; name the file of the whole model")
    if name not in _FAMILIES:
        raise UnsupportedArchitectureError(
            f"{path.name}: architecture {name!r} is not supported; supported in GGUF: {', '.join(_FAMILIES)}"
        )
    return name


@dataclass(frozen=True, slots=True)
class _Keys:
    """Metadata of one family, read by kind whatever number type the converter chose."""

    metadata: Mapping[str, MetadataValue]
    family: str

    def number(self, key: str, default: float | None = None) -> float:
        value = self.metadata.get(f"{self.family}.{key}", default)
        if isinstance(value, list):
            distinct = sorted({v for v in value if isinstance(v, int | float)})
            if len(distinct) != 1:
                raise UnsupportedArchitectureError(f"{self.family}.{key} differs by layer ({distinct}); not supported")
            value = distinct[0]
        if value is None:
            raise UnsupportedArchitectureError(
                f"{self.family}.{key} is missing in the metadata; convert the model again"
            )
        if isinstance(value, str | bool):
            raise UnsupportedArchitectureError(f"{self.family}.{key} is {value!r}; a number is needed")
        return float(value)

    def whole(self, key: str, default: int | None = None) -> int:
        value = self.number(key, default)
        if value != int(value):
            raise UnsupportedArchitectureError(f"{self.family}.{key} is {value}; a whole number is needed")
        return int(value)

    def text(self, key: str) -> str:
        return str(self.metadata.get(f"{self.family}.{key}", ""))


def _architecture(file: GgufFile, keys: _Keys, family: str) -> ModelArchitecture:
    gemma = family == "gemma3"
    layers, embed = keys.whole("block_count"), keys.whole("embedding_length")
    q_heads = keys.whole("attention.head_count")
    head_dim = _head_dim(keys, embed, q_heads)
    width = keys.whole("attention.sliding_window", 0)
    pattern = keys.whole("attention.sliding_window_pattern", 6) if gemma else 0
    windows = tuple(0 if gemma and (layer + 1) % pattern == 0 else width for layer in range(layers))
    context = keys.whole("context_length")
    wide_scale = gemma and layers == _GEMMA3_27B_LAYERS
    if keys.whole("expert_count", 0):
        raise UnsupportedArchitectureError(f"{family} with {keys.whole('expert_count')} experts is not supported")
    return ModelArchitecture(
        family="mistral" if family == "llama" and width else family,
        layers=layers,
        embed=embed,
        ffw=keys.whole("feed_forward_length"),
        q_heads=q_heads,
        kv_heads=keys.whole("attention.head_count_kv", q_heads),
        head_dim=head_dim,
        vocab=_vocab(file),
        context=context,
        norm_eps=_short(keys.number("attention.layer_norm_rms_epsilon")),
        rope_theta=_short(keys.number("rope.freq_base", 10_000.0)),
        rope_scaling=_rope_scaling(keys, context),
        rope_local_theta=_short(keys.number("rope.freq_base_swa", 10_000.0)) if gemma else 0.0,
        local_rope=tuple(w > 0 for w in windows) if gemma else (),
        query_scale=1.0 / math.sqrt(embed / q_heads if wide_scale else head_dim),
        activation=Activation.GELU_TANH if gemma else Activation.SILU,
        windows=windows,
        tied_embeddings=_NAMES["head"] not in file.tensors,
        qkv_bias=family == "qwen2",
        qk_norm=family in ("qwen3", "gemma3"),
        post_norms=gemma,
        embed_scale=math.sqrt(embed) if gemma else 1.0,
        attn_softcap=_short(keys.number("attn_logit_softcapping", 0.0)),
        logit_softcap=_short(keys.number("final_logit_softcapping", 0.0)),
    )


def _short(value: float) -> float:
    """The shortest decimal that is the same float32, so that 1e-5 written as float32 reads back as 1e-5."""
    return float(str(np.float32(value)))


def _vocab(file: GgufFile) -> int:
    embed = file.tensors.get(_NAMES["embed"])
    if embed is None:
        raise CheckpointError(
            f"{file.paths[0].name}: tensor {_NAMES['embed']} is missing; fetch or convert the file again"
        )
    return embed.shape[0]


def _head_dim(keys: _Keys, embed: int, q_heads: int) -> int:
    if q_heads <= 0 or (keys.text("attention.key_length") == "" and embed % q_heads):
        raise UnsupportedArchitectureError(
            f"embedding_length {embed} is no multiple of attention.head_count {q_heads} and key_length is not given"
        )
    head_dim = keys.whole("attention.key_length", embed // q_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        other = keys.whole(key, head_dim)
        if other != head_dim:
            raise UnsupportedArchitectureError(
                f"{keys.family}.{key} is {other}, the head dimension {head_dim}; both must agree"
            )
    return head_dim


def _rope_scaling(keys: _Keys, context: int) -> RopeScaling:
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 0.0))
    kind = keys.text("rope.scaling.type") or ("linear" if factor else "none")
    if kind == "none" or factor in (0.0, 1.0):
        return RopeScaling()
    if kind == "linear":
        return RopeScaling(RopeKind.LINEAR, factor=factor)
    if kind == "yarn":
        grow = 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0
        return RopeScaling(
            RopeKind.YARN,
            factor=factor,
            original_context=keys.whole("rope.scaling.original_context_length", context),
            beta_fast=keys.number("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1.0),
            attention_factor=keys.number("rope.scaling.attn_factor", 1.0) * grow,
        )
    raise UnsupportedArchitectureError(f"rope scaling {kind!r} is not supported; supported: none, linear, yarn")


def _check_tensors(file: GgufFile, architecture: ModelArchitecture, path: Path) -> None:
    """One error that names every absent, misshapen, undecodable or meaningful but unsupported tensor."""
    expected: dict[str, Role] = {}
    for role in roles(architecture):
        for layer in range(architecture.layers if role.per_layer else 1):
            expected[_NAMES[role.name].format(layer)] = role
    faults = [_fault(file, name, role) for name, role in expected.items()]
    faults += [_extra_fault(file, name, architecture.family) for name in file.tensors.keys() - expected.keys()]
    faults = sorted(filter(None, faults))
    if faults:
        more = f" and {len(faults) - 8} more" if len(faults) > 8 else ""
        raise CheckpointError(
            f"{path.name}: {'; '.join(faults[:8])}{more}. Decoded tensor types: {', '.join(SUPPORTED_TYPES)}. "
            "Fetch the file again or convert the model to one of these types"
        )


def _fault(file: GgufFile, name: str, role: Role) -> str:
    tensor = file.tensors.get(name)
    if tensor is None:
        return f"{name} is missing"
    if tensor.shape != role.shape:
        return f"{name} has shape {list(tensor.shape)}, {list(role.shape)} is needed"
    return tensor.fault()


def _extra_fault(file: GgufFile, name: str, family: str) -> str:
    """Why a tensor outside the model's roles cannot be left out, or an empty string."""
    if name == _ROPE_FACTORS:
        return file.tensors[name].fault()
    if name.endswith(".bias") or "exps" in name or name.startswith("rope_factors"):
        return f"{name} is not supported for {family}"
    if not any(part in name for part in _INERT):
        _log.warning("%s: tensor %s has no meaning for %s and is left out", file.paths[0].name, name, family)
    return ""


def _half_split(rows: np.ndarray, heads: int) -> np.ndarray:
    """Undo the interleaving of rotary pairs in query and key rows [heads * head_dim, in]."""
    out, width = rows.shape
    return rows.reshape(heads, out // heads // 2, 2, width).swapaxes(1, 2).reshape(out, width)
