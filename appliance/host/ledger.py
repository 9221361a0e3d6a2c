"""The ledger: what each API key has used, shared by all processes of a node through one mapped file.

Owns the file's layout and its lock. A record a key holds this minute's requests and tokens, for the limits, and totals,
for accounting. Keys appear by their public id only. Implements ``api.ports.Quota``; never imports jax.

Layout, little endian: 64 bytes of header (magic u64, version u32, records u32), then records of 96 bytes: key id (32
bytes, NUL-padded), window start f64 (seconds of the monotonic clock), requests and tokens of the window u64, totals of
requests and tokens u64, last use f64. The tail is reserved.
"""

import fcntl
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from api.ports import QuotaState, Tenant

WINDOW_S = 60.0
MAX_RECORDS = 1024
_MAGIC = 0x5A43_4350_4C45_4447
_VERSION = 1
_HEADER = struct.Struct("<QII")
_HEADER_BYTES = 64
_RECORD = struct.Struct("<32sdQQQQd")
_RECORD_BYTES = 96


class LedgerError(RuntimeError):
    """The ledger file cannot be used; the message names it and the remedy."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What a key has used since its record was made."""

    key_id: str
    requests: int
    tokens: int


@dataclass(slots=True)
class _Record:
    key: bytes
    start_s: float
    requests: int
    tokens: int
    total_requests: int
    total_tokens: int
    used_s: float


class Ledger:
    """The ledger file, mapped. Every operation holds the file's lock for some microseconds."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Open the file, or make it with mode 0600.

        Raises:
            LedgerError: it cannot be opened or is no ledger of this version.
        """
        self._clock = clock
        self._guard = threading.Lock()
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise LedgerError(f"usage file {path}: {error.strerror}") from error
        try:
            with self._locked():
                self._map = _prepare(self._descriptor, path)
        except OSError as error:
            os.close(self._descriptor)
            raise LedgerError(f"usage file {path}: {error.strerror}") from error
        except LedgerError:
            os.close(self._descriptor)
            raise
        self._places: dict[bytes, int] = {}

    def take(self, tenant: Tenant, *, requests: int, tokens: int) -> QuotaState:
        """Count requests and tokens if they fit this minute's window; see ``api.ports.Quota.take``.

        Tokens fit while the window's are below the limit, so that one large request is not refused for ever.
        """
        if not tenant.key_id:
            return _state(tenant, _Record(b"", 0.0, 0, 0, 0, 0, 0.0), 0.0, allowed=True)
        with self._locked():
            now = self._clock()
            place, record = self._find(tenant.key_id, now)
            limit_r, limit_t = tenant.requests_per_minute, tenant.tokens_per_minute
            fits_requests = not limit_r or record.requests + requests <= limit_r
            fits_tokens = not limit_t or record.tokens + tokens <= limit_t or (record.tokens == 0 and tokens > limit_t)
            allowed = fits_requests and fits_tokens
            if allowed:
                record.requests += requests
                record.tokens += tokens
                record.total_requests += requests
                record.total_tokens += tokens
            self._store(place, record, now)
            return _state(tenant, record, now, allowed=allowed)

    def add_tokens(self, tenant: Tenant, tokens: int) -> None:
        """Count tokens after the fact; see ``api.ports.Quota.add_tokens``."""
        if not tenant.key_id or tokens <= 0:
            return
        with self._locked():
            now = self._clock()
            place, record = self._find(tenant.key_id, now)
            record.tokens += tokens
            record.total_tokens += tokens
            self._store(place, record, now)

    def usage(self) -> list[Usage]:
        """Totals of every key that has been used, by key id."""
        with self._locked():
            records = [self._load(place) for place in range(MAX_RECORDS)]
        used = [Usage(r.key.decode(), r.total_requests, r.total_tokens) for r in records if r.key]
        return sorted(used, key=lambda usage: usage.key_id)

    def close(self) -> None:
        """Unmap the file. Idempotent."""
        if self._descriptor >= 0:
            self._map.close()
            os.close(self._descriptor)
            self._descriptor = -1

    @contextmanager
    def _locked(self) -> Generator[None]:
        """Hold the file against other processes and against other threads of this one."""
        with self._guard:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.lockf(self._descriptor, fcntl.LOCK_UN)

    def _find(self, key_id: str, now: float) -> tuple[int, _Record]:
        """The record of a key with its window brought up to now; the longest unused one gives way to a new key."""
        key = key_id.encode()[:32]
        place = self._places.get(key, -1)
        record = self._load(place) if place >= 0 else None
        if record is None or record.key != key:
            place, record = self._search(key)
            self._places[key] = place
        if record.key != key:
            record = _Record(key, now, 0, 0, 0, 0, now)
        elif not 0.0 <= now - record.start_s < WINDOW_S:
            record.start_s, record.requests, record.tokens = now, 0, 0
        return place, record

    def _search(self, key: bytes) -> tuple[int, _Record]:
        oldest, oldest_s = 0, float("inf")
        for place in range(MAX_RECORDS):
            record = self._load(place)
            if record.key == key or not record.key:
                return place, record
            if record.used_s < oldest_s:
                oldest, oldest_s = place, record.used_s
        return oldest, self._load(oldest)

    def _load(self, place: int) -> _Record:
        key, *rest = _RECORD.unpack_from(self._map, _HEADER_BYTES + place * _RECORD_BYTES)
        return _Record(key.rstrip(b"\0"), *rest)

    def _store(self, place: int, record: _Record, now: float) -> None:
        _RECORD.pack_into(
            self._map,
            _HEADER_BYTES + place * _RECORD_BYTES,
            record.key,
            record.start_s,
            record.requests,
            record.tokens,
            record.total_requests,
            record.total_tokens,
            now,
        )


def _prepare(descriptor: int, path: Path) -> mmap.mmap:
    """Fill a new file, check an old one, and map it; called with the lock held."""
    size = _HEADER_BYTES + MAX_RECORDS * _RECORD_BYTES
    header = _HEADER.pack(_MAGIC, _VERSION, MAX_RECORDS)
    if os.fstat(descriptor).st_size == 0:
        os.posix_fallocate(descriptor, 0, size)
        os.pwrite(descriptor, header, 0)
    if os.pread(descriptor, _HEADER.size, 0) != header or os.fstat(descriptor).st_size != size:
        raise LedgerError(f"{path} is no usage file of version {_VERSION}; move it away to start a new one")
    return mmap.mmap(descriptor, size)


def _state(tenant: Tenant, record: _Record, now: float, *, allowed: bool) -> QuotaState:
    return QuotaState(
        allowed=allowed,
        limit_requests=tenant.requests_per_minute,
        remaining_requests=max(0, tenant.requests_per_minute - record.requests),
        limit_tokens=tenant.tokens_per_minute,
        remaining_tokens=max(0, tenant.tokens_per_minute - record.tokens),
        reset_s=max(0.0, WINDOW_S - (now - record.start_s)) if record.key else 0.0,
    )
