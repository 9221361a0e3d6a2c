"""Hugging Face directories: ``config.json`` and safetensors files, checked in full before any weight is read.

Owns the tensor names of that format and the rules about what is read: the index decides where there is one, a tensor
stored once for two names is found through the file's note, and a head is tied to the embedding only if it is absent
from the whole set or is the same values. Tensors are read one at a time from memory-mapped files.

Source: the tensor names of the transformers project (Apache-2.0).
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  # pyright: ignore[reportUnusedImport] - gives numpy its bfloat16 type
import numpy as np
from safetensors import SafetensorError, safe_open

from appliance.model.checkpoint import CheckpointError, Progress, no_progress
from appliance.model.hf_text import read_text_assets
from appliance.model.layout import Role, roles, stacked
from appliance.model.tokenizer import TextAssets
from planner.architecture import ModelArchitecture, UnsupportedArchitectureError, from_hf_config

SUPPORTED_DTYPES = ("F32", "F16", "BF16")

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_NAMES = {
    "embed": "embed_tokens.weight",
    "final_norm": "norm.weight",
    "attn_norm": "layers.{}.input_layernorm.weight",
    "q": "layers.{}.self_attn.q_proj.weight",
    "k": "layers.{}.self_attn.k_proj.weight",
    "v": "layers.{}.self_attn.v_proj.weight",
    "q_bias": "layers.{}.self_attn.q_proj.bias",
    "k_bias": "layers.{}.self_attn.k_proj.bias",
    "v_bias": "layers.{}.self_attn.v_proj.bias",
    "q_norm": "layers.{}.self_attn.q_norm.weight",
    "k_norm": "layers.{}.self_attn.k_norm.weight",
    "o": "layers.{}.self_attn.o_proj.weight",
    "ffw_norm": "layers.{}.post_attention_layernorm.weight",
    "gate": "layers.{}.mlp.gate_proj.weight",
    "up": "layers.{}.mlp.up_proj.weight",
    "down": "layers.{}.mlp.down_proj.weight",
}
_GEMMA_NAMES = {
    **_NAMES,
    "post_attn_norm": "layers.{}.post_attention_layernorm.weight",
    "ffw_norm": "layers.{}.pre_feedforward_layernorm.weight",
    "post_ffw_norm": "layers.{}.post_feedforward_layernorm.weight",
}
_COMPARED_ROWS = 4096
_PREFIXES = ("model.", "language_model.model.", "model.language_model.", "")
_HEADS = ("lm_head.weight", "language_model.lm_head.weight")


@dataclass(frozen=True, slots=True)
class _Entry:
    """Where a tensor lies and what it is, by the file's own header."""

    file: Path
    stored_name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SafetensorsCheckpoint:
    """A checked directory, ready to be read."""

    directory: Path
    architecture: ModelArchitecture
    entries: Mapping[str, _Entry]
    names: Mapping[str, str]

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that hold the weights."""
        return tuple(sorted({entry.file for entry in self.entries.values()}))

    def narrowed(self, vocab: int) -> "SafetensorsCheckpoint":
        """The same model without the padding rows of its embedding and head."""
        return replace(self, architecture=replace(self.architecture, vocab=vocab))

    def text_assets(self) -> TextAssets:
        """Tokenizer and chat templates of the directory.

        Raises:
            TokenizerError: there is no tokenizer.json, or it cannot be used.
        """
        return read_text_assets(self.directory)

    def weights(self, progress: Progress = no_progress) -> Iterator[tuple[str, np.ndarray]]:
        """The float32 weight tree, one stacked array at a time."""
        gemma = self.architecture.family == "gemma3"
        with ExitStack() as stack:
            opened = {path: stack.enter_context(safe_open(path, "numpy")) for path in self.files}

            def read(role: str, layer: int) -> np.ndarray:
                entry = self.entries[self.names[role].format(layer)]
                values = np.asarray(opened[entry.file].get_tensor(entry.stored_name)).astype(np.float32)
                return values + np.float32(1.0) if gemma and role.endswith("norm") else values

            yield from stacked(self.architecture, read, progress)


def open_safetensors_checkpoint(directory: Path) -> SafetensorsCheckpoint:
    """Open and check a Hugging Face directory.

    Args:
        directory: holds config.json and model.safetensors, or an index with its shards, or a complete set of shards.

    Raises:
        CheckpointError: a file is missing or damaged, or the tensors do not fit; one error names them all.
        UnsupportedArchitectureError: the model computes something that is not supported.
    """
    config = read_json(directory / "config.json")
    if config.get("quantization_config"):
        method = dict(config["quantization_config"]).get("quant_method", "unknown")
        raise UnsupportedArchitectureError(
            f"{directory.name}: weights quantised by {method!r} are not supported; use the model's full-precision files"
        )
    architecture = from_hf_config(config)
    entries = _entries(directory)
    prefix = next((p for p in _PREFIXES if p + _NAMES["embed"] in entries), _PREFIXES[0])
    table = _GEMMA_NAMES if architecture.family == "gemma3" else _NAMES
    names = {role: prefix + name for role, name in table.items()}
    head = next((name for name in _HEADS if name in entries), None)
    names["head"] = head or _HEADS[0]
    architecture = replace(architecture, tied_embeddings=_tied(directory, config, entries, names, head))
    _check(directory, architecture, entries, names)
    return SafetensorsCheckpoint(directory, architecture, entries, names)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        CheckpointError: the file is missing or no JSON object.
    """
    try:
        document = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: not found; a Hugging Face model directory needs it") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: no valid JSON ({error}); fetch the file again") from error
    if not isinstance(document, dict):
        raise CheckpointError(
            f"{path}: holds a {type(document).__name__}, a JSON object is needed; fetch the file again"
        )
    return document


