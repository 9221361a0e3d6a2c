"""Checksums of a folder: what its files were when it was made, and whether they still are.

Owns ``checksums.json``, a map of relative paths to SHA-256. Imports the standard library only.
"""

import hashlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CHECKSUMS = "checksums.json"


def seal(folder: Path) -> None:
    """Write down what every file of a folder is.

    Raises:
        OSError: a file cannot be read, or the list not written.
    """
    with ThreadPoolExecutor() as pool:
        paths = list(_files(folder))
        digests = dict(zip(paths, pool.map(lambda path: _digest(folder / path), paths), strict=True))
    (folder / CHECKSUMS).write_text(json.dumps(digests, indent=1, sort_keys=True))


def is_sealed(folder: Path) -> bool:
    """Whether the folder was finished by ``seal``."""
    return (folder / CHECKSUMS).is_file()


def broken_seals(folder: Path) -> list[str]:
    """What is wrong with a sealed folder: files that are gone, new or changed, each with its path; empty if nothing.

    Raises:
        OSError: a file cannot be read.
        ValueError: the list of checksums is no JSON.
    """
    expected = json.loads((folder / CHECKSUMS).read_text())
    if not isinstance(expected, dict):
        return [f"{CHECKSUMS} holds no map of files"]
    present = set(_files(folder))
    faults = [f"{path} is missing" for path in sorted(expected.keys() - present)]
    faults += [f"{path} is not one of its files" for path in sorted(present - expected.keys())]
    both = sorted(present & expected.keys())
    with ThreadPoolExecutor() as pool:
        digests = pool.map(lambda path: _digest(folder / path), both)
        faults += [
            f"{path} has been changed" for path, found in zip(both, digests, strict=True) if found != expected[path]
        ]
    return faults


def seal_faults(folder: Path) -> list[str]:
    """What is wrong with a sealed folder, as ``broken_seals`` says it; that it cannot be checked is a fault too."""
    try:
        return broken_seals(folder)
    except (OSError, ValueError) as error:
        return [f"its checksums cannot be read ({error})"]


def _files(folder: Path) -> Iterator[str]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path != folder / CHECKSUMS:
            yield str(path.relative_to(folder))


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
