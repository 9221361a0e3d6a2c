"""What an image says against the machine under it."""

from pathlib import Path

import pytest

from images.host.preflight import Expected, read_expected, reasons
from images.recipe import read_recipe
from images.tree import expected

A100_SXM_80, A100_SXM_40, H100 = ("20b2", "0x030200"), ("20b0", "0x030200"), ("2330", "0x030200")
SWITCH = ("1af1", "0x068000")
MANAGER = "usr/bin/nv-fabricmanager"


def machine(root: Path, *devices: tuple[str, str], vendor: str = "0x10de") -> Path:
    for number, (device, kind) in enumerate(devices):
        folder = root / f"sys/bus/pci/devices/0000:{number:02x}:00.0"
        folder.mkdir(parents=True)
        for name, value in (("vendor", vendor), ("class", kind), ("device", f"0x{device}")):
            (folder / name).write_text(f"{value}\n")
    return root


def a100() -> Expected:
    told = expected(read_recipe().variant("a100"))
    assert told is not None
    return Expected(**told)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("devices", "told"),
    [
        ((A100_SXM_80,), []),
        ((A100_SXM_80, A100_SXM_80), []),
        ((), ["there is no NVIDIA GPU"]),
        ((A100_SXM_40,), ["a GPU is a100_sxm_40; programs of this image are for a100_sxm_80"]),
        ((H100, A100_SXM_80), ["a GPU is of the unknown kind 2330"]),
        ((A100_SXM_80, SWITCH, SWITCH), ["2 NVSwitches and no /usr/bin/nv-fabricmanager"]),
        ((SWITCH,), ["there is no NVIDIA GPU", "1 NVSwitches"]),
    ],
)
def test_each_reason_is_told(tmp_path: Path, devices: tuple[tuple[str, str], ...], told: list[str]) -> None:
    found = reasons(a100(), machine(tmp_path, *devices))
    assert len(found) == len(told)
    assert all(reason.startswith(beginning) for reason, beginning in zip(found, told, strict=True))


def test_with_the_fabric_manager_switches_are_welcome(tmp_path: Path) -> None:
    (tmp_path / MANAGER).parent.mkdir(parents=True)
    (tmp_path / MANAGER).touch()
    assert reasons(a100(), machine(tmp_path, A100_SXM_80, SWITCH)) == []


def test_devices_of_others_do_not_count(tmp_path: Path) -> None:
    assert reasons(a100(), machine(tmp_path, A100_SXM_80, vendor="0x1002")) == [
        "there is no NVIDIA GPU; this image is for a100_sxm_80, take the cpu image"
    ]


def test_an_image_without_an_accelerator_serves_anywhere(tmp_path: Path) -> None:
    assert expected(read_recipe().variant("cpu")) is None
    (tmp_path / "preflight.json").write_text("null")
    assert reasons(read_expected(tmp_path / "preflight.json"), machine(tmp_path, SWITCH)) == []
