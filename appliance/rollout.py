"""A rolling replacement of all workers: the next one starts beside the old one, and only then the old one gives way.

Owns the order and what is under way. Lives on the main process's thread and is asked once a turn of its loop; makes no
process by itself. Never logs.

A worker's place, which is its share of the segments and its name in the metrics, stays its own to its end. There is one
place more than workers: the newcomer takes the free one, and that of the worker which it replaces is the next free one.
"""

from collections import deque
from collections.abc import Callable, Sequence

from appliance.children import Child


class Rollout:
    """One replacement of every worker, one after the other."""

    def __init__(self, workers: Sequence[Child], make: Callable[[int, int], Child]) -> None:
        """Plan; each turn does what is due.

        Args:
            workers: those that serve now.
            make: a new child, not started, for a free place and a door.
        """
        self._left = deque(workers)
        self._make = make
        taken = {worker.index for worker in workers}
        self._free = next(place for place in range(len(workers) + 1) if place not in taken)
        self._kill_s = float("inf")
        self.newcomer: Child | None = None
        self.leaving: Child | None = None
        self.replaced = 0

    @property
    def is_done(self) -> bool:
        """Whether every worker has been replaced and the last one has ended."""
        return not self._left and self.leaving is None

    @property
    def children(self) -> list[Child]:
        """Those of its processes that are not among the workers that serve."""
        return [child for child in (self.newcomer, self.leaving) if child is not None]

    @property
    def wake_s(self) -> float:
        """When something is to be done even if no child says anything; infinite for never."""
        return self._kill_s

    def next_newcomer(self) -> Child | None:
        """The worker to be started now, None while there is no free place or nobody left to replace."""
        if self.newcomer is not None or self.leaving is not None or not self._left:
            return None
        self.newcomer = self._make(self._free, self._left[0].door)
        return self.newcomer

    def take_over(self, now_s: float, within_s: float) -> tuple[Child, Child] | None:
        """Let a newcomer that is ready take the place among those that serve; the old one gives way.

        Args:
            now_s: the caller's clock.
            within_s: after how long an old one that has not ended is killed.

        Returns:
            The old one and the newcomer, None if nothing changes now.
        """
        new = self.newcomer
        if new is None or not new.is_alive or new.last.state != "ready":
            return None
        old = self._left.popleft()
        old.retire()
        self.newcomer, self.replaced = None, self.replaced + 1
        self._free = old.index
        if old.is_alive:
            self.leaving, self._kill_s = old, now_s + within_s
        return old, new

    def end_late(self, now_s: float) -> Child | None:
        """Have an old one killed whose time is over, and say which; its end is heard of like any other."""
        if self.leaving is None or now_s < self._kill_s:
            return None
        self._kill_s = float("inf")
        self.leaving.doom("it did not end in time", now_s)
        return self.leaving

    def has_left(self, child: Child) -> bool:
        """Note the end of a process; whether it was that of a worker that gave way."""
        if child is not self.leaving:
            return False
        self.leaving, self._kill_s = None, float("inf")
        return True

    def is_replaced_next(self, child: Child) -> bool:
        """Whether a newcomer for this worker's door is under way, so that it need not be started again."""
        return self.newcomer is not None and self._left[0] is child
