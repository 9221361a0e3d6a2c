"""What a run takes before its children start: the port, the run's directory, the segments.

Owns how each is taken and what is said when it cannot be had. Whatever a dead run left behind is removed here. Keeps no
state; never imports jax.
"""

import fcntl
import os
import shutil
import socket
from pathlib import Path

from appliance.config import SharedMemoryConfig
from appliance.host.segments import SegmentError, SegmentFile


class StartError(RuntimeError):
    """The appliance cannot start; the message names the cause and the remedy."""


def reserve_port(host: str, port: int) -> socket.socket:
    """Bind, without listening, the address that the workers will share; keeps everybody else off it.

    Raises:
        StartError: the address is in use, not allowed or not this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
            if port == 0:
                address = probe.getsockname()
        reservation = socket.socket(family, kind | socket.SOCK_CLOEXEC, protocol)
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reservation.bind(address)
    except OSError as error:
        raise StartError(
            f"cannot listen on {host} port {port}: {error.strerror or error};"
            " stop what uses it, or choose another with --port or server.port"
        ) from error
    return reservation


def make_run_directory(parent: Path, instance: str) -> tuple[Path, int]:
    """Make the directory of this run, 0700, and remove those of dead ones.

    Returns:
        The directory and a descriptor whose lock says that this run is alive.

    Raises:
        StartError: it cannot be made.
    """
    directory = parent / instance
    try:
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory.mkdir(mode=0o700)
        lock = os.open(directory / "alive", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise StartError(f"run directory {directory}: {error.strerror}; choose another paths.run") from error
    for other in parent.iterdir():
        if other != directory and _is_dead(other):
            shutil.rmtree(other, ignore_errors=True)
    return directory, lock


def _is_dead(directory: Path) -> bool:
    """Whether a run's directory has a lock that nobody holds; without a lock it may be starting just now."""
    try:
        descriptor = os.open(directory / "alive", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def make_segments(memory: SharedMemoryConfig, instance: str) -> SegmentFile:
    """Make the segment file of this run.

    Raises:
        StartError: the memory cannot be had.
    """
    try:
        return SegmentFile.create(instance, memory.segment_count, memory.segment_size_kb * 1024)
    except SegmentError as error:
        raise StartError(str(error)) from error
