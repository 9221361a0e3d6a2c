"""Preflight refuses hosts that cannot be appliances, with every reason at once; a host is a folder like sysfs here."""

import json
import re
from pathlib import Path

import pytest

from tests.ansible.playing import ANSIBLE, document, play
from tests.support.scripts import loaded

GIB_KB = 1024 * 1024


def host(
    root: Path,
    devices: tuple[tuple[str, str, int], ...] = (),
    *,
    nodes: int = 1,
    memory_gib: int = 64,
    flags: str = "sse2 avx2",
    driver: str = "",
) -> Path:
    """Files of a host; devices are (PCI device id, class, NUMA node), all of NVIDIA, beside a network card."""
    for place, (device, kind, node) in enumerate((("1533", "0x020000", 0), *devices)):
        folder = root / f"sys/bus/pci/devices/0000:{place:02x}:00.0"
        folder.mkdir(parents=True)
        vendor = "0x8086" if place == 0 else "0x10de"
        for name, text in (("vendor", vendor), ("device", f"0x{device}"), ("class", kind), ("numa_node", str(node))):
            (folder / name).write_text(f"{text}\n")
    for node in range(nodes):
        (root / f"sys/devices/system/node/node{node}").mkdir(parents=True)
    (root / "proc/driver/nvidia").mkdir(parents=True)
    (root / "proc/cpuinfo").write_text(f"processor\t: 0\nflags\t\t: {flags}\n\nprocessor\t: 1\nflags\t\t: {flags}\n")
    (root / "proc/meminfo").write_text(f"MemTotal:       {memory_gib * GIB_KB} kB\nMemFree: 1 kB\n")
    if driver:
        text = f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {driver}  Release Build  (root@host)\n"
        (root / "proc/driver/nvidia/version").write_text(text)
    return root


A100 = ("20b2", "0x030200", 0)
FAR_A100 = ("20b2", "0x030200", 1)
SMALL_A100 = ("20b0", "0x030200", 0)
OTHER = ("1db6", "0x030200", 0)
SWITCH = ("1af1", "0x068000", -1)


def test_what_a_host_has(tmp_path: Path) -> None:
    found = loaded(ANSIBLE / "library" / "zccp_host.py").examine(
        host(tmp_path, (A100, FAR_A100, SWITCH), nodes=2, driver="535.261.03"), [str(tmp_path / "none")]
    )
    assert found["driver"] == "535.261.03"
    assert found["numa_nodes"] == 2
    assert found["memory_mb"] == 68_719
    assert found["cpu_flags"] == ["sse2", "avx2"]
    assert [gpu["numa_node"] for gpu in found["gpus"]] == [0, 1]
    assert [gpu["device"] for gpu in found["gpus"]] == ["20b2", "20b2"]
    assert [switch["address"] for switch in found["nvswitches"]] == ["0000:03:00.0"]
    assert found["free_mb"][str(tmp_path / "none")] > 0


def test_a_host_that_tells_nothing(tmp_path: Path) -> None:
    found = loaded(ANSIBLE / "library" / "zccp_host.py").examine(tmp_path, [])
    assert found == {
        "gpus": [], "nvswitches": [], "driver": "", "numa_nodes": 1, "cpu_flags": [], "memory_mb": 0, "free_mb": {},
    }  # fmt: skip


CASES = {
    "cpu_good": ("none", {}, 1, []),
    "cpu_small": ("none", {"memory_gib": 2, "flags": "sse2"}, 1, ["memory is 2147 MB", "the CPU has no avx2"]),
    "gpu_good": ("a100", {"devices": (A100,), "driver": "535.261.03"}, 1, []),
    "gpu_not_loaded": ("a100", {"devices": (A100,)}, 1, []),
    "gpu_none": ("a100", {}, 1, ["0 supported GPUs of 1 wanted (all NVIDIA GPUs here: none; supported: 20b0 a100"]),
    "gpu_other": ("a100", {"devices": (OTHER,)}, 1, ["0 supported GPUs of 1 wanted (all NVIDIA GPUs here: 1db6"]),
    "gpu_few": ("a100", {"devices": (A100,)}, 2, ["1 supported GPUs of 2 wanted"]),
    "gpu_mixed": ("a100", {"devices": (A100, SMALL_A100)}, 2, ["the GPUs are of different kinds"]),
    "gpu_switch": ("a100", {"devices": (A100, SWITCH)}, 1, ["1 NVSwitches and no /nowhere; Debian has no fabric"]),
    "gpu_lost": ("a100", {"devices": (("20b2", "0x030200", -1),), "nodes": 2}, 1, ["NUMA node GPU 0000:01:00.0"]),
    "gpu_old": ("a100", {"devices": (A100,), "driver": "470.256.02"}, 1, ["the loaded driver is 470.256.02"]),
}


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What preflight says of each case, all in one run; empty where it takes the host."""
    folder = tmp_path_factory.mktemp("preflight")
    facts = {"distribution": "Debian", "distribution_version": "12.9", "distribution_major_version": "12"}
    hosts = {
        name: {
            "zccp_accelerator": accelerator,
            "preflight_root": str(host(folder / name, **given)),
            "preflight_gpus_wanted": wanted,
            "preflight_min_free_mb": {str(folder): 1},
            "preflight_fabric_manager": "/nowhere",
        }
        for name, (accelerator, given, wanted, _) in CASES.items()
    }
    tasks = [
        {"name": "Facts", "ansible.builtin.set_fact": {"ansible_facts": {**facts, "architecture": "x86_64"}}},
        {
            "name": "Look",
            "ansible.builtin.include_role": {"name": "preflight"},
            "vars": {"ansible_facts": {**facts, "architecture": "x86_64"}},
        },
    ]
    done = play(tasks[1:], hosts, folder)
    text = done.stdout
    refused = {
        name: re.sub(r"\s+", " ", words)
        for name, words in re.findall(r"msg: >?-?\s*'?(\w+) is refused: (.*?)\n\S", text, re.DOTALL)
    }
    for name in CASES:
        assert f"{name} can be an appliance" in text or name in refused, json.dumps(
            {name: text[-3000:], "err": done.stderr[-1000:]}
        )
    return {name: refused.get(name, "") for name in CASES}


@pytest.mark.parametrize("case", CASES)
def test_a_host_is_taken_or_refused_with_reasons(said: dict[str, str], case: str) -> None:
    reasons = CASES[case][3]
    assert (said[case] == "") == (reasons == [])
    for reason in reasons:
        assert reason in said[case]


def test_supported_gpus_have_a_target() -> None:
    kinds = document(ANSIBLE / "roles/preflight/defaults/main.yml")["preflight_gpu_kinds"]
    assert {kind.rpartition("_")[0] for kind in kinds.values()} == {"a100_sxm", "a100_pcie"}
