"""Assignment: what the main process tells each of its children at start, and what it hears from them.

Owns the form of that message, of the lines a child sends back, and of the text that says why there is no engine. The
assignment travels as a file of mode 0600 in the directory of the run, since the configuration may hold secrets that a
command line would show. Never imports jax.
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from appliance.config import ApplianceConfig


class Assignment(Struct, frozen=True, kw_only=True):
    """One child's part in this run.

    ``index`` is the place that the child takes: of a worker, which share of the segments is its own and under which
    name it counts; there is one place more than workers, so that the next one can start before the last one has ended.
    ``port`` is the one in use, also where the configuration asks for any. ``notify_fd`` is the pipe for ``Notice``
    lines, ``listeners`` are a worker's listening sockets: the one at the port and, if there is one, that for nginx.
    ``epoch`` rises with each engine start.
    """

    role: Literal["worker", "engine"]
    index: int
    parent_pid: int
    notify_fd: int
    epoch: int
    port: int
    segments_file: str
    socket: str
    metrics: str
    model: str
    config: ApplianceConfig
    listeners: tuple[int, ...] = ()

    @property
    def stride_bytes(self) -> int:
        """Distance of two segments."""
        return self.config.shared_memory.segment_size_kb * 1024

    @property
    def name(self) -> str:
        """The process as it appears in logs."""
        return f"{self.role}-{self.index}" if self.role == "worker" else self.role


class Notice(Struct, frozen=True, kw_only=True):
    """A child's news: its state and, where it helps people, why."""

    state: Literal["starting", "ready", "draining", "lost", "failed"]
    reason: str = ""


_MOST_CAUSE = 500
"""Most characters of a cause, which answers of the API carry."""

_notice = msgspec.json.Decoder(Notice)


def write_assignment(path: Path, assignment: Assignment) -> None:
    """Write a new file of mode 0600."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(assignment))


def read_assignment(path: Path) -> Assignment:
    """Read what the main process wrote."""
    return msgspec.json.decode(path.read_bytes(), type=Assignment)


def send_notice(descriptor: int, notice: Notice) -> None:
    """Write one line to the main process; a parent that is gone or does not read is no reason to fail."""
    try:
        os.write(descriptor, msgspec.json.encode(notice) + b"\n")
    except OSError:
        return


def send_pulse(descriptor: int) -> None:
    """Give the main process a sign of life that says nothing else: an empty line."""
    with suppress(OSError):
        os.write(descriptor, b"\n")


def read_notices(buffer: bytearray) -> list[Notice]:
    """Take the complete lines out of ``buffer``; an empty or damaged one is skipped."""
    notices: list[Notice] = []
    while (end := buffer.find(b"\n")) >= 0:
        with suppress(msgspec.DecodeError):
            notices.append(_notice.decode(bytes(buffer[:end])))
        del buffer[: end + 1]
    return notices


def write_cause(socket: Path, cause: str) -> None:
    """Say why no engine listens at ``socket``, for whoever tries to connect; empty takes it back.

    Readers see the old text or the new one. A disk that is full is no reason to fail.
    """
    place, fresh = socket.with_suffix(".cause"), socket.with_suffix(".new")
    with suppress(OSError):
        if cause:
            fresh.write_text(cause[:_MOST_CAUSE], encoding="utf-8")
            fresh.replace(place)
        else:
            place.unlink(missing_ok=True)


def read_cause(socket: Path) -> str:
    """What ``write_cause`` said last; empty where there is nothing to say."""
    try:
        return socket.with_suffix(".cause").read_text(encoding="utf-8")
    except OSError:
        return ""
