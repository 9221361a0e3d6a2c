"""Model record: what the store knows of a model beside its weights, readable without any array library.

Owns the layout of a model's folder and of ``model.json``. Workers read tokenizer and templates from here; the engine
reads the architecture.

    <home>/models/<name>/model.json        this record
                         tokenizer.json    the tokenizer document
                         source/           the fetched model files
                         weights-<form>/   one orbax checkpoint a weight form
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from appliance.model.tokenizer import TextAssets
from planner.architecture import ModelArchitecture
from planner.formats import WeightForm

SCHEMA = 1
RECORD, _TOKENIZER = "model.json", "tokenizer.json"


class ModelRecordError(ValueError):
    """A model folder cannot be read; the message names the file, what is wrong and the remedy."""


class SourceFile(Struct, frozen=True, forbid_unknown_fields=True):
    """One file that a model came from, relative to the source's folder."""

    path: str
    num_bytes: int
    modified_ns: int
    sha256: str


class ModelRecord(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model of the store.

    ``source_path`` is the GGUF file or model directory, relative to the model's folder where it was fetched, and empty
    where the model came without it, as converted weights; ``created`` is in Unix seconds.
    """

    schema: int = SCHEMA
    name: str
    reference: str
    architecture: dict[str, Any]
    context: int
    created: int
    licence: str = ""
    source_path: str
    source_files: tuple[SourceFile, ...]
    add_bos: bool = False
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    special_texts: dict[str, str] = {}
    chat_templates: dict[str, str] = {}

    def read_architecture(self) -> ModelArchitecture:
        """The model's architecture.

        Raises:
            UnsupportedArchitectureError: it was stored by another version.
        """
        return ModelArchitecture.from_json(self.architecture)

    def is_current(self, folder: Path) -> bool:
        """Whether every source file is there with the size and time of change it had when the model came in.

        True where it came without them.
        """
        if not self.source_path:
            return True
        source = folder / self.source_path
        base = source if source.is_dir() else source.parent
        for file in self.source_files:
            path = base / file.path
            if not path.is_file():
                return False
            found = path.stat()
            if (found.st_size, found.st_mtime_ns) != (file.num_bytes, file.modified_ns):
                return False
        return True

    def encode(self) -> bytes:
        """The record as it lies in ``model.json``."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"


def digests(record: ModelRecord) -> dict[str, str]:
    """SHA-256 of every source file by its name."""
    return {file.path: file.sha256 for file in record.source_files}


def weights_folder(folder: Path, form: WeightForm) -> Path:
    """Where a model's weights of one form lie."""
    return folder / f"weights-{form.value}"


def write_record(folder: Path, record: ModelRecord, tokenizer_json: str) -> None:
    """Write ``tokenizer.json`` and then ``model.json``, each in one step.

    Raises:
        OSError: the disk refuses.
    """
    _replace(folder / _TOKENIZER, tokenizer_json.encode())
    _replace(folder / RECORD, record.encode())


def read_record(folder: Path) -> ModelRecord:
    """Read a model's record.

    Raises:
        ModelRecordError: the folder holds no model, or one of another version.
    """
    path = folder / RECORD
    try:
        record = msgspec.json.decode(path.read_bytes(), type=ModelRecord)
    except FileNotFoundError as error:
        raise ModelRecordError(
            f"{folder}: holds no model ({RECORD} is missing); fetch it with zccp models pull"
        ) from error
    except msgspec.DecodeError as error:
        raise ModelRecordError(f"{path}: {error}; fetch the model again with zccp models pull") from error
    if record.schema != SCHEMA:
        raise ModelRecordError(f"{path}: schema {record.schema}, this version reads {SCHEMA}; fetch the model again")
    return record


def read_text_assets(folder: Path) -> TextAssets:
    """Tokenizer, templates and control tokens of a stored model.

    Raises:
        ModelRecordError: the record or the tokenizer document is missing or damaged.
    """
    record = read_record(folder)
    path = folder / _TOKENIZER
    try:
        document = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelRecordError(f"{path}: {error}; fetch the model again with zccp models pull") from error
    return TextAssets(
        tokenizer_json=document,
        templates=record.chat_templates,
        special_texts=record.special_texts,
        add_bos=record.add_bos,
        bos_id=record.bos_id,
        eos_ids=record.eos_ids,
    )


def text_fields(assets: TextAssets) -> Mapping[str, Any]:
    """The fields of a record that come from its text assets."""
    return {
        "add_bos": assets.add_bos,
        "bos_id": assets.bos_id,
        "eos_ids": assets.eos_ids,
        "special_texts": dict(assets.special_texts),
        "chat_templates": dict(assets.templates),
    }


def _replace(path: Path, content: bytes) -> None:
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
