"""WaitingLines: who waits for a slot and whose turn it is.

Owns one line a tenant, in the order of submission, the tokens that each tenant has been served, and the choices of a
request that wait for their first one. Reads no clock and no pages: whether a sequence fits is the scheduler's question.

The turn goes to the tenant that has been served the fewest tokens; a tenant that is new or comes back after a pause
starts level with whoever was admitted last, so that a pause saves nothing up. Inside a tenant the oldest comes first.
Source: the virtual token counter of Sheng et al., "Fairness in Serving Large Language Models", arXiv 2401.00588.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator

from planner.sequence import Sequence

LOOK_AHEAD = 8
"""Sequences of one tenant that are looked at in one step when those before them do not fit."""

LOOK_AHEAD_TOTAL = 64
"""Sequences of all tenants together that are looked at in one step."""


def _order(sequence: Sequence) -> int:
    return sequence.order


class WaitingLines:
    """Sequences without a slot: in line, or parked until their leader's prompt is computed.

    A parked sequence is a follower (a later choice of a request) that would compute the prompt its leader is computing.
    """

    __slots__ = ("_counted", "_followers", "_level", "_lines", "_served", "num_tokens")

    def __init__(self) -> None:
        self._lines: dict[str, list[Sequence]] = {}
        self._followers: dict[int, list[Sequence]] = {}
        self._served: dict[str, int] = {}
        self._counted: dict[int, int] = {}
        self._level = 0
        self.num_tokens = 0
        """Ids of everybody who waits, as counted when they came."""

    def __len__(self) -> int:
        return len(self._counted)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.key in self._counted

    def __iter__(self) -> Iterator[Sequence]:
        """Everybody who waits, in line or parked."""
        in_line = [sequence for line in self._lines.values() for sequence in line]
        known = {sequence.key for sequence in in_line}
        yield from in_line
        for followers in self._followers.values():
            yield from (sequence for sequence in followers if sequence.key not in known)

    def add(self, sequence: Sequence) -> None:
        """Put a sequence in its tenant's line, before all that were submitted after it."""
        self._count(sequence)
        self._enter(sequence)

    def park(self, sequence: Sequence, leader: Sequence) -> None:
        """Let a sequence wait, outside the line, until ``open`` or ``regroup`` is called for its leader."""
        self._count(sequence)
        sequence.leader = leader
        self._followers.setdefault(leader.key, []).append(sequence)

    def leads(self, sequence: Sequence) -> bool:
        """Whether anybody who waits follows this one."""
        return sequence.key in self._followers

    def open(self, leader: Sequence) -> None:
        """The leader's shareable pages are computed: its parked followers come in line."""
        for follower in self._followers.get(leader.key, ()):
            if not self._in_line(follower):
                self._enter(follower)

    def regroup(self, leader: Sequence, heir: Sequence | None = None) -> None:
        """The leader gives its pages back: those who follow it follow somebody else from now on.

        Args:
            leader: who led so far.
            heir: a running sibling that holds the same pages; None: the oldest follower leads, and the others wait for
                it.
        """
        followers = self._followers.pop(leader.key, None)
        if not followers:
            return
        if heir is None:
            heir, *followers = followers
            heir.leader = None
            if not self._in_line(heir):
                self._enter(heir)
            for follower in followers:
                if self._in_line(follower):
                    self._leave(follower)
        for follower in followers:
            follower.leader = heir
        if followers:
            self._followers[heir.key] = followers

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out because it is finished; its followers keep waiting for it."""
        self.num_tokens -= self._counted.pop(sequence.key)
        if self._in_line(sequence):
            self._leave(sequence)
        leader = sequence.leader
        if leader is not None and sequence in (followers := self._followers.get(leader.key, [])):
            followers.remove(sequence)
            if not followers:
                del self._followers[leader.key]

    def in_turn(self) -> Iterator[Sequence]:
        """Candidates for admission, the one whose turn it is first; the caller may ``admit`` the one just given."""
        looked = dict.fromkeys(self._lines, 0)
        for _ in range(LOOK_AHEAD_TOTAL):
            open_tenants = [t for t, n in looked.items() if n < min(LOOK_AHEAD, len(self._lines.get(t, ())))]
            if not open_tenants:
                return
            tenant = min(open_tenants, key=lambda name: (self._served[name], name))
            sequence = self._lines[tenant][looked[tenant]]
            yield sequence
            if sequence in self:
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

    def _in_line(self, sequence: Sequence) -> bool:
        line = self._lines.get(sequence.tenant, [])
        place = bisect_left(line, sequence.order, key=_order)
        return place < len(line) and line[place] is sequence

    def _leave(self, sequence: Sequence) -> None:
        line = self._lines[sequence.tenant]
        del line[bisect_left(line, sequence.order, key=_order)]
        if not line:
            del self._lines[sequence.tenant]
