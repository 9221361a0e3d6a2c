"""The disk of an image and the files of a release, from a tree.

Owns the partitions: boot files, two slots for the root, and what is kept. systemd-repart of the tools' tree writes them
without a loop device or a mount, alike each time: ids come from the recipe's seed, times are cut at its epoch.
"""

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID, uuid5

from images.debian import BuildError, entered, in_tree, kernel_of, run
from images.host.slots import LABELS, entry_text
from images.host.update import MANIFEST, SIGNATURE
from images.recipe import Recipe, Variant
from images.tree import PROGRAMS
from planner.signing import local_key

DEFINITIONS = """\
[Partition]
Type={kind}
Label={label}
Format={format}
SizeMinBytes={mb}M
SizeMaxBytes={mb}M
UUID={uuid}
"""


@dataclass(frozen=True, slots=True)
class Contents:
    """What goes onto a disk: folders of the root, the tools, the programs and, or None, the model; two files.

    ``module_key`` is the public key of the driver's module, for hosts with secure boot; None without such a module.
    """

    tree: Path
    tools: Path
    programs: Path
    model: Path | None
    sbom: Path
    module_key: Path | None


def make_disk(out: Path, contents: Contents, recipe: Recipe, variant: Variant, version: str) -> Path:
    """Write ``disk.raw`` into a folder, with the tree, which gets the programs, in the first slot.

    Raises:
        BuildError: a tool failed.
    """
    tree, tools, model = contents.tree, contents.tools, contents.model
    stage = out / "stage"
    shutil.rmtree(stage, ignore_errors=True)
    efi, data, definitions = stage / "efi", stage / "data", stage / "repart.d"
    inside = tree / PROGRAMS.relative_to("/")
    shutil.rmtree(inside, ignore_errors=True)
    shutil.copytree(contents.programs, inside)
    run(["chmod", "-R", "a+rX,go-w", str(inside)])
    _boot_files(efi, contents, version)
    store = data / "var/lib/zccp/models"
    store.mkdir(parents=True)
    (data / ".var").mkdir()
    if model is not None:
        shutil.copytree(model, store / model.name)
    for path in (data / "var/lib/zccp", *(data / "var/lib/zccp").rglob("*")):
        os.chown(path, 810, 810, follow_symlinks=False)
    (data / "var/lib/zccp").chmod(0o750)
    definitions.mkdir()
    _define(definitions, recipe.seed, variant)
    for folder in (tree, efi, data):
        _clamp(folder, recipe.epoch)
    disk = out / "disk.raw"
    disk.unlink(missing_ok=True)
    environment = {
        "SOURCE_DATE_EPOCH": str(recipe.epoch),
        "SYSTEMD_REPART_MKFS_OPTIONS_EXT4": f"-E hash_seed={uuid5(recipe.seed, 'hash')}",
    }
    binds = {Path("/build/out"): out, Path("/build/tree"): tree}
    size = variant.esp_mb + 2 * variant.root_mb + variant.data_mb + 16
    with entered(tools, binds):
        in_tree(tools, [
            "systemd-repart", "--sector-size=512", "--definitions=/build/out/stage/repart.d", "--root=/build",
            "--empty=create", f"--size={size}M", "--offline=yes", f"--seed={recipe.seed}", "--dry-run=no",
            "/build/out/disk.raw",
        ], environment)  # fmt: skip
    return disk


def make_release(out: Path, disk: Path, contents: Contents, variant: str, version: str, signing_key: Path) -> Path:
    """Write the folder of a release: packed root, boot files, bill of materials, and a manifest that the key signs.

    Raises:
        BuildError: a tool failed.
    """
    folder = out / "release"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    start, size = partition(disk, contents.tools, LABELS[0])
    root = folder / "root.ext4"
    run(["dd", f"if={disk}", f"of={root}", "bs=1M", "iflag=skip_bytes,count_bytes", f"skip={start}", f"count={size}",
         "conv=sparse", "status=none"])  # fmt: skip
    run(["zstd", "--quiet", "--rm", "-6", "--threads=0", str(root)])
    tree, kernel = contents.tree, kernel_of(contents.tree)
    shutil.copy(tree / f"boot/vmlinuz-{kernel}", folder / "vmlinuz")
    shutil.copy(tree / f"boot/initrd.img-{kernel}", folder / "initrd.img")
    shutil.copy(contents.sbom, folder)
    write_manifest(folder, variant, version, signing_key, unpacked_bytes=size)
    return folder


