"""Shared-memory context segments: the only channel in which token ids cross from a worker to the engine and back.

Owns the layout of a segment, the file that holds all segments of a node and the free list of a worker's share of them.
Reads and writes memory through ``memoryview``; never imports numpy or jax and never locks across processes.

One file in the POSIX shared-memory file system holds ``count`` segments, each ``stride_bytes`` apart. All numbers are
little endian (checked at import: the token view is native)::

    offset   bytes    field
    0        8        magic u64 0xCAFEBABE
    8        4        version u32 1
    12       4        padding
    16       8        context_id u64
    24       8        timestamp_ns u64
    32       96       reserved
    128      524288   token ids, int32 [131072]: the prompt, then the completion
    524416   4        prompt_len u32
    524420   4        completion_len u32
    524424   4        device_id u32
    524428   244      reserved

Who writes what, and why no lock is needed: the worker that owns a segment writes the prompt and ``prompt_len`` before
it sends ``Submit``; afterwards only the engine writes, ids first and then ``completion_len``, before it sends
``Advance`` or ``Finish``. The reader acts on the length in the message, not on the one in memory. Sending takes and
releases the socket's lock in the kernel and receiving takes it again; that pair is a release and an acquire on x86-64
and on aarch64 alike, so ids that a message covers are visible to its receiver. The length in memory is for diagnosis.
"""

import contextlib
import fcntl
import mmap
import os
import struct
import sys
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

