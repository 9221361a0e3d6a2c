"""Outlook: how many positions the running sequences are going to need, if their predictions hold.

Owns that sum over time. Reads sequences; takes no page and decides nothing by itself. A prediction is advice: it may be
missing, wrong or no number at all, and ``expected_end`` makes a length of it that the sequence can really have.

Everybody decodes one id a step and gives its pages back at its end, so the need rises between two ends and falls at
each: it is largest just before somebody ends. With the sequences in the order of their ends, the need just before an
end is the sum over those that end then or later; a candidate adds its own need to every end before its own. Counting
predicted lengths at their ends alone would add up needs that never meet.

A candidate is looked at only as many ids ahead as it has now (``candidate_need``). Should the pool run out later than
that, it has been given at least an id for each that a preemption makes it compute again; to wait for a pool that holds
it to its very end leaves pages empty that could have served somebody.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

from planner.pages import PagePool
from planner.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Need:
    """What one sequence holds and is going to hold, in positions.

    ``held`` counts what it holds now, without the pages of others; ``left`` is how many more ids it is expected to get.
    """

    held: int
    left: int


def expected_end(sequence: Sequence, page_size: int) -> int:
    """Ids, prompt and completion, that a sequence is expected to end with; at most ``max_len``.

    One that has no prediction, or has passed it, is expected to fill one page more.
    """
    expected = sequence.expected_len
    if expected is not None and math.isfinite(expected):
        # bounded before it is rounded, since it may be any float
        completion = math.ceil(min(max(expected, 1.0), float(sequence.sampling.max_tokens)))
        if sequence.prompt_len + completion > sequence.scheduled_len:
            return sequence.prompt_len + completion
    return min(sequence.scheduled_len + page_size, sequence.max_len)


def need(sequence: Sequence, page_size: int, shared: int = 0) -> Need:
    """The need of a sequence; ``shared`` of its pages are counted with somebody else."""
    left = expected_end(sequence, page_size) - sequence.scheduled_len
    return Need(sequence.scheduled_len - shared * page_size, max(left, 0))


def candidate_need(sequence: Sequence, page_size: int, shared: int) -> Need:
    """The need of a sequence that asks to enter, as far ahead as it matters; ``shared`` pages are somebody else's."""
    whole = need(sequence, page_size, shared)
    return Need(whole.held, min(whole.left, len(sequence.ids)))


class Outlook:
    """The needs of the running sequences, and whether one more fits beside them.

    A question costs O(1) while all needs together fit; otherwise O(log n), and O(n log n) after the needs have changed.

    Args:
        needs: one a running sequence.
        page_size: positions a page; a sequence leaves half of its last page empty on average.
        positions: positions of the pool.
    """

    __slots__ = ("_held", "_lefts", "_needs", "_peaks", "_positions", "_rest", "_total")

    def __init__(self, needs: Iterable[Need], page_size: int, positions: int) -> None:
        self._rest = page_size // 2
        self._positions = positions
        self._needs = list(needs)
        self._total = sum(self._at_end(one) for one in self._needs)
        self._lefts: list[int] = []
        self._held: list[int] = []
        self._peaks: list[int] = []

    def add(self, entered: Need) -> None:
        """One more runs."""
        self._needs.append(entered)
        self._total += self._at_end(entered)
        self._peaks = []

    def fits(self, candidate: Need) -> bool:
        """Whether the pool holds what is going to be held at any time while the candidate runs beside the others."""
        return self._total + self._at_end(candidate) <= self._positions or self.peak(candidate) <= self._positions

    def peak(self, candidate: Need) -> int:
        """The most positions that are going to be held at a time while the candidate runs beside the others."""
        if not self._peaks:
            self._order()
        before = bisect_right(self._lefts, candidate.left)
        beside = self._peaks[before - 1] if before else 0
        later = bisect_left(self._lefts, candidate.left)
        alive = len(self._lefts) - later
        at_end = self._held[later] + alive * (candidate.left + self._rest) + candidate.left
        return candidate.held + self._rest + max(beside, at_end)

    def _at_end(self, one: Need) -> int:
        return one.held + one.left + self._rest

    def _order(self) -> None:
        """Put the needs in the order of their ends.

        ``_held`` counts what is held now by the sequences from this one on; ``_peaks`` is the largest need up to each
        end, with one sequence more that grows all the while and has nothing to begin with.
        """
        ordered = sorted(self._needs, key=lambda one: one.left)
        self._lefts = [one.left for one in ordered]
        self._held = [0] * (len(ordered) + 1)
        for place in range(len(ordered) - 1, -1, -1):
            self._held[place] = self._held[place + 1] + ordered[place].held
        self._peaks, peak = [], 0
        for place, left in enumerate(self._lefts):
            alive = len(ordered) - place
            peak = max(peak, self._held[place] + alive * (left + self._rest) + left)
            self._peaks.append(peak)


def outlook_of(running: Iterable[Sequence], pool: PagePool) -> Outlook:
    """The outlook of all who hold pages. Pages that several share count once, with the one expected to end last.

    Args:
        running: sequences in slots.
        pool: that their pages are of.
    """
    page_size = pool.page_size
    alone = [(need(sequence, page_size), sequence) for sequence in running if sequence.pages]
    alone.sort(key=lambda pair: pair[0].left, reverse=True)
    counted: set[int] = set()
    needs: list[Need] = []
    for whole, sequence in alone:
        beside = 0
        for page in sequence.pages:  # what is shared comes first
            if pool.references(page) < 2:
                break
            beside += page in counted
            counted.add(page)
        needs.append(need(sequence, page_size, beside) if beside else whole)
    return Outlook(needs, page_size, pool.num_pages * page_size)
