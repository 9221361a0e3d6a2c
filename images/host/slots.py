"""Slots: the two root file systems of a host, and the boot entries that lead to them.

Owns the form of boot entries. An entry that is on trial has the tries that are left behind its name, as the boot loader
counts them: ``zccp-1.2.0+2.conf``; once a boot was good the counter goes. Source: systemd's Automatic Boot Assessment.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path

ESP = Path("/efi")
LABELS = ("zccp-a", "zccp-b")
TRIES = 2
"""Boots that a new version gets to become healthy."""

_NAME = re.compile(r"zccp-(?P<version>[\w.]+)(?:\+(?P<left>\d+)(?:-(?P<done>\d+))?)?\.conf")
_ROOT = re.compile(r"\broot=PARTLABEL=(\S+)")


class SlotError(RuntimeError):
    """The host does not have the slots of an image, or they are not as they must be."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A boot entry: its file, its version, the label of its root and the tries left, None where it is proven."""

    path: Path
    version: str
    label: str
    tries_left: int | None


def entries(esp: Path = ESP) -> list[Entry]:
    """All entries of this appliance."""
    found: list[Entry] = []
    for path in sorted((esp / "loader/entries").glob("zccp-*.conf")):
        name, root = _NAME.fullmatch(path.name), _ROOT.search(path.read_text())
        if name and root:
            found.append(Entry(path, name["version"], root[1], int(name["left"]) if name["left"] else None))
    return found


def booted(cmdline: Path = Path("/proc/cmdline")) -> str:
    """The label of the slot that runs.

    Raises:
        SlotError: this host was not booted from a slot.
    """
    root = _ROOT.search(cmdline.read_text())
    if root is None or root[1] not in LABELS:
        raise SlotError(f"this host was not booted from one of {', '.join(LABELS)}; it is no appliance image")
    return root[1]


def other(label: str) -> str:
    """The slot that does not run."""
    return LABELS[1 - LABELS.index(label)]


def on_trial(esp: Path = ESP) -> bool:
    """Whether the entry that this boot came from must still prove itself."""
    label = booted()
    return any(entry.label == label and entry.tries_left is not None for entry in entries(esp))


def entry_text(version: str, label: str) -> str:
    """A boot entry. What kernel and initial file system it names lies in the slot's own folder."""
    return (
        f"title zccp {version}\nversion {version}\nsort-key zccp\n"
        f"linux /zccp/{label}/vmlinuz\ninitrd /zccp/{label}/initrd.img\n"
        f"options root=PARTLABEL={label} ro rootwait panic=10 console=tty0 console=ttyS0\n"
    )


def write_durably(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Replace a file so that after a loss of power either the old or the new one is there."""
    part = path.with_name(f".{path.name}.part")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Bring what a folder lists to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
