"""Process life on Linux: age, open files, dying with the parent, the service manager, how a child ended.

Owns these calls so that nobody else needs ``ctypes`` or a raw datagram socket. Never imports jax.
"""

import ctypes
import os
import resource
import signal
import socket
import time
from pathlib import Path

DUMP_SIGNAL = signal.SIGUSR1
"""Asks a child to write to standard error in which file, line and function each of its threads is."""
RETIRE_SIGNAL = signal.SIGUSR2
"""Asks a worker to give way to the one that replaces it; see ``appliance.worker``."""

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to send SIGTERM to this process when its parent dies; exit at once if that has happened.

    Raises:
        SystemExit: the parent is gone already.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent_pid:
        raise SystemExit(1)


def raise_open_files() -> int:
    """Let this process open as many files as the system allows it at all; that number."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most


def most_open_files() -> int:
    """The number of files that a process which this one starts may open at most."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[1]


def resident_bytes(pid: int) -> int:
    """Memory of a process, shared pages included; 0 where there is none. Source: proc(5), ``statm``."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def age_s() -> float:
    """Seconds since this process was started, in steps of a clock tick. Source: proc(5), ``starttime`` in ``stat``."""
    fields = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")


def notify(address: str | None, *fields: str) -> None:
    """Tell the service manager something, as in ``READY=1``; nothing where there is none.

    Source: systemd's sd_notify(3). A manager that does not listen, or not within a second, is no reason to fail.
    """
    if not address:
        return
    target = "\0" + address[1:] if address.startswith("@") else address
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        sender.settimeout(1.0)
        try:
            sender.connect(target)
            sender.send("\n".join(fields).encode())
        except OSError:
            return


def ending(code: int) -> str:
    """How a child ended, in words, from its return code (negative: the signal)."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
