"""RunningLines: who has a slot, and how far each of them is.

Owns the free slots and three lines of running sequences: those whose prompt is being computed, those that decode, and
those that only wait for ids in flight. Reads neither pages nor clock.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

from planner.sequence import Sequence, Status


def _order(sequence: Sequence) -> int:
    return sequence.order


class RunningLines:
    """Sequences in slots. The lowest free slot is taken first, so that decode buckets stay small.

    ``prefilling`` and ``decoding`` stand oldest first; ``ending`` holds, in any order, those whose last id is in
    flight.
    """

    __slots__ = ("_free_slots", "decoding", "ending", "num_slots", "prefilling")

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free_slots = list(range(num_slots))
        self.prefilling: list[Sequence] = []
        self.decoding: list[Sequence] = []
        self.ending: list[Sequence] = []

    def __len__(self) -> int:
        return self.num_slots - len(self._free_slots)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.prefilling
        yield from self.decoding
        yield from self.ending

    @property
    def full(self) -> bool:
        """Whether no slot is free."""
        return not self._free_slots

    def enter(self, sequence: Sequence) -> None:
        """Give a sequence the lowest free slot; its prompt is computed next."""
        sequence.slot = heapq.heappop(self._free_slots)
        sequence.status = Status.RUNNING
        insort(self.prefilling, sequence, key=_order)

    def prompt_planned(self, sequence: Sequence) -> None:
        """The last chunk of a sequence's prompt is planned: it decodes from the next step on."""
        _take_out(self.prefilling, sequence)
        if sequence.scheduled_len >= sequence.max_len:
            self.ending.append(sequence)
        else:
            insort(self.decoding, sequence, key=_order)

    def settle(self) -> None:
        """Move those that decode and whose last possible id is in flight to ``ending``."""
        self.ending += [s for s in self.decoding if s.scheduled_len >= s.max_len]
        self.decoding = [s for s in self.decoding if s.scheduled_len < s.max_len]

    def newest(self, among: Callable[[Sequence], bool]) -> Sequence:
        """The sequence that was submitted last among those that still need their pages and are meant."""
        return max((s for line in (self.prefilling, self.decoding) for s in line if among(s)), key=_order)

    def leave(self, sequence: Sequence) -> None:
        """Take a sequence's slot back, wherever it stands."""
        if not _take_out(self.prefilling, sequence) and not _take_out(self.decoding, sequence):
            self.ending.remove(sequence)
        heapq.heappush(self._free_slots, sequence.slot)
        sequence.slot = -1

    def check(self) -> None:
        """Check every invariant of the lines; for tests and debugging.

        Raises:
            AssertionError: a slot or a sequence is in the wrong place.
        """
        taken = [s.slot for s in self]
        assert sorted([*self._free_slots, *taken]) == list(range(self.num_slots)), "a slot is free xor taken"
        for line in (self.prefilling, self.decoding):
            assert [s.order for s in line] == sorted({s.order for s in line}), "oldest first"
        for s in self:
            assert s.status is Status.RUNNING, "running"
            assert s.in_flight in (0, 1, 2), "the lag is one step"
        for s in self.prefilling:
            assert s.computed < len(s.ids), "something is left to compute"
            assert s.in_flight == 0, "all ids are known"
        for s in self.decoding:
            assert s.computed == s.scheduled_len - 1, "all but the last id are computed"
            assert s.scheduled_len < s.max_len, "something is left to sample"
        for s in self.ending:
            assert s.in_flight, "the last id is in flight"


def _take_out(line: list[Sequence], sequence: Sequence) -> bool:
    place = bisect_left(line, sequence.order, key=_order)
    if place < len(line) and line[place] is sequence:
        del line[place]
        return True
    return False
