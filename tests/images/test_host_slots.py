"""Boot entries and slots: what is told from them, and that a proven entry is never taken for one on trial."""

from pathlib import Path

import pytest

from images.host.slots import SlotError, booted, entries, entry_text, other, write_durably


def esp_with(folder: Path, *names: tuple[str, str]) -> Path:
    place = folder / "loader/entries"
    place.mkdir(parents=True)
    for name, label in names:
        (place / name).write_text(entry_text("0", label))
    return folder


def test_entries_tell_version_slot_and_tries(tmp_path: Path) -> None:
    esp = esp_with(
        tmp_path, ("zccp-1.2.0.conf", "zccp-a"), ("zccp-1.3.0+1-1.conf", "zccp-b"), ("zccp-1.4.0+0-2.conf", "zccp-b")
    )
    (esp / "loader/entries/rescue.conf").write_text("title rescue\n")
    found = [(entry.version, entry.label, entry.tries_left) for entry in entries(esp)]
    assert sorted(found) == [("1.2.0", "zccp-a", None), ("1.3.0", "zccp-b", 1), ("1.4.0", "zccp-b", 0)]


def test_an_entry_boots_its_slot_read_only_with_its_own_kernel() -> None:
    text = entry_text("1.2.0", "zccp-b")
    assert "options root=PARTLABEL=zccp-b ro " in text
    assert "linux /zccp/zccp-b/vmlinuz\ninitrd /zccp/zccp-b/initrd.img\n" in text


def test_the_slot_that_runs_is_read_from_the_command_line(tmp_path: Path) -> None:
    cmdline = tmp_path / "cmdline"
    cmdline.write_text("initrd=x root=PARTLABEL=zccp-b ro panic=10\n")
    assert booted(cmdline) == "zccp-b"
    assert other("zccp-b") == "zccp-a"
    cmdline.write_text("root=/dev/sda1 ro\n")
    with pytest.raises(SlotError, match="not booted from one of zccp-a, zccp-b"):
        booted(cmdline)


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    write_durably(path, b"new", 0o640)
    assert path.read_text() == "new"
    assert path.stat().st_mode & 0o777 == 0o640
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