MAGIC = 0xCAFEBABE
VERSION = 1
TOKENS_OFFSET = 128
SEGMENT_TOKENS = 131_072
METADATA_OFFSET = TOKENS_OFFSET + 4 * SEGMENT_TOKENS
METADATA_BYTES = 256
PAGE_BYTES = 4096
MIN_STRIDE_BYTES = -(-(METADATA_OFFSET + METADATA_BYTES) // PAGE_BYTES) * PAGE_BYTES

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the kernel's shared-memory file system, not a temporary folder
FILE_PREFIX = "zccp-"
FILE_SUFFIX = ".segments"

_IDENTITY = struct.Struct("<QI")
_CONTEXT = struct.Struct("<QQ")
_CONTEXT_OFFSET = 16
_U32 = struct.Struct("<I")
_LENGTHS = struct.Struct("<III")
_COMPLETION_LEN_OFFSET = METADATA_OFFSET + 4

if sys.byteorder != "little" or array("i").itemsize != 4:  # pragma: no cover - no such host is supported
    raise ImportError("segments need a little-endian host with 32-bit int; this one is neither supported nor tested")


class SegmentError(RuntimeError):
    """A segment file cannot be made, attached or used; the message says what differs and what to do."""


class SegmentsExhaustedError(SegmentError):
    """All segments of this worker are in use; the request may come again once another one has finished."""


@dataclass(frozen=True, slots=True)
class SegmentRange:
    """The segments ``[first, first + count)``."""

    first: int
    count: int

    def __contains__(self, segment: object) -> bool:
        return isinstance(segment, int) and self.first <= segment < self.first + self.count


def share(count: int, workers: int, worker: int) -> SegmentRange:
    """The contiguous segments that worker ``worker`` of ``workers`` owns; the first ones get what is left over.

    Raises:
        SegmentError: there are fewer segments than workers, or no such worker.
    """
    if not 0 <= worker < workers:
        raise SegmentError(f"worker {worker} of {workers} does not exist; workers count from 0")
    each, rest = divmod(count, workers)
    if each == 0:
        raise SegmentError(f"{count} segments for {workers} workers; raise shared_memory.segment_count")
    return SegmentRange(worker * each + min(worker, rest), each + (1 if worker < rest else 0))


class SegmentFile:
    """All segments of a node, mapped into this process.

    Made once by the main process, which keeps it open, and attached by name in the others. The maker holds a lock on
    the file for as long as it lives, which is how ``remove_stale`` tells a dead instance's file from a living one's.
    """

    def __init__(self, path: Path, descriptor: int, count: int, stride_bytes: int, *, owner: bool) -> None:
        """Map an open file; use ``create`` or ``attach``."""
        self.path = path
        self.count = count
        self.stride_bytes = stride_bytes
        self._descriptor = descriptor
        self._owner = owner
        self._map = mmap.mmap(descriptor, count * stride_bytes)
        self._bytes = memoryview(self._map)
        self._tokens = [
            self._bytes[start : start + 4 * SEGMENT_TOKENS].cast("i")
            for start in range(TOKENS_OFFSET, count * stride_bytes, stride_bytes)
        ]

    @classmethod
    def create(cls, instance: str, count: int, stride_bytes: int, directory: Path = SHARED_MEMORY) -> Self:
        """Make, allocate and initialise the file of one instance, mode 0600, and lock it.

        Args:
            instance: a name that no living instance has; part of the file name.
            count: number of segments.
            stride_bytes: distance of two segments, a multiple of 4096 and at least ``MIN_STRIDE_BYTES``.
            directory: the shared-memory file system.

        Raises:
            SegmentError: a number breaks its rule, the name is taken or the memory cannot be had.
        """
        if count < 1:
            raise SegmentError(f"{count} segments; at least 1 is needed")
        if stride_bytes % PAGE_BYTES or stride_bytes < MIN_STRIDE_BYTES:
            raise SegmentError(
                f"a segment of {stride_bytes} bytes; it must be a multiple of {PAGE_BYTES} and at least"
                f" {MIN_STRIDE_BYTES} bytes"
            )
        path = directory / f"{FILE_PREFIX}{instance}{FILE_SUFFIX}"
        descriptor = _create_locked(path)
        try:
            os.posix_fallocate(descriptor, 0, count * stride_bytes)
        except OSError as error:
            path.unlink(missing_ok=True)
            os.close(descriptor)
            raise SegmentError(
                f"{count} segments of {stride_bytes} bytes do not fit in {directory}: {error.strerror};"
                " lower shared_memory.segment_count or give the file system more memory"
            ) from error
        made = cls(path, descriptor, count, stride_bytes, owner=True)
        for segment in range(count):
            _IDENTITY.pack_into(made._bytes, segment * stride_bytes, MAGIC, VERSION)
        return made

    @classmethod
    def attach(cls, path: Path, count: int, stride_bytes: int) -> Self:
        """Map the file of a living instance and check every header.

        Raises:
            SegmentError: the file is missing, has another size, or a header has another magic or version.
        """
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise SegmentError(f"segment file {path}: {error.strerror}; the main process makes it at start") from error
        actual = os.fstat(descriptor).st_size
        if actual != count * stride_bytes:
            os.close(descriptor)
            raise SegmentError(
                f"segment file {path} has {actual} bytes where {count} x {stride_bytes} are expected;"
                " restart the appliance so that all processes read one configuration"
            )
        attached = cls(path, descriptor, count, stride_bytes, owner=False)
        for segment in range(count):
            magic, version = _IDENTITY.unpack_from(attached._bytes, segment * stride_bytes)
            if (magic, version) != (MAGIC, VERSION):
                attached.close()
                raise SegmentError(
                    f"segment {segment} of {path} has magic {magic:#x} version {version}; this version reads"
                    f" {MAGIC:#x} version {VERSION}"
                )
        return attached

    def write_prompt(
        self, segment: int, ids: Sequence[int], context_id: int, timestamp_ns: int, device: int = 0
    ) -> None:
        """Put a prompt into a segment that the caller owns and reset its completion.

        Args:
            segment: index in this file.
            ids: the prompt, at least one id.
            context_id: a number for diagnosis, 64 bits.
            timestamp_ns: when, on a monotonic clock.
            device: index of the device that will read it.

        Raises:
            SegmentError: the prompt is empty or longer than a segment.
        """
        length = len(ids)
        if not 0 < length <= SEGMENT_TOKENS:
            raise SegmentError(f"a prompt of {length} ids; a segment takes 1 to {SEGMENT_TOKENS}")
        self._tokens[segment][:length] = memoryview(ids if isinstance(ids, array) else array("i", ids))
        base = segment * self.stride_bytes
        _CONTEXT.pack_into(self._bytes, base + _CONTEXT_OFFSET, context_id, timestamp_ns)
        _LENGTHS.pack_into(self._bytes, base + METADATA_OFFSET, length, 0, device)

    def prompt_len(self, segment: int) -> int:
        """Ids of the prompt in a segment, as its owner wrote it."""
        return _U32.unpack_from(self._bytes, segment * self.stride_bytes + METADATA_OFFSET)[0]

    def completion_len(self, segment: int) -> int:
        """Completion ids that the engine has published in a segment."""
        return _U32.unpack_from(self._bytes, segment * self.stride_bytes + _COMPLETION_LEN_OFFSET)[0]

    def read_ids(self, segment: int, start: int, stop: int) -> list[int]:
        """Ids ``[start, stop)`` of a segment, counted from the first id of the prompt.

        Raises:
            SegmentError: the range leaves the segment.
        """
        if not 0 <= start <= stop <= SEGMENT_TOKENS:
            raise SegmentError(f"ids [{start}, {stop}) of a segment that holds {SEGMENT_TOKENS}")
        return self._tokens[segment][start:stop].tolist()

    def publish_completion(self, segment: int, completion_len: int) -> None:
        """Say how many completion ids are in a segment, once they are there."""
        _U32.pack_into(self._bytes, segment * self.stride_bytes + _COMPLETION_LEN_OFFSET, completion_len)

    @property
    def memory(self) -> memoryview:
        """All segments, in the order of their numbers."""
        return self._bytes

    def tokens(self, segment: int) -> memoryview:
        """The token array of a segment, int32 [131072], shared with every process that maps the file."""
        return self._tokens[segment]

    def close(self) -> None:
        """Unmap; the maker also removes the file. What still uses the memory keeps it until it ends. Idempotent."""
        if self._descriptor < 0:
            return
        with contextlib.suppress(BufferError):
            for view in self._tokens:
                view.release()
            self._bytes.release()
            self._map.close()
        if self._owner:
            self.path.unlink(missing_ok=True)
        os.close(self._descriptor)
        self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class SegmentAllocator:
    """The free list of one worker's segments; constant time, used by one thread of one process."""

    def __init__(self, owned: SegmentRange) -> None:
        """Own a range in which everything is free."""
        self.owned = owned
        self._free = deque(range(owned.first, owned.first + owned.count))
        self._taken = bytearray(owned.count)

    @property
    def free(self) -> int:
        """Segments that can be taken now."""
        return len(self._free)

    def take(self, number: int) -> tuple[int, ...]:
        """Take ``number`` segments, all or none; the longest unused first.

        Raises:
            SegmentsExhaustedError: fewer are free.
        """
        if number > len(self._free):
            raise SegmentsExhaustedError(
                f"{number} segments wanted, {len(self._free)} of {self.owned.count} free; retry when a request has"
                " finished, or raise shared_memory.segment_count"
            )
        taken = tuple(self._free.popleft() for _ in range(number))
        for segment in taken:
            self._taken[segment - self.owned.first] = 1
        return taken

    def give_back(self, segment: int) -> None:
        """Return one segment.

        Raises:
            SegmentError: it is not this worker's or is already free.
        """
        if segment not in self.owned or not self._taken[segment - self.owned.first]:
            raise SegmentError(f"segment {segment} is not taken from [{self.owned.first}, +{self.owned.count})")
        self._taken[segment - self.owned.first] = 0
        self._free.append(segment)


def remove_stale(directory: Path = SHARED_MEMORY) -> list[Path]:
    """Remove segment files whose instance is dead: those of this user that nobody holds the lock of.

    Returns:
        The files removed.
    """
    removed: list[Path] = []
    for path in sorted(directory.glob(f"{FILE_PREFIX}*{FILE_SUFFIX}")):
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            if os.fstat(descriptor).st_uid == os.geteuid():
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)
                removed.append(path)
        except BlockingIOError:
            pass
        finally:
            os.close(descriptor)
    return removed


def _create_locked(path: Path) -> int:
    """Make a file and hold its lock; retried where a sweep removed it between the two."""
    for _ in range(100):
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise SegmentError(f"segment file {path}: {error.strerror}; is another instance starting?") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):  # noqa: PTH116 - both sides as stat results
                return descriptor
        except (BlockingIOError, FileNotFoundError):
            pass
        os.close(descriptor)
    raise SegmentError(f"segment file {path} vanished again and again; something else removes files there")
