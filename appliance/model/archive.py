"""Archives: a stored model as one file, for hosts without a network, and the removal of stored models.

Owns the form of an archive: a tar of the model's folder under its name, without the files that it was converted from.
Nothing of an archive is used before it is known to be whole: it is unpacked beside the models, its record is read and
its seals are checked, and only then it takes its place. Never imports jax.
"""

import io
import os
import shutil
import tarfile
from pathlib import Path

import msgspec

from appliance.model.catalog import file_sha256
from appliance.model.checkpoint import Progress, no_progress
from appliance.model.checksums import seal_faults
from appliance.model.disk import check_space
from appliance.model.record import RECORD, ModelRecordError, read_record, read_text_assets

_SOURCE, _WEIGHTS = "source", "weights-*"


class ArchiveError(RuntimeError):
    """A model cannot be archived, brought in or removed; the message names what is wrong and the remedy."""


def export_model(folder: Path, archive: Path, progress: Progress = no_progress) -> str:
    """Write a stored model with its converted weights into a tar file; the SHA-256 of the file, in hex.

    Raises:
        ArchiveError: the model has no converted weights, or they are damaged.
        DiskSpaceError: too little disk space.
        ModelRecordError: the folder holds no model.
    """
    record = read_record(folder)
    _check(folder)
    left_out = {folder / _SOURCE, folder / RECORD}
    paths = [path for path in sorted(folder.rglob("*")) if left_out.isdisjoint((path, *path.parents))]
    total = sum(path.stat().st_size for path in paths if path.is_file())
    archive.parent.mkdir(parents=True, exist_ok=True)
    check_space(archive.parent, total, f"the archive of {record.name}")
    part, done = archive.with_name(f".{archive.name}.{os.getpid()}.part"), 0
    try:
        with tarfile.open(part, "w", format=tarfile.PAX_FORMAT) as tar:
            content = msgspec.structs.replace(record, source_path="").encode()
            told = tarfile.TarInfo(f"{record.name}/{RECORD}")
            told.size, told.mtime = len(content), record.created
            tar.addfile(told, io.BytesIO(content))
            for path in paths:
                tar.add(path, f"{record.name}/{path.relative_to(folder)}", recursive=False, filter=_anonymous)
                done += path.stat().st_size if path.is_file() else 0
                progress("writing the archive", done, total)
        digest = file_sha256(part)
        part.replace(archive)
    finally:
        part.unlink(missing_ok=True)
    return digest


def import_model(archive: Path, models: Path, sha256: str | None = None, progress: Progress = no_progress) -> Path:
    """Bring an archived model into a folder of models, in place of one of the same name; the model's folder.

    Args:
        archive: what ``export_model`` wrote.
        models: ``<home>/models``.
        sha256: of the archive, in hex, where its sender told it.
        progress: called with what is going on.

    Raises:
        ArchiveError: the file is none of these, has another SHA-256, or what it holds is damaged.
        DiskSpaceError: too little disk space.
    """
    if not archive.is_file():
        raise ArchiveError(f"{archive}: there is no such file")
    if sha256 is not None and (found := file_sha256(archive, progress)) != sha256.lower():
        raise ArchiveError(f"{archive}: its SHA-256 is {found}, not {sha256}; copy it again")
    models.mkdir(parents=True, exist_ok=True)
    check_space(models, archive.stat().st_size, f"the model in {archive.name}")
    stage = models / f".{archive.name}.{os.getpid()}.part"
    stage.mkdir()
    try:
        _unpack(archive, stage, progress)
        folders = list(stage.iterdir())
        if len(folders) != 1 or not folders[0].is_dir():
            raise ArchiveError(f"{archive}: holds {len(folders)} things at its top, one folder is wanted")
        try:
            record = read_record(folders[0])
            read_text_assets(folders[0])
        except ModelRecordError as error:
            raise ArchiveError(f"{archive}: {error}".replace(str(stage), "")) from error
        if record.name != folders[0].name:
            raise ArchiveError(f"{archive}: its folder {folders[0].name!r} holds the model {record.name!r}")
        _check(folders[0])
        place = models / record.name
        if place.exists():
            place.rename(stage / ".old")
        folders[0].rename(place)
    finally:
        shutil.rmtree(stage, ignore_errors=True)
    return place


def remove_model(folder: Path) -> int:
    """Remove a stored model; bytes that its files had.

    Raises:
        ModelRecordError: the folder holds no model.
        OSError: the disk refuses.
    """
    read_record(folder)
    gone = folder.with_name(f".{folder.name}.{os.getpid()}.removed")
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    folder.rename(gone)
    shutil.rmtree(gone)
    return size


def _check(folder: Path) -> None:
    weights = sorted(folder.glob(_WEIGHTS))
    if not weights:
        raise ArchiveError(f"{folder.name} has no converted weights; convert it first: zccp convert {folder.name}")
    for each in weights:
        if faults := seal_faults(each):
            raise ArchiveError(f"{folder.name}/{each.name}: {'; '.join(faults[:3])}; convert or copy it again")


def _unpack(archive: Path, stage: Path, progress: Progress) -> None:
    done, total = 0, archive.stat().st_size
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                tar.extract(member, stage, filter="data")
                done += member.size
                progress("unpacking", min(done, total), total)
    except (tarfile.TarError, EOFError) as error:
        raise ArchiveError(f"{archive}: is no archive of zccp models export ({error})") from error


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Without the account that wrote it."""
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member
