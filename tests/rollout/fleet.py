"""Hosts for rollout tests: containers of Debian, each with systemd, its own sshd and its own network, on one bridge.

Owns the network namespaces, the overlays and the containers of one run, and takes them down again. Needs root,
``systemd-nspawn`` and a root file system, which ``tests/rollout/materials.py`` makes. Everything listens within
namespaces, so that nothing of it is reachable from outside.
"""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

CGROUPS = (Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup"))
NETWORK = "10.77.0"
CONTROL_ADDRESS = f"{NETWORK}.1"
MASKED = (
    "systemd-networkd.service", "systemd-networkd.socket", "systemd-networkd-wait-online.service",
    "systemd-resolved.service", "systemd-timesyncd.service", "apt-daily.timer", "apt-daily-upgrade.timer",
    "dpkg-db-backup.timer", "e2scrub_all.timer", "fstrim.timer",
)  # fmt: skip
BOOT_S = 60.0
STOP_S = 30.0


def missing() -> str:
    """Why there can be no fleet here, empty if there can."""
    if os.geteuid() != 0:
        return "containers need root"
    if not _cgroup_root():
        return "there is no cgroup2"
    lacking = [name for name in ("systemd-nspawn", "ip", "ssh", "ssh-keygen") if shutil.which(name) is None]
    return f"not installed: {', '.join(lacking)}" if lacking else ""


@dataclass(frozen=True)
class Host:
    """One container: its name in the inventory, address, folder and the names of what it holds."""

    name: str
    number: int
    folder: Path
    space: str

    @property
    def address(self) -> str:
        """Its address on the fleet's bridge."""
        return address_of(self.number)

    @property
    def tree(self) -> Path:
        """Its root file system."""
        return self.folder / "root"


def address_of(number: int) -> str:
    """The address of the host of a number; the first is 1."""
    return f"{NETWORK}.{10 + number}"


class Fleet:
    """The running hosts of one test; use as a context."""

    def __init__(self, names: Sequence[str], base: Path, folder: Path, shared: Mapping[Path, str]) -> None:
        """Plan them.

        Args:
            names: inventory names.
            base: root file system that all start from; it is not changed.
            folder: where overlays, logs and the key go.
            shared: directories of this machine, and where each host sees them, read-only.
        """
        self._prefix = f"zf{os.getpid()}"
        self._base = base
        self._folder = folder
        self._shared = shared
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self.control = f"{self._prefix}c"
        self.key = folder / "ssh_key"
        self.hosts = [Host(name, n, folder / name, f"{self._prefix}h{n}") for n, name in enumerate(names, 1)]

    def __enter__(self) -> Self:
        """Start all hosts and wait until each takes ssh."""
        try:
            run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.key))
            self._make_network()
            for host in self.hosts:
                self._prepare(host)
                self._boot(host)
            for host in self.hosts:
                self._wait(host)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the hosts in order, unmount and remove what they held."""
        for process in self._running.values():
            process.send_signal(signal.SIGTERM)
        for process in self._running.values():
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._running.clear()
        for host in self.hosts:
            subprocess.run(["umount", "--recursive", host.tree], capture_output=True, check=False)
            subprocess.run(["ip", "netns", "delete", host.space], capture_output=True, check=False)
            _remove_cgroups(self._cgroup(host))
            shutil.rmtree(host.folder, ignore_errors=True)
        subprocess.run(["ip", "netns", "delete", self.control], capture_output=True, check=False)

    def inside(self, *command: str) -> tuple[str, ...]:
        """A command line that runs in the fleet's network, as from an operator's machine."""
        return ("ip", "netns", "exec", self.control, *command)

    def host(self, name: str) -> Host:
        """The host of a name."""
        return next(host for host in self.hosts if host.name == name)

    def on(self, name: str, command: str) -> str:
        """What a shell command on a host prints.

        Raises:
            AssertionError: it fails; the message has its words.
        """
        return run(*self.inside("ssh", *self.ssh_options(), f"root@{self.host(name).address}", command))

    def ssh_options(self) -> tuple[str, ...]:
        """Options of ssh; the hosts are as old as the test, so their keys are taken as they come."""
        trust = ("-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR")
        return ("-i", str(self.key), "-o", "IdentitiesOnly=yes", "-o", "ConnectTimeout=5", *trust)

    def _make_network(self) -> None:
        run("ip", "netns", "add", self.control)
        for command in (
            "link set lo up",
            "link add br0 type bridge",
            f"address add {CONTROL_ADDRESS}/24 dev br0",
            "link set br0 up",
        ):
            run("ip", "-n", self.control, *command.split())

    def _prepare(self, host: Host) -> None:
        """Its network and its root file system."""
        run("ip", "netns", "add", host.space)
        port = f"port{host.number}"
        peer = ("peer", "name", "host0", "netns", host.space)
        run("ip", "-n", self.control, "link", "add", port, "type", "veth", *peer)
        run("ip", "-n", self.control, "link", "set", port, "master", "br0", "up")
        for command in (f"address add {host.address}/24 dev host0", "link set host0 up", "link set lo up"):
            run("ip", "-n", host.space, *command.split())
        for part in ("root", "upper", "work"):
            (host.folder / part).mkdir(parents=True)
        layers = f"lowerdir={self._base},upperdir={host.folder / 'upper'},workdir={host.folder / 'work'}"
        run("mount", "-t", "overlay", "overlay", "-o", layers, str(host.tree))
        etc = host.tree / "etc"
        (etc / "fstab").write_text("")
        (etc / "hostname").write_text(f"{host.name}\n")
        for unit in MASKED:
            link = etc / "systemd/system" / unit
            link.unlink(missing_ok=True)
            link.symlink_to("/dev/null")
        keys = host.tree / "root/.ssh"
        keys.mkdir(mode=0o700, exist_ok=True)
        shutil.copy(self.key.with_suffix(".pub"), keys / "authorized_keys")

    def _boot(self, host: Host) -> None:
        cgroup = self._cgroup(host)
        cgroup.mkdir()
        binds = [f"--bind-ro={source}:{target}" for source, target in self._shared.items()]
        command = [
            "systemd-nspawn", "--quiet", "--register=no", "--keep-unit", f"--machine={host.space}",
            f"--network-namespace-path=/run/netns/{host.space}", f"--directory={host.tree}", *binds, "--console=pipe",
            "--boot",
        ]  # fmt: skip
        join = f'echo $$ > {cgroup}/cgroup.procs; exec "$@"'
        with (self._folder / f"{host.name}.log").open("wb") as log:
            self._running[host.name] = subprocess.Popen(
                ["nice", "-n", "5", "sh", "-c", join, "sh", *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={"PATH": os.defpath + ":/usr/sbin:/sbin", "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1"},
            )

    def _wait(self, host: Host) -> None:
        deadline = time.monotonic() + BOOT_S
        while True:
            ended = self._running[host.name].poll()
            log = (self._folder / f"{host.name}.log").read_text(errors="replace")[-2000:]
            assert ended is None, f"{host.name} ended with {ended}: {log}"
            command = self.inside(
                "ssh", *self.ssh_options(), f"root@{host.address}", "systemctl is-system-running --wait"
            )
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.stdout.strip() in {"running", "degraded"}:
                return
            assert time.monotonic() < deadline, f"{host.name} takes no ssh: {done.stderr} {log}"
            time.sleep(0.2)

    def _cgroup(self, host: Host) -> Path:
        return Path(_cgroup_root()) / host.space


def run(*command: str, timeout_s: float = 600.0) -> str:
    """What a command prints; it must succeed."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, f"{' '.join(command[:6])} ...: {done.stdout[-2000:]} {done.stderr[-4000:]}"
    return done.stdout


def _cgroup_root() -> str:
    return next((str(path) for path in CGROUPS if (path / "cgroup.procs").exists()), "")


def _remove_cgroups(top: Path) -> None:
    for folder in sorted((path for path in top.glob("**/") if path.is_dir()), key=lambda path: -len(path.parts)):
        try:
            folder.rmdir()
        except OSError:
            continue
