"""What signals ask of the main process: to stop, to stop at once, or to read its configuration again.

Owns the handlers of SIGTERM, SIGINT and SIGHUP and the pipe with which they wake the main loop, which acts. A SIGHUP
because the terminal is gone on which this was started asks to stop; one that the starter had ignored (nohup) stays so.
"""

import os
import selectors
import signal
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType


class Wishes:
    """Signals that have come and have not been dealt with."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        """Wake ``selector``; the key's data is None."""
        self._selector = selector
        self._on_terminal = _has_terminal()
        self._reload = False
        self._wake = -1
        self.stops = 0

    @contextmanager
    def heard(self) -> Generator[None]:
        """Take signals for as long as the context lasts."""
        read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        old = {number: signal.signal(number, self._stop) for number in (signal.SIGTERM, signal.SIGINT)}
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            old[signal.SIGHUP] = signal.signal(signal.SIGHUP, self._hang_up)
        old_wake = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        self._wake = read
        self._selector.register(read, selectors.EVENT_READ, None)
        try:
            yield
        finally:
            signal.set_wakeup_fd(old_wake)
            for number, handler in old.items():
                signal.signal(number, handler)
            os.close(read)
            os.close(write)

    def wake(self) -> None:
        """Take note that the selector was woken."""
        os.read(self._wake, 4096)

    def take_reload(self) -> bool:
        """Whether a reload was asked for since the last call."""
        asked, self._reload = self._reload, False
        return asked

    def _stop(self, _number: int, _frame: FrameType | None) -> None:
        self.stops += 1

    def _hang_up(self, _number: int, _frame: FrameType | None) -> None:
        if self._on_terminal and not _has_terminal():
            self.stops += 1
        else:
            self._reload = True


def _has_terminal() -> bool:
    """Whether this process belongs to a terminal that is there."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True
