"""Deadlines: who has to be finished by when.

Owns the order of the deadlines of one scheduler's sequences. Reads no clock: the time is an argument.
"""

import heapq

from planner.sequence import Sequence, Status

_SLACK = 64
"""Deadlines of finished sequences that are kept before they are looked for."""


class Deadlines:
    """Sequences with a deadline; adding one and taking one out cost O(log n)."""

    __slots__ = ("_heap",)

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Sequence]] = []

    def __len__(self) -> int:
        """Deadlines that are noted, some of finished sequences among them."""
        return len(self._heap)

    def add(self, sequence: Sequence, num_live: int) -> None:
        """Note a sequence's deadline, if it has one; ``num_live`` sequences are not finished."""
        if sequence.deadline_s is None:
            return
        if len(self._heap) > 2 * num_live + _SLACK:
            self._heap = [entry for entry in self._heap if entry[2].status is not Status.FINISHED]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (sequence.deadline_s, sequence.order, sequence))

    def passed(self, now_s: float) -> list[tuple[Sequence, str]]:
        """Who should have been finished by now, and what is said of it; each sequence is given once."""
        found: list[tuple[Sequence, str]] = []
        while self._heap and self._heap[0][0] <= now_s:
            deadline_s, _, sequence = heapq.heappop(self._heap)
            error = (
                f"deadline of {deadline_s - sequence.arrival_s:.1f} s passed with {sequence.completion_len} of "
                f"{sequence.sampling.max_tokens} new ids; allow more time or ask for fewer"
            )
            found.append((sequence, error))
        return found
