#!/usr/bin/python
"""What a host has, as sysfs and procfs tell it: GPUs, switches between them, driver, NUMA nodes, CPU, free disk space.

Reads files below ``root``, which tests replace; changes nothing and needs no driver. Runs on the target, so it uses the
standard library alone.
"""

import os
import re
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
module: zccp_host
short_description: Facts about a host that an appliance depends on
description:
  - Returns GPUs, NVSwitches, the loaded driver, NUMA nodes, instruction sets and free disk space.
options:
  root:
    description: Directory in which sys and proc lie; tests have another one.
    type: path
    default: /
  disks:
    description: Paths whose free space is asked for; of one that does not exist, its nearest parent counts.
    type: list
    elements: path
    default: []
author:
  - zccp
"""
EXAMPLES = r"""
- name: Look at the host
  zccp_host:
    disks: [/var/lib]
"""
RETURN = r"""
host:
  description: What was found.
  type: dict
  returned: always
"""

NVIDIA = "0x10de"
GPU_CLASSES = ("0x0300", "0x0302")
"""PCI classes of a VGA controller and of a 3D controller. Source: PCI Code and ID Assignment Specification."""
BRIDGE_CLASS = "0x0680"
"""PCI class "other bridge", which NVIDIA's NVSwitches have."""


def examine(root: Path, disks: "list[str]") -> "dict[str, object]":
    """Everything that is found below ``root``; sizes in MB of 1,000,000 bytes."""
    devices = [_device(path) for path in sorted((root / "sys/bus/pci/devices").glob("*"))]
    nvidia = [device for device in devices if device["vendor"] == NVIDIA]
    return {
        "gpus": [device for device in nvidia if str(device["class"]).startswith(GPU_CLASSES)],
        "nvswitches": [device for device in nvidia if str(device["class"]).startswith(BRIDGE_CLASS)],
        "driver": _driver(root),
        "numa_nodes": len(list((root / "sys/devices/system/node").glob("node[0-9]*"))) or 1,
        "cpu_flags": _cpu_flags(root),
        "memory_mb": _memory_mb(root),
        "free_mb": {disk: _free_mb(Path(disk)) for disk in disks},
    }


def _device(path: Path) -> "dict[str, object]":
    node = _text(path / "numa_node")
    return {
        "address": path.name,
        "vendor": _text(path / "vendor"),
        "device": _text(path / "device").removeprefix("0x"),
        "class": _text(path / "class"),
        "numa_node": int(node) if node.lstrip("-").isdigit() else -1,
    }


def _driver(root: Path) -> str:
    """Version of the loaded NVIDIA kernel module, empty without one."""
    found = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", _text(root / "proc/driver/nvidia/version"))
    return found.group(1) if found else ""


def _cpu_flags(root: Path) -> "list[str]":
    found = re.search(r"^flags\s*:\s*(.*)$", _text(root / "proc/cpuinfo"), re.MULTILINE)
    return found.group(1).split() if found else []


def _memory_mb(root: Path) -> int:
    found = re.search(r"^MemTotal:\s*(\d+) kB$", _text(root / "proc/meminfo"), re.MULTILINE)
    return int(found.group(1)) * 1024 // 1_000_000 if found else 0


def _free_mb(path: Path) -> int:
    while not path.exists():
        path = path.parent
    figures = os.statvfs(path)
    return figures.f_bavail * figures.f_frsize // 1_000_000


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def main() -> None:
    """Answer one call of the module."""
    module = AnsibleModule(
        argument_spec={
            "root": {"type": "path", "default": "/"},
            "disks": {"type": "list", "elements": "path", "default": []},
        },
        supports_check_mode=True,
    )
    module.exit_json(changed=False, host=examine(Path(module.params["root"]), module.params["disks"]))


if __name__ == "__main__":
    main()