def _entries(directory: Path) -> dict[str, _Entry]:
    """Every tensor of the checkpoint by the name it is asked for, from the index where there is one."""
    if (directory / _INDEX).is_file():
        return _indexed_entries(directory)
    found: dict[str, _Entry] = {}
    for file in _unindexed_files(directory):
        for name, entry in _header(file).items():
            if name in found:
                raise CheckpointError(f"{file}: tensor {name} is also in {found[name].file.name}; the set is mixed")
            found[name] = entry
    return found


def _indexed_entries(directory: Path) -> dict[str, _Entry]:
    weight_map = read_json(directory / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{directory / _INDEX}: has no weight_map; fetch the file again")
    shards = {str(name) for name in weight_map.values()}
    absent = sorted(name for name in shards if Path(name).name != name or not (directory / name).is_file())
    if absent:
        raise CheckpointError(f"{directory}: {_INDEX} names {', '.join(absent)}, not found; fetch the missing files")
    headers = {name: _header(directory / name) for name in sorted(shards)}
    lost = sorted(f"{tensor} in {shard}" for tensor, shard in weight_map.items() if tensor not in headers[shard])
    if lost:
        raise CheckpointError(f"{directory}: {_INDEX} promises {_some(lost)}, which are not there; fetch the set again")
    found = {tensor: headers[shard][tensor] for tensor, shard in weight_map.items()}
    for shard, header in headers.items():
        twins = {name: entry for name, entry in header.items() if weight_map.get(entry.stored_name) == shard}
        found = twins | found
    return found


def _unindexed_files(directory: Path) -> list[Path]:
    single = directory / _SINGLE
    if single.is_file():
        return [single]
    shards = sorted(directory.glob("model-?????-of-?????.safetensors"))
    counts = {shard.stem.rpartition("-of-")[2] for shard in shards}
    if not shards or len(counts) != 1 or len(shards) != int(counts.pop()):
        found = ", ".join(shard.name for shard in shards) or "no shard"
        raise CheckpointError(
            f"{directory}: neither {_SINGLE} nor {_INDEX} nor a complete set ({found}); fetch the model again"
        )
    return shards


def _header(file: Path) -> dict[str, _Entry]:
    """The tensors of one file; a note in its metadata adds the names of tensors that were stored once for two."""
    try:
        with safe_open(file, "numpy") as opened:
            found: dict[str, _Entry] = {}
            for name in opened.keys():  # noqa: SIM118 - not a dict
                part = opened.get_slice(name)
                found[name] = _Entry(file, name, part.get_dtype(), tuple(part.get_shape()))
            for twin, kept in (opened.metadata() or {}).items():
                if kept in found and twin not in found:
                    found[twin] = found[kept]
            return found
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: {error}; the file is damaged or cut short, fetch it again") from error


def _tied(
    directory: Path,
    config: Mapping[str, Any],
    entries: Mapping[str, _Entry],
    names: Mapping[str, str],
    head: str | None,
) -> bool:
    """Whether the head is the embedding table: absent, stored as the same tensor, or equal in value."""
    if head is None:
        if config.get("tie_word_embeddings", config.get("model_type", "").startswith("gemma")):
            return True
        raise CheckpointError(
            f"{directory}: {_HEADS[0]} is missing and config.json does not tie the embeddings; fetch the model again"
        )
    ours, embed = entries[head], entries.get(names["embed"])
    if embed is None or (ours.dtype, ours.shape) != (embed.dtype, embed.shape):
        return False
    if (ours.file, ours.stored_name) == (embed.file, embed.stored_name):
        return True
    if ours.dtype not in SUPPORTED_DTYPES:
        return False
    with safe_open(ours.file, "numpy") as a, safe_open(embed.file, "numpy") as b:
        left, right = a.get_slice(ours.stored_name), b.get_slice(embed.stored_name)
        rows = ours.shape[0]
        cuts = (slice(row, min(row + _COMPARED_ROWS, rows)) for row in range(0, rows, _COMPARED_ROWS))
        return all(np.array_equal(left[cut], right[cut]) for cut in cuts)


def _check(
    directory: Path, architecture: ModelArchitecture, entries: Mapping[str, _Entry], names: Mapping[str, str]
) -> None:
    """One error that names every absent, misshapen or unreadable tensor."""
    wanted = {
        names[role.name].format(layer): role
        for role in roles(architecture)
        for layer in range(architecture.layers if role.per_layer else 1)
    }
    faults = [_fault(entries, name, role) for name, role in wanted.items()]
    prefix = names["embed"].removesuffix(_NAMES["embed"])
    faults += [
        f"{name} is not supported for {architecture.family}"
        for name in sorted(entries.keys() - wanted.keys())
        if name.startswith(prefix) and name.endswith((".bias", "_scale", "_scale_inv", ".qweight"))
    ]
    faults = list(filter(None, faults))
    if faults:
        raise CheckpointError(
            f"{directory}: {_some(faults)}. Readable types: {', '.join(SUPPORTED_DTYPES)}. "
            "Fetch the model again or use its full-precision files"
        )


def _fault(entries: Mapping[str, _Entry], name: str, role: Role) -> str:
    entry = entries.get(name)
    if entry is None:
        return f"{name} is missing"
    if entry.dtype not in SUPPORTED_DTYPES:
        return f"{name} is {entry.dtype}"
    if entry.shape != role.shape:
        return f"{name} has shape {list(entry.shape)}, config.json asks for {list(role.shape)}"
    return ""


def _some(items: list[str]) -> str:
    return "; ".join(items[:8]) + (f" and {len(items) - 8} more" if len(items) > 8 else "")
