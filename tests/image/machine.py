"""A virtual machine that boots an image: QEMU without KVM, UEFI with secure boot, two ports of the host's loopback.

Owns the QEMU process and a throw-away disk over the image's. Waits by asking, reads the console from a file.
"""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

FIRMWARE = Path("/usr/share/OVMF/OVMF_CODE_4M.secboot.fd")
VARIABLES = Path("/usr/share/OVMF/OVMF_VARS_4M.ms.fd")
"""Variables of the firmware with the keys that the market's machines come with, secure boot on."""
BOOT_S = 1500.0
MEMORY_MB = 3072
SPARE_BYTES = 5 << 30
"""How much larger a machine's disk is than its image; the data partition grows into it."""
_OPTIONS = ("-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR", "-o",
            "ConnectTimeout=20")  # fmt: skip
"""Of ``ssh`` and ``scp`` to a machine that nobody has seen before."""
_CONNECTION_ENDED = 255
"""Exit code of ``ssh`` where the connection ended before the command."""


def missing() -> str:
    """Why no machine can be started here; empty when one can."""
    needed = ("qemu-system-x86_64", "qemu-img", "mmdebstrap", "ssh", "curl")
    absent = [name for name in needed if not shutil.which(name)]
    if absent:
        return f"{', '.join(absent)} not installed"
    if not (FIRMWARE.exists() and VARIABLES.exists()):
        return "ovmf is not installed"
    return "" if os.geteuid() == 0 else "images are built as root"


@dataclass(frozen=True)
class Machine:
    """A running machine: where its HTTPS and SSH are, its console, and the key that opens it."""

    https: int
    ssh: int
    console: Path
    identity: Path
    process: "subprocess.Popen[bytes]"

    def said(self) -> str:
        """What the console has shown so far."""
        return self.console.read_text(errors="replace") if self.console.exists() else ""

    def run(self, command: str, timeout_s: float = 300.0) -> str:
        """Standard output of a command as root.

        Raises:
            AssertionError: it failed.
        """
        done = self._ssh(command, timeout_s)
        assert not done.returncode, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def restart(self, command: str = "systemctl reboot", timeout_s: float = 300.0) -> None:
        """Run a command as root that restarts the machine, and wait until it runs again.

        Raises:
            AssertionError: the command failed, or the machine did not come back.
        """
        before = self.boot_id()
        done = self._ssh(command, timeout_s)
        assert done.returncode in (0, _CONNECTION_ENDED), f"{command}: {done.stdout}{done.stderr}"
        self.wait(lambda: self.boot_id() != before)

    def copy(self, source: Path, place: str) -> None:
        """Copy a folder into the machine."""
        options = ["-r", "-i", str(self.identity), "-P", str(self.ssh), *_OPTIONS]
        subprocess.run(["scp", *options, str(source), f"root@127.0.0.1:{place}"], check=True, timeout=1800)

    def curl(self, path: str, *options: str) -> tuple[str, int, str]:
        """HTTP version, status and body of a request over TLS."""
        done = subprocess.run(
            ["curl", "--silent", "--insecure", "--http2", "--max-time", "900", "--write-out",
             "\n%{http_version} %{http_code}", *options, f"https://127.0.0.1:{self.https}{path}"],
            capture_output=True, text=True, timeout=1000, check=False,
        )  # fmt: skip
        body, _, told = done.stdout.rpartition("\n")
        version, _, status = told.partition(" ")
        return version, int(status or 0), body

    def wait(self, holds: Callable[[], object], limit_s: float = BOOT_S) -> None:
        """Ask until something holds.

        Raises:
            AssertionError: it does not in time, or QEMU has ended; with the console's end.
        """
        deadline = time.monotonic() + limit_s
        while True:
            try:
                if holds():
                    return
            except (AssertionError, subprocess.TimeoutExpired):
                pass
            assert self.process.poll() is None, f"QEMU ended with {self.process.returncode}"
            assert time.monotonic() < deadline, self.said()[-4000:]
            time.sleep(2)

    def ready(self) -> bool:
        """Whether the appliance says that it is ready."""
        return self.curl("/health/ready", "--max-time", "10")[1] == 200

    def boot_id(self) -> str:
        """What tells one boot from the next."""
        return self.run("cat /proc/sys/kernel/random/boot_id")

    def _ssh(self, command: str, timeout_s: float) -> "subprocess.CompletedProcess[str]":
        options = ["-i", str(self.identity), "-p", str(self.ssh), *_OPTIONS]
        return subprocess.run(
            ["ssh", *options, "root@127.0.0.1", command], capture_output=True, text=True, timeout=timeout_s, check=False
        )


@contextmanager
def booted(disk: Path, folder: Path, identity: Path, accelerator: str = "tcg") -> Iterator[Machine]:
    """Boot a disk image, which is not changed; the firmware starts nothing that is not signed."""
    overlay, variables, console = folder / "run.qcow2", folder / "vars.fd", folder / "console"
    size = str(disk.stat().st_size + SPARE_BYTES)
    subprocess.run(
        ["qemu-img", "create", "-q", "-f", "qcow2", "-F", "raw", "-b", str(disk), str(overlay), size], check=True
    )
    shutil.copy(VARIABLES, variables)
    https, ssh = _free_port(), _free_port()
    forward = f"hostfwd=tcp:127.0.0.1:{https}-:443,hostfwd=tcp:127.0.0.1:{ssh}-:22"
    command: Sequence[str] = [
        "qemu-system-x86_64", "-nodefaults", "-no-user-config", "-display", "none",
        "-machine", f"q35,smm=on,accel={accelerator}", "-global", "driver=cfi.pflash01,property=secure,value=on",
        "-cpu", "max" if accelerator == "tcg" else "host", "-smp", "2", "-m", str(MEMORY_MB),
        "-drive", f"if=pflash,format=raw,readonly=on,file={FIRMWARE}",
        "-drive", f"if=pflash,format=raw,file={variables}",
        "-drive", f"if=none,id=d0,file={overlay},format=qcow2,cache=unsafe", "-device", "virtio-blk-pci,drive=d0",
        "-netdev", f"user,id=n0,{forward}", "-device", "virtio-net-pci,netdev=n0", "-device", "virtio-rng-pci",
        "-serial", f"file:{console}",
    ]  # fmt: skip
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        yield Machine(https, ssh, console, identity, process)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(30)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
