"""The directories that nginx and the workers share: sockets of the workers, and bodies that nginx hands over as files.

Owns how the directories are made and checked, how a handed-over file is opened, and the sweep of files that nobody
took. Never reads a body; ``api.body_file`` does. Never imports jax.

Both directories belong to one account, the appliance's, with mode 0700, and nginx's workers run under it: nginx leaves
bodies with mode 0600, which no other account could read. A file is opened by its name below the open directory, without
following links and without waiting; it counts only if it is a regular file of that account with this one name, which is
then removed. So neither a forged path nor a swapped file leads anywhere else, and a file is taken once.
"""

import fcntl
import os
import re
import stat
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from api.errors import HandoffError
from appliance.config_proxy import ProxyConfig

STALE_S = 300.0
"""Age at which a body counts as left behind: far beyond the time a worker needs to begin with it."""

_NAME = re.compile(rb"\d{10}")
"""What nginx calls its temporary files. Source: nginx 1.22, ``ngx_create_temp_file``, format ``%010uD``."""
_IN_MEMORY = frozenset({"tmpfs", "ramfs"})
_GONE = "the body that the proxy handed over is gone; send the request again"
_OPEN = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class HandoffDirectoryError(RuntimeError):
    """A directory is not as the hand-off needs it; the message says what to do."""


class BodyDirectory:
    """The directory of bodies, opened once; gives each file away once."""

    def __init__(self, path: Path) -> None:
        """Open it.

        Raises:
            HandoffDirectoryError: it is missing, no directory, somebody else's or open to others.
        """
        check_directory(path)
        self._prefix = os.fsencode(path) + b"/"
        self._descriptor = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)

    def take(self, named: bytes) -> int:
        """A descriptor of the file that nginx named; afterwards the file has no name any more.

        Raises:
            HandoffError: it is not one of nginx's files in this directory, or is gone. The message names no path.
        """
        name = named.removeprefix(self._prefix)
        if len(name) == len(named) or not _NAME.fullmatch(name):
            raise HandoffError(
                "the proxy named a file outside its directory of bodies; nginx and the appliance disagree"
            )
        try:
            descriptor = os.open(name, _OPEN, dir_fd=self._descriptor)
        except FileNotFoundError:
            raise HandoffError(_GONE) from None
        except OSError as error:
            raise HandoffError(f"the body that the proxy handed over cannot be opened: {error.strerror}") from None
        problem = _problem(os.fstat(descriptor)) or self._forget(name)
        if problem:
            os.close(descriptor)
            raise HandoffError(problem)
        return descriptor

    def _forget(self, name: bytes) -> str:
        """Take the name away; why that failed, empty if it did not."""
        try:
            os.unlink(name, dir_fd=self._descriptor)
        except OSError:
            return _GONE
        return ""

    def close(self) -> None:
        """Close the directory."""
        os.close(self._descriptor)


def _problem(found: os.stat_result) -> str:
    """Why an open file is no body of nginx's; empty where it is one."""
    body = "the body that the proxy handed over"
    if not stat.S_ISREG(found.st_mode):
        return f"{body} is no regular file"
    if found.st_uid != os.geteuid():
        return f"{body} belongs to uid {found.st_uid}; nginx must run under the appliance's account, uid {os.geteuid()}"
    if found.st_nlink != 1:
        return f"{body} has {found.st_nlink} names; it must have one"
    return ""


@contextmanager
def directories(proxy: ProxyConfig) -> Generator[None]:
    """Make what nginx and the workers share and hold it for this appliance; nothing where there is no nginx.

    Raises:
        HandoffDirectoryError: a directory cannot be made or is not fit, another appliance holds the sockets, or bodies
            would be written to a disk.
    """
    if not proxy.directory:
        yield
        return
    lock = _prepare(proxy.sockets, proxy.bodies)
    try:
        yield
    finally:
        _remove_sockets(proxy.sockets)
        os.close(lock)


def _prepare(sockets: Path, bodies: Path) -> int:
    for path in (sockets, bodies):
        try:
            path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            path.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise HandoffDirectoryError(f"cannot make {path}: {error.strerror}; choose another under proxy") from error
        check_directory(path)
    check_memory(bodies)
    lock = os.open(sockets / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise HandoffDirectoryError(
            f"another appliance serves at the sockets in {sockets}; give each a proxy.directory of its own"
        ) from None
    _remove_sockets(sockets)
    return lock


def check_directory(path: Path) -> None:
    """Refuse a directory that others could put something into.

    Raises:
        HandoffDirectoryError: it is missing, no directory, somebody else's or open to others.
    """
    try:
        found = path.lstat()
    except OSError as error:
        raise HandoffDirectoryError(f"{path}: {error.strerror}; `zccp serve` makes it") from error
    if not stat.S_ISDIR(found.st_mode):
        raise HandoffDirectoryError(f"{path} is no directory; move it away or choose another under proxy")
    if found.st_uid != os.geteuid():
        raise HandoffDirectoryError(
            f"{path} belongs to uid {found.st_uid} and not {os.geteuid()}; nginx and the appliance must run under one"
            f" account: chown it, and print nginx's configuration under that account"
        )
    if found.st_mode & 0o077:
        raise HandoffDirectoryError(f"{path} is open to others (mode {found.st_mode & 0o777:o}); chmod 700 {path}")


def check_memory(bodies: Path) -> None:
    """Refuse a directory whose files would reach a disk.

    Raises:
        HandoffDirectoryError: it is on no file system in memory.
    """
    kind = _file_system_of(bodies)
    if kind not in _IN_MEMORY:
        raise HandoffDirectoryError(
            f"proxy.body_directory {bodies} is on {kind or 'an unknown file system'}, which would keep prompts on disk;"
            " choose a folder in /dev/shm"
        )


def _remove_sockets(sockets: Path) -> None:
    for path in sockets.glob("worker-*.sock"):
        path.unlink(missing_ok=True)


def sweep(proxy: ProxyConfig, now_s: float) -> int:
    """Remove bodies that have not changed for ``STALE_S``: those of requests whose nginx died with them.

    Args:
        proxy: where bodies lie, if there is an nginx at all.
        now_s: seconds since the epoch.

    Returns:
        The number of files removed.
    """
    removed = 0
    if not proxy.directory:
        return removed
    with suppress(FileNotFoundError), os.scandir(os.fsencode(proxy.bodies)) as entries:
        for entry in entries:
            if not _NAME.fullmatch(entry.name) or entry.is_dir(follow_symlinks=False):
                continue
            with suppress(FileNotFoundError):
                if now_s - entry.stat(follow_symlinks=False).st_mtime > STALE_S:
                    os.unlink(entry.path)  # noqa: PTH108 - the name is bytes
                    removed += 1
    return removed


def _file_system_of(path: Path) -> str:
    """The kind of file system a path lies on, as in ``tmpfs``; empty where the kernel does not say. Source: proc(5)."""
    device = path.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        fields, _, rest = line.partition(" - ")
        if fields.split()[2] == wanted:
            return rest.split()[0]
    return ""
