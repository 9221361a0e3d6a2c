"""A child of the main process through all its lives: its process, what it says, how it ended, when it starts again.

Owns the process, its pidfd, the pipe of its notices and the times at which something is to be done with it. Lives on
the main process's thread and in its selector. Never decides by itself that a child starts again or must end, never
waits for one that lives, never logs.
"""

import os
import selectors
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from appliance.assignment import Assignment, Notice, read_notices, write_assignment
from appliance.host.process import DUMP_SIGNAL, RETIRE_SIGNAL, ending, resident_bytes
from appliance.supervision import Backoff, Silence

DUMP_S = 1.0
"""Time between the signal that asks where its threads are and SIGKILL."""

Role = Literal["worker", "engine"]


class Child:
    """One place among the processes of a run, and the process that holds it."""

    def __init__(
        self,
        role: Role,
        index: int,
        command: tuple[str, ...],
        environment: Mapping[str, str],
        selector: selectors.BaseSelector,
        door: int = 0,
    ) -> None:
        """Prepare; ``start`` begins the first life.

        Args:
            role: what the child is.
            index: its place; no two that live at the same time have the same.
            command: how it is started; the path of its assignment is appended.
            environment: its environment.
            selector: hears of notices and of the end; the key's data is this object.
            door: whose listening sockets it serves; passes on to the worker that replaces it.
        """
        self.role: Role = role
        self.index = index
        self.door = door
        self.name = f"{role}-{index}" if role == "worker" else role
        self.restarts = 0
        self.last = Notice(state="starting")
        self.ready_since_s: float | None = None
        self._command = command
        self._environment = dict(environment)
        self._selector = selector
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._notices = -1
        self._buffer = bytearray()
        self._backoff = Backoff()
        self._silence = Silence()
        self._heard = False
        self._start_s: float | None = None
        self._kill_s: float | None = None
        self._doom = ""
        self._weight = 0

    @property
    def is_alive(self) -> bool:
        """Whether there is a process, as far as is known."""
        return self._process is not None

    def weigh(self) -> tuple[int, int]:
        """Memory of the process now and when it was first weighed in its life; to be called once it is ready."""
        now = resident_bytes(self._process.pid) if self._process is not None else 0
        self._weight = self._weight or now
        return now, self._weight

    @property
    def wake_s(self) -> float:
        """When something is to be done with it at the latest: a start or the end of a grace; infinite for nothing."""
        return min((when for when in (self._start_s, self._kill_s) if when is not None), default=float("inf"))

    @property
    def is_planned(self) -> bool:
        """Whether it is to be started again."""
        return self._start_s is not None

    def start(self, assign: Callable[[int], Assignment], folder: Path, sockets: Sequence[int] = ()) -> None:
        """Begin a life.

        Args:
            assign: makes the assignment, given the descriptor of the notices' pipe.
            folder: where the assignment is written, under the child's name.
            sockets: descriptors of listening sockets, which the child gets under the same numbers.

        Raises:
            OSError: the system gives no process, pipe or file; nothing is left behind.
        """
        self._start_s = None
        process: subprocess.Popen[bytes] | None = None
        read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            path = folder / f"{self.name}.json"
            path.unlink(missing_ok=True)
            write_assignment(path, assign(write))
            process = subprocess.Popen(  # noqa: S603 - our own programs
                [*self._command, str(path)],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=(write, *sockets),
                process_group=0,
            )
            pidfd = os.pidfd_open(process.pid)
        except BaseException:
            if process is not None:
                process.kill()
                process.wait()
            os.close(read)
            raise
        finally:
            os.close(write)
        self._process, self._pidfd, self._notices = process, pidfd, read
        self.last, self.ready_since_s = Notice(state="starting"), None
        self._buffer.clear()
        self._silence, self._heard = Silence(), False
        self._kill_s, self._doom, self._weight = None, "", 0
        self._selector.register(self._pidfd, selectors.EVENT_READ, self)
        self._selector.register(self._notices, selectors.EVENT_READ, self)

    def handle(self, descriptor: int, now_s: float) -> str | None:
        """Deal with an event of one of its descriptors; how it ended, in words, if it has."""
        if descriptor == self._notices:
            self._hear(now_s)
        elif descriptor == self._pidfd:
            return self._reap(now_s)
        return None  # the rest of a life that an earlier event of the same turn has ended

    def silent_s(self, now_s: float) -> float:
        """Seconds without a sign of life since it was ready; to be asked once a turn of the main loop."""
        heard, self._heard = self._heard, False
        return self._silence.turn(now_s, heard=heard or self.ready_since_s is None)

    def retry_after_end(self, now_s: float) -> float:
        """Plan the next life after the last one has ended; the pause before it in seconds."""
        pause_s = self._backoff.pause_s(0.0 if self.ready_since_s is None else now_s - self.ready_since_s)
        self._start_s = now_s + pause_s
        self.ready_since_s = None
        return pause_s

    def is_due(self, now_s: float) -> bool:
        """Whether the next life is to begin."""
        return self._start_s is not None and now_s >= self._start_s

    def doom(self, cause: str, now_s: float) -> bool:
        """Begin to end it because of ``cause``: it writes where its threads are, then it is killed.

        Returns:
            Whether that begins now; False if it has begun before, or there is no process.
        """
        if self._process is None or self._doom:
            return False
        self._doom, self._kill_s = cause, now_s + DUMP_S
        self._process.send_signal(DUMP_SIGNAL)
        return True

    def kill_if_due(self, now_s: float) -> None:
        """Kill it if it is doomed and its grace is over."""
        if self._process is not None and self._kill_s is not None and now_s >= self._kill_s:
            self._kill_s = None
            self._process.kill()

    def retire(self) -> None:
        """Ask a living worker to take no more connections and to end with its last answer; it is not started again."""
        self._start_s = None
        if self._process is not None:
            self._process.send_signal(RETIRE_SIGNAL)

    def terminate(self) -> None:
        """Ask a living process to end; it is not started again."""
        self._start_s = None
        if self._process is not None:
            self._process.terminate()

    def kill(self, now_s: float) -> None:
        """End a living process at once, and wait for that."""
        if self._process is not None:
            self._process.kill()
            self._reap(now_s)

    def _hear(self, now_s: float) -> None:
        try:
            data = os.read(self._notices, 65536)
        except BlockingIOError:
            return
        if not data:
            self._unregister(self._notices)
            return
        self._heard = True
        self._buffer += data
        for notice in read_notices(self._buffer):
            self.last = notice
            if notice.state == "ready" and self.ready_since_s is None:
                self.ready_since_s = now_s

    def _reap(self, now_s: float) -> str:
        """Take the end of the process, after its last words."""
        assert self._process is not None
        self._hear(now_s)
        code = self._process.wait()
        for descriptor in (self._pidfd, self._notices):
            self._unregister(descriptor)
            os.close(descriptor)
        self._process, self._pidfd, self._notices = None, -1, -1
        self._kill_s = None
        reason = self._doom or (self.last.reason if self.last.state == "failed" else "")
        return ending(code) + (f": {reason}" if reason else "")

    def _unregister(self, descriptor: int) -> None:
        if descriptor in self._selector.get_map():
            self._selector.unregister(descriptor)
