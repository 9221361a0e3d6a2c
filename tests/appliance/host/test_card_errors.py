"""Lines of the NVIDIA driver in the kernel's log: which of them mean that a served card cannot be used on."""

import os
from pathlib import Path

import pytest

from appliance.host.card_errors import FATAL, CardError, KernelLog, fatal, served_cards

CARD = "0000:cb:00.0"
XID_79 = "NVRM: Xid (PCI:0000:cb:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
XID_94 = "NVRM: Xid (PCI:0000:cb:00): 94, pid=7194, name=python, Contained: SM (0x1). RST: No, D-RST: No"
XID_119 = (
    "NVRM: Xid (PCI:0000:cb:00): 119, pid=1234, name=python, Timeout after 6s of waiting for RPC response from GSP!"
)
OLD_48 = "NVRM: Xid (0000:cb:00): 48, An uncorrectable double bit error (DBE) has been detected on GPU"
XID_13 = (
    "NVRM: Xid (PCI:0000:cb:00): 13, pid='<unknown>', name=<unknown>, Graphics SM Warp Exception on (GPC 7, TPC 7,"
    " SM 0): Illegal Instruction Parameter"
)
XID_63 = "NVRM: Xid (PCI:0000:cb:00): 63, pid=1896, Row Remapper: New row marked for remapping, reset gpu to activate."
XID_74 = "NVRM: Xid (PCI:0000:cb:00): 74, pid='<unknown>', name=<unknown>, NVLink: fatal error detected on link 2"


@pytest.mark.parametrize(("line", "number"), [(XID_79, 79), (XID_94, 94), (XID_119, 119), (OLD_48, 48)])
def test_a_fatal_error_of_a_served_card(line: str, number: int) -> None:
    error = fatal(line, (CARD,))
    assert error == CardError("0000:cb:00", number, FATAL[number])
    assert str(error) == f"card 0000:cb:00 reported Xid {number}: {FATAL[number]}"


@pytest.mark.parametrize(
    "line",
    [
        XID_13,
        XID_63,
        XID_79.replace("cb:", "ca:"),
        XID_79.replace("0000:", "0001:"),
        "usb 1-1: new high-speed USB device",
        f"some daemon says {XID_79}",
        "NVRM: Xid (PCI:::): 79, no address",
        "NVRM: loading NVIDIA UNIX x86_64 Kernel Module",
        "",
    ],
)
def test_lines_that_end_nothing(line: str) -> None:
    assert fatal(line, (CARD,)) is None


def test_any_card_where_the_served_ones_are_unknown() -> None:
    assert fatal(XID_79, ()) is not None
    assert fatal(XID_79, ("0000:1b:00.0", CARD)) is not None
    assert fatal(XID_79.replace("0000:cb", "00000000:CB"), (CARD,)) is not None


def test_an_error_of_a_link_counts_only_with_several_cards() -> None:
    assert fatal(XID_74, (CARD,)) is None
    assert fatal(XID_74, (CARD, "0000:ca:00.0")) is not None


@pytest.fixture
def driver(tmp_path: Path) -> Path:
    """A folder as the driver shows it, of three cards."""
    for number, bus in enumerate(("07", "0b", "cb")):
        folder = tmp_path / f"0000:{bus}:00.0"
        folder.mkdir()
        (folder / "information").write_text(
            f"Model: \t\t NVIDIA A100-SXM4-80GB\nIRQ:   \t\t 2{number}\nGPU UUID: \t GPU-{number}abc-11\n"
        )
    return tmp_path


@pytest.mark.parametrize(
    ("visible", "cards"),
    [
        ("0", ("0000:07:00.0",)),
        ("2,1", ("0000:cb:00.0", "0000:0b:00.0")),
        ("GPU-1abc-11", ("0000:0b:00.0",)),
        ("GPU-2a, 0", ("0000:cb:00.0", "0000:07:00.0")),
        ("7", ()),
        ("MIG-5", ()),
        ("", ()),
    ],
)
def test_served_cards(driver: Path, visible: str, cards: tuple[str, ...]) -> None:
    assert served_cards(visible, driver) == cards


def test_no_driver_is_any_card(tmp_path: Path) -> None:
    assert served_cards("0", tmp_path / "none") == ()


def test_the_log_is_read_from_now_on_and_only_the_kernel_counts(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    path.write_text(f"3,1,100,-;{XID_79}\n")
    log = KernelLog((CARD,), path)
    assert log.read() == []
    with path.open("a") as end:
        for record, numbers in (
            (f"4,2,200,-;{XID_94}\n SUBSYSTEM=pci\n", [94]),
            (f"12,3,300,-;{XID_79}\n", []),  # facility 1: a program wrote it
            (f"3,4,400,-,caller=T77;{XID_119}\n", [119]),
            ("garbage without a header", []),
        ):
            end.write(record)
            end.flush()
            assert [error.number for error in log.read()] == numbers
    log.close()


def test_a_log_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        KernelLog((), tmp_path / "none")


@pytest.mark.skipif(not os.access("/dev/kmsg", os.R_OK), reason="the kernel's log cannot be read here")
def test_the_real_log() -> None:
    try:
        log = KernelLog(())
    except PermissionError:
        pytest.skip("the kernel's log cannot be read here")
    assert log.read() == []
    log.close()
