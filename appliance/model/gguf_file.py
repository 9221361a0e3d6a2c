"""GGUF container: metadata, tensor directory and split sets, checked in full before any tensor is read.

Owns the file format (versions 2 and 3, little endian). Reads one file or a set of split files; knows no model family,
allocates nothing but the directory. The tensor bytes stay memory-mapped.

Source: the GGUF specification in the ggml project (MIT licence).
"""

import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

from appliance.model.checkpoint import CheckpointError

MetadataValue = int | float | bool | str | list["MetadataValue"]

SUPPORTED_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
"""Tensor types that ``Tensor.values`` decodes; IQ4_NL comes besides, as mixed files fall back to it."""
_DECODED = frozenset((*SUPPORTED_TYPES, "IQ4_NL"))

_MAGIC = b"GGUF"
_DEFAULT_ALIGNMENT = 32
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_SPLIT_NAME = re.compile(r"^(?P<stem>.+)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf$")


@dataclass(frozen=True, slots=True)
class Tensor:
    """An entry of the tensor directory; ``shape`` is in row-major order (outputs first), ``type_id`` as in the file."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    file: Path
    offset: int

    @property
    def type_name(self) -> str:
        """The tensor type's name, or its number where it is unknown."""
        try:
            return GGMLQuantizationType(self.type_id).name
        except ValueError:
            return f"type {self.type_id}"

    @property
    def num_bytes(self) -> int:
        """Bytes in the file; only for decodable types."""
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(self.type_id)]
        elements = 1
        for dim in self.shape:
            elements *= dim
        return elements // block * block_bytes

    def fault(self) -> str:
        """Why the tensor cannot be decoded, or an empty string."""
        if self.type_name not in _DECODED:
            return f"{self.name} is {self.type_name}"
        block = GGML_QUANT_SIZES[GGMLQuantizationType(self.type_id)][0]
        if not self.shape or self.shape[-1] % block:
            return f"{self.name} has rows of {self.shape[-1:]} in blocks of {block}"
        return ""


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A parsed file or set of split files: the first one's metadata and every tensor by name."""

    paths: tuple[Path, ...]
    metadata: Mapping[str, MetadataValue]
    tensors: Mapping[str, Tensor]

    def values(self, name: str) -> np.ndarray:
        """A tensor's values, float32, in its row-major shape, decoded by its own type."""
        tensor = self.tensors[name]
        raw = np.memmap(tensor.file, mode="r", dtype=np.uint8, offset=tensor.offset, shape=(tensor.num_bytes,))
        rows = raw.reshape(*tensor.shape[:-1], -1)
        values = quants.dequantize(rows, GGMLQuantizationType(tensor.type_id))
        return np.asarray(values, np.float32).reshape(tensor.shape)


def open_gguf(path: Path) -> GgufFile:
    """Parse a GGUF file, the whole set of a split file, or the only model of a directory.

    Args:
        path: a file (any member of a split set) or a directory.

    Raises:
        CheckpointError: no such file, not GGUF, an unread version, truncation, a missing or foreign split file.
    """
    paths = _split_set(_only_model(path) if path.is_dir() else path)
    parsed = [_parse(member) for member in paths]
    metadata = parsed[0][0]
    tensors: dict[str, Tensor] = {}
    for position, (member, (own, entries)) in enumerate(zip(paths, parsed, strict=True)):
        if len(paths) > 1:
            _check_split(member, own, position, len(paths))
        for tensor in entries:
            if tensor.name in tensors:
                raise CheckpointError(
                    f"{member.name}: tensor {tensor.name} is also in {tensors[tensor.name].file.name}; "
                    "the split files do not belong together"
                )
            tensors[tensor.name] = tensor
    announced = metadata.get("split.tensors.count")
    if len(paths) > 1 and isinstance(announced, int) and announced != len(tensors):
        raise CheckpointError(
            f"{paths[0].name}: the set announces {announced} tensors and holds {len(tensors)}; "
            "a split file belongs to another model, fetch the set again"
        )
    return GgufFile(tuple(paths), metadata, tensors)


def _only_model(directory: Path) -> Path:
    files = sorted(directory.glob("*.gguf"))
    firsts = [f for f in files if (m := _SPLIT_NAME.match(f.name)) is None or int(m["no"]) == 1]
    if len(firsts) == 1:
        return firsts[0]
    if not firsts and files:
        return files[0]
    names = ", ".join(f.name for f in firsts) or "none"
    raise CheckpointError(f"{directory}: exactly one GGUF model is needed and found: {names}; name the file itself")


