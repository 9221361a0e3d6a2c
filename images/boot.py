#!/usr/bin/env python3
"""Boots a disk image under QEMU and says how long it took until SSH and what is wrong.

``images/boot.py IMAGE``: the image is not changed, since the machine runs on an overlay, on a larger disk than the
image so that its growth is seen. Everything listens on loopback. Exit code 0 if the system runs without a failed unit
and with its firewall.
"""

import argparse
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FIRMWARE = Path("/usr/share/OVMF/OVMF_CODE_4M.fd")
VARIABLES = Path("/usr/share/OVMF/OVMF_VARS_4M.fd")
DISK_GB = 6
QUESTIONS = {
    "state": "systemctl is-system-running --wait",
    "failed": "systemctl --failed --no-legend --plain",
    "why": "systemctl --failed --no-legend --plain | cut -d' ' -f1 | xargs -rn1 journalctl -b -o cat -n 8 -u",
    "root_mb": "df --output=size -BM / | tail -1 | tr -d ' M'",
    "listening": "ss -Hltn | awk '{print $4}' | sort -u | tr '\\n' ' '",
    "firewall": "/usr/sbin/nft list chain inet filter input | grep -c 'policy drop'",
    "redis": "redis-cli ping",
    "kernel": "uname -r",
    "boot": "systemd-analyze | head -1",
}


def free_port() -> int:
    """A port of the loopback that nobody has."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def machine(image: Path, folder: Path, port: int, accelerator: str) -> list[str]:
    """QEMU's command line; the operator's key comes as a credential through the firmware's tables."""
    disk = folder / "disk.qcow2"
    run(["qemu-img", "create", "-q", "-f", "qcow2", "-F", "raw", "-b", str(image.resolve()), str(disk), f"{DISK_GB}G"])
    shutil.copy(VARIABLES, folder / "vars.fd")
    run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "key")])
    key = (folder / "key.pub").read_text(encoding="utf-8").strip()
    credential = folder / "credential"
    credential.write_text(f"io.systemd.credential:ssh.authorized_keys.root={key}", encoding="utf-8")
    return [
        "qemu-system-x86_64", "-nodefaults", "-no-user-config", "-display", "none", "-smp", "2", "-m", "2048",
        "-machine", f"q35,accel={accelerator}", "-cpu", "host" if accelerator == "kvm" else "max",
        "-drive", f"if=none,id=d0,file={disk},format=qcow2,cache=unsafe", "-device", "virtio-blk-pci,drive=d0",
        "-netdev", f"user,id=n0,restrict=on,hostfwd=tcp:127.0.0.1:{port}-:22", "-device", "virtio-net-pci,netdev=n0",
        "-device", "virtio-rng-pci", "-serial", f"file:{folder / 'serial.log'}",
        "-smbios", f"type=11,path={credential}",
        "-drive", f"if=pflash,format=raw,readonly=on,file={FIRMWARE}",
        "-drive", f"if=pflash,format=raw,file={folder / 'vars.fd'}",
    ]  # fmt: skip


def run(command: list[str]) -> None:
    """Run a command that must succeed."""
    subprocess.run(command, check=True)  # noqa: S603 - our own arguments


def ask(folder: Path, port: int, question: str) -> "subprocess.CompletedProcess[str]":
    """What a command on the machine prints."""
    options = ["-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR"]
    options += ["-o", "ConnectTimeout=5", "-o", "IdentitiesOnly=yes", "-i", str(folder / "key"), "-p", str(port)]
    command = ["ssh", *options, "root@127.0.0.1", question]
    return subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - our own arguments


def boot(image: Path, folder: Path, timeout_s: float, accelerator: str) -> dict[str, object]:
    """Boot, ask, and end the machine; the answers."""
    port, began = free_port(), time.monotonic()
    with subprocess.Popen(machine(image, folder, port, accelerator)) as process:  # noqa: S603 - our own arguments
        try:
            while (done := ask(folder, port, "true")).returncode != 0:
                took_s = time.monotonic() - began
                if process.poll() is not None or took_s > timeout_s:
                    serial = (folder / "serial.log").read_text(encoding="utf-8", errors="replace")
                    raise SystemExit(f"boot.py: no SSH after {took_s:.0f} s: {done.stderr}\n{serial[-3000:]}")
                time.sleep(1)
            answers: dict[str, object] = {"ssh_after_s": round(time.monotonic() - began, 1)}
            answers |= {name: ask(folder, port, question).stdout.strip() for name, question in QUESTIONS.items()}
            return answers
        finally:
            process.terminate()
            process.wait(30)


def main() -> int:
    """Boot one image and print what was found as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("image", type=Path)
    parser.add_argument("--timeout", type=float, default=600.0, help="longest time until SSH, s")
    parser.add_argument("--kvm", action="store_true", help="use KVM; default: translate, which works anywhere")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="zccp-boot-") as folder:
        answers = boot(given.image, Path(folder), given.timeout, "kvm" if given.kvm else "tcg")
    sys.stdout.write(json.dumps(answers, indent=1) + "\n")
    return 0 if answers["state"] == "running" and answers["firewall"] == "1" else 1


if __name__ == "__main__":
    sys.exit(main())
