"""Updates: a release is written into the slot that does not run and boots from there on trial.

Owns the order of an update, which leaves a host that boots at every moment: the entry of the slot goes first, its root
and boot files are written and checked, then the new entry appears under a name that the boot loader counts down.
Nothing of a release is used before its signature and checksums are known to be right.
"""

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from msgspec import Struct

from images.host.commands import mounted, run
from images.host.slots import (
    ESP,
    TRIES,
    booted,
    entries,
    entry_text,
    other,
    sync_folder,
    write_durably,
)

MANIFEST, SIGNATURE = "manifest.json", "manifest.sig"
TRUSTED = Path("/usr/lib/zccp-host/release-key.pem")
SLOT = Path("/run/zccp-host/slot")
_BLOCK = 1 << 20


class UpdateError(RuntimeError):
    """The release cannot be taken; the slot that runs and its entry are as they were."""


class Part(Struct, frozen=True):
    """A file of a release: its size as it lies there and its SHA-256, and of the root what it unpacks to."""

    bytes: int
    sha256: str
    unpacked_bytes: int = 0


class Manifest(Struct, frozen=True):
    """What a release is made of: ``root.ext4.zst``, ``vmlinuz`` and ``initrd.img``."""

    schema: int
    version: str
    variant: str
    files: dict[str, Part]


def read_manifest(folder: Path, trusted: Path = TRUSTED) -> Manifest:
    """The manifest of a release, if the key that this host trusts signed it.

    Raises:
        UpdateError: it is missing, of another form, or not signed by that key.
    """
    try:
        text, signature = (folder / MANIFEST).read_bytes(), (folder / SIGNATURE).read_bytes()
        key = load_pem_public_key(trusted.read_bytes())
    except (OSError, ValueError) as error:
        raise UpdateError(f"{folder} is no release that can be checked: {error}") from error
    if not isinstance(key, Ed25519PublicKey):
        raise UpdateError(f"{trusted} is no Ed25519 key")
    try:
        key.verify(signature, text)
    except InvalidSignature:
        told = f"{folder / MANIFEST} is not signed by the key in {trusted}; take it from its source again"
        raise UpdateError(told) from None
    try:
        manifest = msgspec.json.decode(text, type=Manifest)
    except msgspec.DecodeError as error:
        raise UpdateError(f"{folder / MANIFEST}: {error}") from error
    missing = {"root.ext4.zst", "vmlinuz", "initrd.img"} - manifest.files.keys()
    if manifest.schema != 1 or missing:
        told = f"schema {manifest.schema}, missing {sorted(missing)}; schema 1 with all files is taken"
        raise UpdateError(f"{folder / MANIFEST}: {told}")
    return manifest


def install(folder: Path, variant: str, progress: Callable[[int, int], None], esp: Path = ESP) -> str:
    """Write a release into the slot that does not run and make its entry, on trial; its version.

    Args:
        folder: the release.
        variant: of this host; another one's is refused.
        progress: is told bytes written of how many.
        esp: the boot partition.

    Raises:
        UpdateError: the release is not one for this host, damaged, or larger than the slot.
        CommandError: a tool of the host failed.
        SlotError: this host has no slots.
    """
    manifest = read_manifest(folder)
    if manifest.variant != variant:
        raise UpdateError(f"{folder} is for {manifest.variant!r} hosts, this is one of {variant!r}; take that release")
    label = other(booted())
    device = Path("/dev/disk/by-partlabel") / label
    _check(folder, manifest, device)
    for entry in entries(esp):
        if entry.label == label:
            entry.path.unlink()
    sync_folder(esp / "loader/entries")
    _write_root(folder / "root.ext4.zst", device, manifest.files["root.ext4.zst"].unpacked_bytes, progress)
    _carry_over(device)
    place = esp / "zccp" / label
    place.mkdir(parents=True, exist_ok=True)
    for name in ("vmlinuz", "initrd.img"):
        write_durably(place / name, (folder / name).read_bytes())
    name = f"zccp-{manifest.version}+{TRIES}.conf"
    write_durably(esp / "loader/entries" / name, entry_text(manifest.version, label).encode())
    return manifest.version


def roll_back(esp: Path = ESP) -> str:
    """Boot the other slot from now on; its version.

    Raises:
        UpdateError: there is nothing in it.
    """
    label = other(booted())
    found = [entry for entry in entries(esp) if entry.label == label and entry.tries_left != 0]
    if not found:
        raise UpdateError(f"slot {label} holds no release; there is nothing to go back to")
    run(["bootctl", "set-default", found[0].path.name])
    return found[0].version


def _check(folder: Path, manifest: Manifest, device: Path) -> None:
    for name, part in manifest.files.items():
        path = folder / name
        if Path(name).name != name or not path.is_file() or path.stat().st_size != part.bytes:
            raise UpdateError(f"{path} does not have the {part.bytes} bytes of the manifest; fetch the release again")
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != part.sha256:
                raise UpdateError(f"{path} is damaged: its SHA-256 is another; fetch the release again")
    size, needed = int(run(["blockdev", "--getsize64", str(device)])), manifest.files["root.ext4.zst"].unpacked_bytes
    if needed > size:
        raise UpdateError(f"the release unpacks to {needed} bytes, slot {device.name} has {size}; make a new image")


def _write_root(packed: Path, device: Path, total: int, progress: Callable[[int, int], None]) -> None:
    unpacking = subprocess.Popen(["zstd", "--decompress", "--stdout", "--quiet", str(packed)], stdout=subprocess.PIPE)
    assert unpacking.stdout is not None
    done = 0
    with device.open("r+b", buffering=0) as slot:
        while block := unpacking.stdout.read(_BLOCK):
            slot.write(block)
            done += len(block)
            progress(done, total)
        os.fsync(slot.fileno())
    if unpacking.wait() or done != total:
        raise UpdateError(f"{packed} unpacks to {done} bytes instead of {total}; fetch the release again")


def _carry_over(device: Path) -> None:
    """What a host keeps in its root: its id."""
    with mounted(device, SLOT) as root:
        (root / "etc/machine-id").write_bytes(Path("/etc/machine-id").read_bytes())


def bar(done: int, total: int) -> None:
    """Show on a terminal how far the slot is written."""
    if sys.stderr.isatty():
        print(f"\r{done * 100 // max(total, 1):3d} % of {total >> 20} MiB", end="", file=sys.stderr, flush=True)