def _split_set(path: Path) -> list[Path]:
    match = _SPLIT_NAME.match(path.name)
    if match is None:
        members = [path]
    else:
        count = int(match["count"])
        members = [path.with_name(f"{match['stem']}-{no:05d}-of-{count:05d}.gguf") for no in range(1, count + 1)]
    absent = [member.name for member in members if not member.is_file()]
    if absent or not members:
        raise CheckpointError(f"{path.parent}: {', '.join(absent) or path.name} not found; every split file is needed")
    return members


def _check_split(member: Path, metadata: Mapping[str, MetadataValue], position: int, count: int) -> None:
    own_no, own_count = metadata.get("split.no"), metadata.get("split.count")
    if own_no != position or own_count != count:
        raise CheckpointError(
            f"{member.name}: says it is split {own_no} of {own_count}, its name says {position} of {count} "
            "(counted from 0); the file was renamed or belongs to another model"
        )


class _Reader:
    """A bounds-checked cursor over one mapped file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self._data, self.at = path, data, 0

    def fail(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path.name}: {what}; the file is damaged or cut short, fetch it again")

    def take(self, num_bytes: int) -> bytes:
        end = self.at + num_bytes
        if end > len(self._data):
            raise self.fail(f"{num_bytes} bytes are announced at {self.at}, the file ends at {len(self._data)}")
        chunk = self._data[self.at : end]
        self.at = end
        return chunk

    def number(self, code: str) -> int | float | bool:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def count(self, code: str = "Q") -> int:
        return int(self.number(code))

    def string(self) -> str:
        try:
            return self.take(self.count()).decode()
        except UnicodeDecodeError as error:
            raise self.fail(f"a string near {self.at} is no UTF-8") from error

    def value(self, kind: int) -> MetadataValue:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise self.fail(f"metadata value kind {kind} near {self.at} is unknown")
        item, count = self.count("I"), self.count()
        if item in _SCALARS:
            code = _SCALARS[item]
            return list(struct.unpack(f"<{count}{code}", self.take(self._bounded(count, struct.calcsize("<" + code)))))
        if item == _STRING:
            self._bounded(count, 8)
            return [self.string() for _ in range(count)]
        raise self.fail(f"an array of kind {item} near {self.at} is not part of the format")

    def _bounded(self, count: int, item_bytes: int) -> int:
        if count * item_bytes > len(self._data) - self.at:
            raise self.fail(f"an array of {count} values is announced at {self.at}, past the end of the file")
        return count * item_bytes


def _parse(path: Path) -> tuple[dict[str, MetadataValue], list[Tensor]]:
    if path.stat().st_size < 24:
        raise CheckpointError(f"{path.name}: {path.stat().st_size} bytes; a GGUF file has at least 24, fetch it again")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        reader = _Reader(path, data)
        _check_head(reader)
        num_tensors, num_values = reader.count(), reader.count()
        metadata: dict[str, MetadataValue] = {}
        for _ in range(num_values):
            key = reader.string()
            if key in metadata:
                raise reader.fail(f"metadata key {key} stands twice")
            metadata[key] = reader.value(reader.count("I"))
        entries = [_directory_entry(reader) for _ in range(num_tensors)]
        start = _aligned(reader, metadata.get("general.alignment", _DEFAULT_ALIGNMENT))
        tensors = [Tensor(name, shape, kind, path, start + offset) for name, shape, kind, offset in entries]
        for tensor in tensors:
            if not tensor.fault() and tensor.offset + tensor.num_bytes > len(data):
                raise reader.fail(
                    f"tensor {tensor.name} ends at byte {tensor.offset + tensor.num_bytes}, the file at {len(data)}"
                )
    return metadata, tensors


def _check_head(reader: _Reader) -> None:
    magic = reader.take(4)
    if magic != _MAGIC:
        raise CheckpointError(f"{reader.path.name}: starts with {magic!r}, not with {_MAGIC!r}; this is no GGUF file")
    version = reader.count("I")
    if version in (2, 3):
        return
    if int.from_bytes(version.to_bytes(4, "little"), "big") in (2, 3):
        raise CheckpointError(f"{reader.path.name}: big-endian GGUF is not read; convert it to little endian")
    raise CheckpointError(f"{reader.path.name}: GGUF version {version} is not read; versions 2 and 3 are")


def _directory_entry(reader: _Reader) -> tuple[str, tuple[int, ...], int, int]:
    name = reader.string()
    num_dims = reader.count("I")
    if not 1 <= num_dims <= 4:
        raise reader.fail(f"tensor {name} has {num_dims} dimensions, 1 to 4 are possible")
    dims = tuple(reader.count() for _ in range(num_dims))
    return name, dims[::-1], reader.count("I"), reader.count()


def _aligned(reader: _Reader, alignment: MetadataValue) -> int:
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise reader.fail(f"general.alignment is {alignment!r}, it must be a power of two")
    return -(-reader.at // alignment) * alignment
