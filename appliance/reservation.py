"""What a run takes before its children start: listening sockets, the run's directory, the segments.

Owns how each is taken and what is said when it cannot be had. Whatever a dead run left behind is removed here. Keeps no
state; never imports jax.
"""

import fcntl
import os
import shutil
import socket
from pathlib import Path

from appliance.config import ApplianceConfig
from appliance.host.address import socket_address
from appliance.host.segments import SegmentError, SegmentFile

BACKLOG = 4096
"""Connections that may wait for a worker; one more finds no place: at a Unix socket it fails at once."""


class StartError(RuntimeError):
    """The appliance cannot start; the message names the cause and the remedy."""


class Door:
    """The listening sockets of one worker, which the next one in its place takes over with all that waits there.

    The main process keeps them open. A socket that a worker opened itself would be closed with it, and the kernel would
    reset every connection that the worker had not accepted yet.
    """

    __slots__ = ("_sockets",)

    def __init__(self, reservation: socket.socket, private: Path | None) -> None:
        """Listen at the reserved port and, with nginx in front, at the path of a Unix socket.

        Raises:
            StartError: one of them cannot be had.
        """
        self._sockets = [listen_at_port(reservation)]
        if private is not None:
            try:
                self._sockets.append(listen_at_socket(private))
            except StartError:
                self.close()
                raise

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Of the socket at the port and, if there is one, of that for nginx."""
        return tuple(made.fileno() for made in self._sockets)

    def close(self) -> None:
        """Close them; what waits there is reset, and whoever comes next is sent elsewhere at once."""
        for made in self._sockets:
            made.close()


def reserve_port(host: str, port: int) -> socket.socket:
    """Bind, without listening, the address that the workers will share; keeps everybody else off it.

    Raises:
        StartError: the address is in use, not allowed or not this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            "127.0.0.1" if host == "localhost" else host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
            if port == 0:
                address = probe.getsockname()
        return _bound(family, address, again=False)
    except OSError as error:
        raise StartError(
            f"cannot listen on {host} port {port}: {error.strerror or error};"
            " stop what uses it, or choose another with --port or server.port"
        ) from error


def listen_at_port(reservation: socket.socket) -> socket.socket:
    """Listen at a reserved address; the kernel spreads connections over all sockets that do.

    Raises:
        StartError: the system does not allow it.
    """
    address = reservation.getsockname()
    try:
        listener = _bound(reservation.family, address, again=True)
        listener.listen(BACKLOG)
    except OSError as error:
        raise StartError(f"cannot listen at {address[0]} port {address[1]}: {error.strerror or error}") from error
    return listener


def _bound(family: int, address: tuple[object, ...], *, again: bool) -> socket.socket:
    """A socket at an address that others of this account may share.

    Args:
        family: of the address.
        address: where.
        again: whether connections that the socket accepts let the address be taken anew while they rest after their
            end, which takes a minute where this side ended them. A reservation, which accepts none, keeps other
            appliances off without.

    Raises:
        OSError: it cannot be had.
    """
    made = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(again))
        made.bind(address)
    except OSError:
        made.close()
        raise
    return made


def listen_at_socket(path: Path) -> socket.socket:
    """Listen at a Unix socket of mode 0600 for nginx; what a dead worker left there makes way.

    Raises:
        StartError: it cannot be made.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        path.unlink(missing_ok=True)
        with socket_address(path) as address:
            listener.bind(address)
        path.chmod(0o600)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise StartError(f"socket {path}: {error.strerror or error}; choose another proxy.directory") from error
    return listener


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


def make_segments(config: ApplianceConfig, instance: str) -> SegmentFile:
    """Make the segment file of this run.

    Raises:
        StartError: the memory cannot be had.
    """
    try:
        return SegmentFile.create(instance, config.num_segments, config.shared_memory.segment_size_kb * 1024)
    except SegmentError as error:
        raise StartError(str(error)) from error
