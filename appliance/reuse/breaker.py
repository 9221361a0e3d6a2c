"""A breaker: after failures in a row, something is left alone for a while and then tried once.

Owns the counting and the waiting; the clock is an argument. Never logs and never raises.
"""

from collections.abc import Callable


class Breaker:
    """Closed while things work; open, for longer and longer times, while they do not. Used by one thread at a time."""

    def __init__(
        self, clock: Callable[[], float], *, failures: int = 3, first_s: float = 1.0, most_s: float = 30.0
    ) -> None:
        """Open after so many ``failures`` in a row; the first pause is ``first_s``, each one after it twice as long."""
        self._clock = clock
        self._failures = failures
        self._first_s = first_s
        self._most_s = most_s
        self._failed = 0
        self._pause_s = first_s
        self._until_s = 0.0
        self.is_open = False

    def allows(self) -> bool:
        """Whether to try now: always while closed, once a pause while open."""
        return not self.is_open or self._clock() >= self._until_s

    def succeeded(self) -> bool:
        """Note a success; whether that closed the breaker."""
        was_open, self.is_open = self.is_open, False
        self._failed, self._pause_s = 0, self._first_s
        return was_open

    def failed(self, *, certain: bool = False) -> bool:
        """Note a failure, ``certain`` to repeat itself or not; whether that opened the breaker."""
        self._failed += 1
        if not (self.is_open or certain or self._failed >= self._failures):
            return False
        if self.is_open:
            self._pause_s = min(2 * self._pause_s, self._most_s)
        self._until_s = self._clock() + self._pause_s
        was_open, self.is_open = self.is_open, True
        return not was_open
