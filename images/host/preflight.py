"""Preflight: whether the machine under an image is one that the image is for.

Owns the reasons against it. Reads the kernel's description of the devices and what the image was told at its build;
the lists of kinds are those that Ansible's preflight has.
"""

import json
from pathlib import Path

import msgspec
from msgspec import Struct

EXPECTED = Path("/usr/lib/zccp-host/preflight.json")
_NVIDIA = "0x10de"
_GPUS, _SWITCHES = ("0x0300", "0x0302"), "0x0680"


class Expected(Struct, frozen=True, forbid_unknown_fields=True):
    """What the image is for: its target, the PCI device ids of supported GPUs, and what NVSwitches need."""

    target: str
    kinds: dict[str, str]
    fabric_manager: str


def reasons(expected: Expected | None, root: Path = Path("/")) -> list[str]:
    """Why the appliance cannot serve on this machine, each with the remedy; empty when it can.

    Args:
        expected: None for an image without an accelerator, which serves anywhere.
        root: under which sysfs lies.
    """
    if expected is None:
        return []
    devices = [_read(path) for path in sorted((root / "sys/bus/pci/devices").glob("*"))]
    nvidia = [(kind, device) for vendor, kind, device in devices if vendor == _NVIDIA]
    gpus = [device for kind, device in nvidia if kind.startswith(_GPUS)]
    switches = [device for kind, device in nvidia if kind.startswith(_SWITCHES)]
    found: list[str] = []
    if not gpus:
        found.append(f"there is no NVIDIA GPU; this image is for {expected.target}, take the cpu image")
    for device in sorted(set(gpus)):
        kind = expected.kinds.get(device)
        if kind != expected.target:
            told = kind or f"of the unknown kind {device}"
            found.append(f"a GPU is {told}; programs of this image are for {expected.target}, build one for its kind")
    manager = root / expected.fabric_manager.lstrip("/")
    if switches and not manager.exists():
        found.append(
            f"{len(switches)} NVSwitches and no {expected.fabric_manager}; put the vendor's package, in the driver's "
            "exact version, into images/extra and build the image again"
        )
    return found


def read_expected(path: Path = EXPECTED) -> Expected | None:
    """What the image was told; None where it holds for any machine."""
    return msgspec.convert(json.loads(path.read_text()), Expected | None)


def _read(device: Path) -> tuple[str, str, str]:
    vendor, kind, number = ((device / name).read_text().strip() for name in ("vendor", "class", "device"))
    return vendor, kind, number.removeprefix("0x")
