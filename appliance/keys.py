"""API keys: their file, their life and their look-up.

Owns the format of a key, ``zk-<id>-<secret>``, and of the file that holds hashes of secrets. A secret is 256 random
bits, so one SHA-256 is enough: there is nothing to guess. Never stores, logs or shows a secret after it was made.
"""

import fcntl
import hashlib
import hmac
import os
import secrets
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import structlog
from msgspec import Struct

from api.ports import Tenant

PREFIX = b"zk-"
MAX_KEYS = 1000
_MAX_KEY_BYTES = 256
_NO_HASH = b"0" * 64

_log = structlog.get_logger("zccp.keys")


def wall_clock() -> float:
    """Seconds since 1970, for expiry dates alone."""
    return datetime.now(UTC).timestamp()


class KeyRecord(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One key at rest. Times are seconds since 1970; limits and ``expires`` of 0 are off."""

    id: str
    tenant: str
    sha256: str
    created: float
    expires: float = 0.0
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    admin: bool = False


class KeyFile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file of keys."""

    version: int = 1
    keys: tuple[KeyRecord, ...] = ()


class KeyFileError(RuntimeError):
    """The file of keys cannot be read or written, or a change to it is not possible."""


def read(path: Path) -> KeyFile:
    """The file of keys; an absent one is empty.

    Raises:
        KeyFileError: it cannot be read or is damaged.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return KeyFile()
    except OSError as error:
        raise KeyFileError(f"keys file {path}: {error.strerror}") from error
    try:
        keys = msgspec.json.decode(data, type=KeyFile)
    except msgspec.DecodeError as error:
        raise KeyFileError(f"keys file {path} is damaged: {error}; restore it from a backup") from error
    if keys.version != 1:
        raise KeyFileError(f"keys file {path} has version {keys.version}; this version reads 1")
    return keys


def write(path: Path, keys: KeyFile) -> None:
    """Replace the file of keys at once, mode 0600.

    Raises:
        KeyFileError: it cannot be written; the old one is untouched.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(keys), indent=1) + b"\n")
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise KeyFileError(f"keys file {path}: {error.strerror}; nothing was changed") from error


def add(
    path: Path,
    tenant: str,
    *,
    expires_in_s: float = 0.0,
    requests_per_minute: int = 0,
    tokens_per_minute: int = 0,
    admin: bool = False,
    now: Callable[[], float] = wall_clock,
) -> tuple[str, KeyRecord]:
    """Make a key and add it to the file.

    Returns:
        The key, which is shown this once and never again, and its record.

    Raises:
        KeyFileError: the tenant's name or a limit is not allowed, there are too many keys, or the file fails.
    """
    if not tenant or len(tenant) > 64 or not tenant.isprintable():
        raise KeyFileError(f"tenant {tenant!r}; it must have 1 to 64 printable characters")
    if min(requests_per_minute, tokens_per_minute, expires_in_s) < 0:
        raise KeyFileError("limits and expiry must not be negative; 0 turns one off")
    secret = secrets.token_hex(32)
    created = now()
    record = KeyRecord(
        id=secrets.token_hex(8),
        tenant=tenant,
        sha256=hashlib.sha256(secret.encode()).hexdigest(),
        created=created,
        expires=created + expires_in_s if expires_in_s else 0.0,
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        admin=admin,
    )
    with _exclusive(path):
        keys = read(path)
        if len(keys.keys) >= MAX_KEYS:
            raise KeyFileError(f"{len(keys.keys)} keys; at most {MAX_KEYS}: revoke some")
        write(path, KeyFile(keys=(*keys.keys, record)))
    return f"zk-{record.id}-{secret}", record


def revoke(path: Path, key_id: str) -> KeyRecord:
    """Remove a key from the file; running workers stop taking it with their next request.

    Raises:
        KeyFileError: there is no such key, or the file fails.
    """
    with _exclusive(path):
        keys = read(path)
        for record in keys.keys:
            if record.id == key_id:
                write(path, KeyFile(keys=tuple(kept for kept in keys.keys if kept.id != key_id)))
                return record
    raise KeyFileError(f"no key with id {key_id!r} in {path}; `zccp keys list` shows the ids")


class FileKeyRing:
    """Looks keys up in the file and follows its changes; implements ``api.ports.KeyRing``.

    The ring is open only while the file has never existed during this process's life. A file that disappears or is
    damaged later leaves the last known keys in force.
    """

    def __init__(self, path: Path, now: Callable[[], float] = wall_clock) -> None:
        """Read the file.

        Raises:
            KeyFileError: it exists and cannot be read.
        """
        self._path = path
        self._now = now
        self._version: tuple[int, int, int] | None = self._stat()
        self._records = {record.id: record for record in read(path).keys}

    @property
    def open(self) -> bool:
        """Whether no key is needed."""
        self._follow()
        return self._version is None

    def find(self, key: bytes) -> Tenant | None:
        """The tenant of a valid, unexpired key, compared in constant time; None for any other bytes."""
        self._follow()
        key_id, secret = _split(key)
        record = self._records.get(key_id)
        wanted = record.sha256.encode() if record is not None else _NO_HASH
        same = hmac.compare_digest(hashlib.sha256(secret).hexdigest().encode(), wanted)
        if record is None or not same or (record.expires and self._now() >= record.expires):
            return None
        return Tenant(
            name=record.tenant,
            key_id=record.id,
            admin=record.admin,
            requests_per_minute=record.requests_per_minute,
            tokens_per_minute=record.tokens_per_minute,
        )

    def tenants(self) -> dict[str, str]:
        """Key id -> tenant, for labels of metrics."""
        self._follow()
        return {record.id: record.tenant for record in self._records.values()}

    def _stat(self) -> tuple[int, int, int] | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return (found.st_ino, found.st_mtime_ns, found.st_size)

    def _follow(self) -> None:
        version = self._stat()
        if version is None or version == self._version:
            return
        self._version = version
        try:
            self._records = {record.id: record for record in read(self._path).keys}
        except KeyFileError as error:
            _log.error("keys not reloaded, the last known ones stay in force", cause=str(error))
        else:
            _log.info("keys reloaded", keys=len(self._records))


@contextmanager
def _exclusive(path: Path) -> Generator[None]:
    """Keep other writers of the file out; readers are never held up."""
    lock = path.with_name(f".{path.name}.lock")
    try:
        lock.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise KeyFileError(f"lock file {lock}: {error.strerror}; nothing was changed") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _split(key: bytes) -> tuple[str, bytes]:
    """Key id and secret; an id that no key has when the form is wrong."""
    if len(key) > _MAX_KEY_BYTES or not key.startswith(PREFIX):
        return "", key[:_MAX_KEY_BYTES]
    key_id, _, secret = key[len(PREFIX) :].partition(b"-")
    return key_id.decode("ascii", "replace"), secret
