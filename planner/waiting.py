"""WaitingLines: who waits for a slot and whose turn it is.

Owns one line a tenant, in the order of submission, and the tokens that each tenant has been served. Reads no clock and
no pages: whether a sequence fits, and what one that is parked waits for, are the scheduler's questions.

The turn goes to the tenant that has been served the fewest tokens; a tenant that is new or comes back after a pause
starts level with whoever was admitted last, so that a pause saves nothing up. Inside a tenant the oldest comes first.
Source: the virtual token counter of Sheng et al., "Fairness in Serving Large Language Models", arXiv 2401.00588.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator

from planner.sequence import Sequence

LOOK_AHEAD = 8
"""Sequences of one tenant that are looked at in one step when those before them do not fit."""

LOOK_AHEAD_TOTAL = 64
"""Sequences of all tenants together that are looked at in one step."""


def _order(sequence: Sequence) -> int:
    return sequence.order


class WaitingLines:
    """Sequences without a slot: in line, or parked while somebody else computes pages that they can use."""

    __slots__ = ("_counted", "_level", "_lines", "_parked", "_served", "num_tokens")

    def __init__(self) -> None:
        self._lines: dict[str, list[Sequence]] = {}
        self._parked: dict[int, Sequence] = {}
        self._served: dict[str, int] = {}
        self._counted: dict[int, int] = {}
        self._level = 0
        self.num_tokens = 0
        """Ids of everybody who waits, as counted when they came."""

    def __len__(self) -> int:
        return len(self._counted)

    def __iter__(self) -> Iterator[Sequence]:
        """Everybody who waits, in line or parked."""
        yield from (sequence for line in self._lines.values() for sequence in line)
        yield from self._parked.values()

    def in_line(self, sequence: Sequence) -> bool:
        """Whether a sequence waits for nothing but its turn and room."""
        line = self._lines.get(sequence.tenant, [])
        place = bisect_left(line, sequence.order, key=_order)
        return place < len(line) and line[place] is sequence

    def add(self, sequence: Sequence) -> None:
        """Put a sequence in its tenant's line, before all that were submitted after it."""
        self._count(sequence)
        self._enter(sequence)

    def park(self, sequence: Sequence) -> None:
        """Let one that is in line wait outside of it until it is called; its place is kept for it."""
        self._leave(sequence)
        self._parked[sequence.key] = sequence

    def call(self, sequences: Iterable[Sequence]) -> None:
        """Those of the sequences that are parked come in line again, each at its place."""
        for sequence in sequences:
            if self._parked.get(sequence.key) is sequence:
                del self._parked[sequence.key]
                self._enter(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out because it is finished or has a slot."""
        self.num_tokens -= self._counted.pop(sequence.key)
        if self._parked.pop(sequence.key, None) is None:
            self._leave(sequence)

    def in_turn(self) -> Iterator[Sequence]:
        """Candidates for admission, the one whose turn it is first; the one just given may be admitted or parked."""
        looked = dict.fromkeys(self._lines, 0)
        for _ in range(LOOK_AHEAD_TOTAL):
            open_tenants = [t for t, n in looked.items() if n < min(LOOK_AHEAD, len(self._lines.get(t, ())))]
            if not open_tenants:
                return
            tenant = min(open_tenants, key=lambda name: (self._served[name], name))
            sequence = self._lines[tenant][looked[tenant]]
            yield sequence
            if self.in_line(sequence):
                looked[tenant] += 1

    def admit(self, sequence: Sequence, tokens: int) -> None:
        """Take a sequence out because it has a slot now, and count the tokens that it is about to be served."""
        self._level = max(self._level, self._served[sequence.tenant])
        self.charge(sequence.tenant, tokens)
        self.remove(sequence)

    def charge(self, tenant: str, tokens: int) -> None:
        """Count tokens that a tenant has been served."""
        self._served[tenant] = self._served.get(tenant, 0) + tokens

    def _count(self, sequence: Sequence) -> None:
        self._counted[sequence.key] = len(sequence.ids)
        self.num_tokens += len(sequence.ids)

    def _enter(self, sequence: Sequence) -> None:
        tenant = sequence.tenant
        if tenant not in self._lines:
            self._served[tenant] = max(self._level, self._served.get(tenant, 0))
            self._lines[tenant] = []
        insort(self._lines[tenant], sequence, key=_order)

    def _leave(self, sequence: Sequence) -> None:
        line = self._lines[sequence.tenant]
        del line[bisect_left(line, sequence.order, key=_order)]
        if not line:
            del self._lines[sequence.tenant]
