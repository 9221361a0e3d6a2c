"""Searching: sequences whose next pages may lie in a tier below host memory, and who wait while they are looked for.

Owns what is looked for, who waits for it, and until when. Pages of a sequence that is submitted are looked for when
neither the pool nor the host tier has the next one; it waits outside of its line. What is found goes to the host tier,
and the sequence comes in line again once it is there, or when its time is over, whichever is first. Sequences that want
the same page wait for one search. The time is an argument.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from planner.host_tier import HostTier, Store
from planner.sequence import Sequence

_LAUNCHES = 4
"""Launches of pages that are looked for at once, at most."""


class Search(NamedTuple):
    """Look for contents in this order, up to the first that is nowhere."""

    number: int
    names: tuple[bytes, ...]


@dataclass(slots=True, eq=False)
class _Entry:
    names: tuple[bytes, ...]
    sequences: list[Sequence]
    until_s: float | None = None
    is_over: bool = False
    stored: list[bytes] = field(default_factory=list[bytes])


class Searching:
    """All searches of one engine.

    Args:
        tier: where what is found goes.
        wait_s: longest time that a sequence waits; 0 = there are no lower tiers.
    """

    __slots__ = ("_entries", "_made", "_new", "_tier", "_wait_s", "enabled")

    def __init__(self, tier: HostTier, wait_s: float) -> None:
        self._tier = tier
        self._wait_s = wait_s
        self.enabled = wait_s > 0 and tier.places > 0
        self._entries: dict[int, _Entry] = {}
        self._new: list[int] = []
        self._made = 0

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, sequence: Sequence, names: Iterable[bytes]) -> bool:
        """Look for these; False: there is nothing to look for.

        Args:
            sequence: who wants them.
            names: of its pages, from the first that the pool does not have.
        """
        wanted = tuple(islice(self._missing(names), _LAUNCHES * self._tier.at_once))
        if not wanted:
            return False
        for entry in self._entries.values():
            if wanted[0] in entry.names and not entry.is_over:
                entry.sequences.append(sequence)
                return True
        self._entries[self._made] = _Entry(wanted, [sequence])
        self._new.append(self._made)
        self._made += 1
        return True

    def begin(self, now_s: float) -> list[Search]:
        """Searches that have not been begun; their time counts from now on."""
        searches: list[Search] = []
        for number in self._new:
            entry = self._entries.get(number)
            if entry is not None:
                entry.until_s = now_s + self._wait_s
                searches.append(Search(number, entry.names))
        self._new = []
        return searches

    def found(self, number: int, contents: Many[object]) -> list[Store]:
        """A search has ended with the first so many contents; where they go in the host tier."""
        entry = self._entries.get(number)
        if entry is None:
            return []  # nobody waits for it any more
        entry.is_over = True
        stores = [
            store
            for name, content in zip(entry.names, contents, strict=False)
            if (store := self._tier.store(name, content)) is not None
        ]
        entry.stored = [store.name for store in stores]
        return stores

    def ended(self, now_s: float) -> list[Sequence]:
        """Who need not wait any more: what was found for them is there, or their time is over."""
        woken: list[Sequence] = []
        for number, entry in tuple(self._entries.items()):
            there = entry.is_over and not any(map(self._tier.is_filling, entry.stored))
            if there or (entry.until_s is not None and now_s >= entry.until_s):
                woken += entry.sequences
                del self._entries[number]
        return woken

    def remove(self, sequence: Sequence) -> None:
        """A sequence has ended."""
        for number, entry in tuple(self._entries.items()):
            if sequence in entry.sequences:
                entry.sequences.remove(sequence)
                if not entry.sequences:
                    del self._entries[number]

    def _missing(self, names: Iterable[bytes]) -> Iterable[bytes]:
        """The names behind those that the host tier has."""
        rest = iter(names)
        for name in rest:
            if not self._tier.knows(name):
                yield name
                break
        yield from rest
