"""When a child is started again, when it counts as hung, and for how long healing counts as health.

Owns these three decisions and nothing else: no process, no clock, no thread. Times are seconds of the caller's
monotonic clock.
"""

RETRY_FIRST_S = 0.1
"""Pause before a child that ended is started again."""
RETRY_MOST_S = 5.0
"""Longest pause; it doubles from start to start."""
CALM_S = 30.0
"""A child that was ready for so long begins with the first pause again."""
HEALING_S = 600.0
"""How long the service manager is told that all is well while the engine is being brought back. Loading the largest
models from a cold disk takes minutes; after ten of them, a fresh start of everything is the better attempt."""
MAX_TURN_S = 2.0
"""Most silence that one turn of the listener may add; see ``Silence``."""


class Backoff:
    """The pauses between the lives of one child."""

    __slots__ = ("_next_s",)

    def __init__(self) -> None:
        self._next_s = RETRY_FIRST_S

    def pause_s(self, ready_for_s: float) -> float:
        """How long to wait after a life that was ready for ``ready_for_s``, 0 if it never was."""
        if ready_for_s >= CALM_S:
            self._next_s = RETRY_FIRST_S
        pause_s, self._next_s = self._next_s, min(2 * self._next_s, RETRY_MOST_S)
        return pause_s


class Silence:
    """How long a process has given no sign of life, as far as its listener was there to hear one.

    A listener that was stopped for an hour has not heard an hour of silence: each of its turns counts for at most
    ``MAX_TURN_S``, which is longer than any turn of a listener that runs.
    """

    __slots__ = ("_silent_s", "_turned_s")

    def __init__(self) -> None:
        self._silent_s = 0.0
        self._turned_s: float | None = None

    def turn(self, now_s: float, *, heard: bool) -> float:
        """Seconds of silence after one turn of the listener, in which it ``heard`` something or nothing."""
        passed_s = 0.0 if self._turned_s is None else now_s - self._turned_s
        self._turned_s = now_s
        self._silent_s = 0.0 if heard else self._silent_s + min(passed_s, MAX_TURN_S)
        return self._silent_s


class Healing:
    """Whether a service manager may still be told that all is well."""

    __slots__ = ("_since_s",)

    def __init__(self) -> None:
        self._since_s: float | None = None

    def is_well(self, now_s: float, *, serving: bool) -> bool:
        """True while requests are served, and for ``HEALING_S`` after they ceased to be."""
        if serving:
            self._since_s = None
            return True
        if self._since_s is None:
            self._since_s = now_s
        return now_s - self._since_s < HEALING_S
