"""What the console says: on every change, with the address in place of what only a prompt can fill in."""

from pathlib import Path

import pytest

from images.host import console


def test_why_a_host_was_refused_is_said_on_every_console_with_its_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refused, issue = tmp_path / "refused", tmp_path / "issue.d/50-zccp.issue"
    refused.write_text("this machine cannot serve: there is no NVIDIA GPU")
    reloads: list[list[str]] = []

    def pause(_: float) -> None:
        if len(reloads) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(console, "REFUSED", refused)
    monkeypatch.setattr(console, "ISSUE", issue)
    monkeypatch.setattr(console, "_address", lambda: "10.1.2.3")
    monkeypatch.setattr(console.socket, "gethostname", lambda: "gpu-1")
    monkeypatch.setattr(console.subprocess, "run", lambda command, **_: reloads.append(command))
    monkeypatch.setattr(console.time, "sleep", pause)
    with pytest.raises(KeyboardInterrupt):
        console.show()
    said = capsys.readouterr().out
    assert (
        said.count("zccp on gpu-1: this machine cannot serve: there is no NVIDIA GPU\nhttps://10.1.2.3/  version") == 1
    )
    assert "https://\\4/  version" in issue.read_text()
    assert reloads == [["agetty", "--reload"]] * 2


def test_a_host_without_a_way_out_is_called_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert console._address()

    def connect(*_: object) -> None:
        raise OSError("Network is unreachable")

    monkeypatch.setattr(console.socket.socket, "connect", connect)
    assert console._address() == console.socket.gethostname()
