"""What the recipes of images say: nobody has a password, only SSH and TLS come in, the disk grows, no host is named."""

import configparser
import re
import subprocess
from pathlib import Path

import pytest

from tests.support.scripts import loaded

IMAGES = Path(__file__).parents[2] / "images"
OVERLAY = IMAGES / "host" / "overlay"
SCRIPTS = (IMAGES / "rootfs.sh", IMAGES / "image.sh", IMAGES / "container" / "build.sh")


def unit(path: Path) -> configparser.ConfigParser:
    """A file in systemd's form."""
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string(path.read_text())
    return parser


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_says_how_it_is_used(script: Path) -> None:
    assert script.stat().st_mode & 0o111
    done = subprocess.run([script], capture_output=True, text=True, check=False, cwd=IMAGES.parent)
    assert done.returncode != 0
    assert "usage: images/" in done.stderr


def test_nobody_comes_in_with_a_password() -> None:
    lines = (OVERLAY / "etc/ssh/sshd_config.d/zccp.conf").read_text().splitlines()
    assert {"PasswordAuthentication no", "PermitRootLogin prohibit-password"} <= set(lines)
    recipe = (IMAGES / "image.sh").read_text()
    assert not re.search(r"passwd|authorized_keys", recipe)
    assert '"$1"/etc/ssh/ssh_host_*' in recipe


def test_only_ssh_and_tls_come_in() -> None:
    rules = (OVERLAY / "etc/nftables.conf").read_text()
    assert "type filter hook input priority filter; policy drop;" in rules
    assert re.findall(r"tcp dport (.*) accept", rules) == ["{ 22, 443 }"]
    assert " nftables " in (IMAGES / "image.sh").read_text()


def test_the_root_file_system_takes_the_disk() -> None:
    made = unit(IMAGES / "host/repart.d/20-root.conf")["Partition"]
    assert (made["Type"], made["Label"], made["Format"]) == ("root-x86-64", "root", "ext4")
    for name in ("10-esp.conf", "20-root.conf"):
        first, later = (
            unit(folder / name)["Partition"] for folder in (IMAGES / "host/repart.d", OVERLAY / "etc/repart.d")
        )
        assert first["Type"] == later["Type"]
    assert (OVERLAY / "etc/fstab").read_text() == "LABEL=root / ext4 rw,x-systemd.growfs 0 1\n"


def test_a_machine_makes_its_own_keys_before_sshd() -> None:
    keys = unit(OVERLAY / "etc/systemd/system/ssh-hostkeys.service")
    assert keys["Unit"]["Before"] == "ssh.service"
    assert keys["Unit"]["ConditionPathExists"] == "!/etc/ssh/ssh_host_ed25519_key"


def test_a_booted_machine_is_reached_from_here_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    boot = loaded(IMAGES / "boot.py")
    (tmp_path / "key.pub").write_text("ssh-ed25519 AAAA test\n")
    monkeypatch.setattr(boot, "run", lambda _command: None)
    monkeypatch.setattr(boot, "VARIABLES", tmp_path / "key.pub")
    command = boot.machine(Path("image.raw"), tmp_path, 2222, "tcg")
    (network,) = (word for word in command if word.startswith("user,"))
    assert network == "user,id=n0,restrict=on,hostfwd=tcp:127.0.0.1:2222-:22"
    assert (tmp_path / "credential").read_text().endswith("ssh.authorized_keys.root=ssh-ed25519 AAAA test")


def test_the_container_is_built_without_an_index_and_runs_without_root() -> None:
    lines = (IMAGES / "container/Containerfile").read_text().splitlines()
    assert "FROM scratch" in lines
    assert "USER 990:990" in lines
    assert sum("--no-index" in line for line in lines) == 2
    assert any("--require-hashes" in line for line in lines)