def write_manifest(
    folder: Path, variant: str, version: str, signing_key: Path, unpacked_bytes: int | None = None
) -> None:
    """Write and sign the list of a release's files; without ``unpacked_bytes`` the size stands that is there already.

    Raises:
        SigningKeyError: the key is none, or others can read it.
    """
    listed, signature = folder / MANIFEST, folder / SIGNATURE
    if unpacked_bytes is None:
        unpacked_bytes = int(json.loads(listed.read_text())["files"]["root.ext4.zst"]["unpacked_bytes"])
    files: dict[str, dict[str, object]] = {}
    for path in sorted(set(folder.iterdir()) - {listed, signature}):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        files[path.name] = {"bytes": path.stat().st_size, "sha256": digest}
    files["root.ext4.zst"]["unpacked_bytes"] = unpacked_bytes
    document = {"schema": 1, "version": version, "variant": variant, "files": files}
    text = (json.dumps(document, indent=1) + "\n").encode()
    listed.write_bytes(text)
    signature.write_bytes(local_key(signing_key).sign(text))


def put_seed(disk: Path, tools: Path, seed: Path) -> None:
    """Copy a seed onto the boot partition of a disk image.

    Raises:
        BuildError: the image has no boot partition, or it is full.
    """
    start, _ = partition(disk, tools, "zccp-esp")
    with entered(tools, {Path("/build/disk"): disk.parent, Path("/build/seed"): seed.absolute().parent}):
        image = f"/build/disk/{disk.name}@@{start}"
        in_tree(tools, ["mcopy", "-o", "-i", image, f"/build/seed/{seed.name}", "::/zccp/seed.yaml"])


def partition(disk: Path, tools: Path, label: str) -> tuple[int, int]:
    """Where a partition of a disk image begins and how large it is, in bytes.

    Raises:
        BuildError: there is none of that label.
    """
    with entered(tools, {Path("/build/disk"): disk.parent}):
        table = json.loads(in_tree(tools, ["sfdisk", "--json", f"/build/disk/{disk.name}"]))["partitiontable"]
    for found in table["partitions"]:
        if found.get("name") == label:
            return 512 * found["start"], 512 * found["size"]
    raise BuildError(f"{disk} has no partition {label}")


def _boot_files(efi: Path, contents: Contents, version: str) -> None:
    tree, tools = contents.tree, contents.tools
    place, loader = efi / "zccp" / LABELS[0], efi / "EFI/BOOT"
    place.mkdir(parents=True)
    loader.mkdir(parents=True)
    (efi / "loader/entries").mkdir(parents=True)
    kernel = kernel_of(tree)
    shutil.copy(tree / f"boot/vmlinuz-{kernel}", place / "vmlinuz")
    shutil.copy(tree / f"boot/initrd.img-{kernel}", place / "initrd.img")
    # With secure boot the firmware trusts shim, shim trusts Debian's key, which signed the boot loader and the kernel.
    # The name of what shim starts is built into it.
    shutil.copy(tools / "usr/lib/shim/shimx64.efi.signed", loader / "BOOTX64.EFI")
    shutil.copy(tools / "usr/lib/systemd/boot/efi/systemd-bootx64.efi.signed", loader / "grubx64.efi")
    shutil.copy(tools / "usr/lib/shim/mmx64.efi.signed", loader / "mmx64.efi")
    if contents.module_key is not None:
        shutil.copy(contents.module_key, efi / "zccp/module-key.der")
    (efi / "loader/loader.conf").write_text("timeout 0\neditor no\n")
    (efi / f"loader/entries/zccp-{version}.conf").write_text(entry_text(version, LABELS[0]))


def _define(folder: Path, seed: UUID, variant: Variant) -> None:
    for number, (label, kind, form, mb, source) in enumerate((
        ("zccp-esp", "esp", "vfat", variant.esp_mb, "/out/stage/efi:/"),
        (LABELS[0], "root-x86-64", "ext4", variant.root_mb, "/tree:/"),
        (LABELS[1], "root-x86-64", "ext4", variant.root_mb, ""),
        ("zccp-data", "linux-generic", "ext4", variant.data_mb, "/out/stage/data:/"),
    )):  # fmt: skip
        text = DEFINITIONS.format(kind=kind, label=label, format=form, mb=mb, uuid=uuid5(seed, label))
        if source:
            text += f"CopyFiles={source}\n"
        (folder / f"{number}0-{label}.conf").write_text(text)


def _clamp(folder: Path, epoch: int) -> None:
    """Give what is newer than the epoch the epoch's time."""
    for path in (folder, *folder.rglob("*")):
        if path.lstat().st_mtime > epoch:
            os.utime(path, (epoch, epoch), follow_symlinks=False)
