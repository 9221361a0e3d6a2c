"""Loading: sequences whose next pages come from the host tier instead of being computed.

Owns how far each of them is, and the contents that have come and are not in a page yet. A sequence that enters has all
its pages; those whose content the tier has are loaded in their order, a launch a step, and it computes what is behind.
Meanwhile it holds its slot and is planned for nothing else; its promises (``planner.prefixes``) stand, so that others
wait for what it loads as they would for what it computes. A content that is lost ends the loading: what is behind it is
computed, and that costs time and nothing else.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from planner.host_tier import Fetch, HostTier
from planner.sequence import Sequence


class Load(NamedTuple):
    """Put a content into a page; ``content`` is whatever the copy to the device gave."""

    page: int
    content: object


class Progress(NamedTuple):
    """A sequence whose next ``pages`` pages are loaded in this step; ``ended``: nothing else is to come."""

    sequence: Sequence
    pages: int
    ended: bool


@dataclass(slots=True, eq=False)
class _Loading:
    """``reserved`` are the fetches that have not begun, ``come`` the contents that are in no page yet."""

    sequence: Sequence
    reserved: deque[Fetch]
    under_way: int = 0
    come: deque[object] = field(default_factory=deque[object])
    next_page: int = 0
    lost: bool = False


class Loading:
    """All sequences that are being loaded, oldest first."""

    __slots__ = ("_asked", "_by_key", "_tier")

    def __init__(self, tier: HostTier) -> None:
        self._tier = tier
        self._by_key: dict[int, _Loading] = {}
        self._asked: deque[_Loading] = deque()

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.key in self._by_key

    def begin(self, sequence: Sequence, first: int, names: Iterable[bytes]) -> bool:
        """Load the pages of a sequence from ``first`` on, whose contents have these names; False: there are none."""
        reserved = self._tier.reserve(names)
        if reserved:
            self._by_key[sequence.key] = _Loading(sequence, deque(reserved), next_page=first)
        return bool(reserved)

    def stop(self, sequence: Sequence) -> None:
        """A sequence gives its pages up; what is under way for it is dropped when it comes."""
        loading = self._by_key.pop(sequence.key, None)
        if loading is not None:
            self._end(loading)
            loading.come.clear()

    def come(self, contents: Iterable[object | None]) -> None:
        """The oldest fetches have ended, each with its content or with None."""
        for content in contents:
            self._tier.fetched(well=content is not None)
            loading = self._asked.popleft()
            loading.under_way -= 1
            if content is None:
                self._end(loading)
            elif not loading.lost:
                loading.come.append(content)

    def plan(self) -> tuple[list[Load], list[Fetch], list[Progress]]:
        """What this step writes into pages, what is fetched next, and who is further for it.

        What is written belongs behind everything that the step reads out of the pool and before all its other launches.
        """
        loads: list[Load] = []
        progress = [step for loading in tuple(self._by_key.values()) if (step := self._advance(loading, loads))]
        return loads, list(self._ask()), progress

    def _advance(self, loading: _Loading, loads: list[Load]) -> Progress | None:
        sequence, before = loading.sequence, len(loads)
        while loading.come and len(loads) < self._tier.at_once:
            loads.append(Load(sequence.pages[loading.next_page], loading.come.popleft()))
            loading.next_page += 1
        ended = not (loading.come or loading.reserved) and (loading.lost or not loading.under_way)
        if ended:
            del self._by_key[sequence.key]
        return Progress(sequence, len(loads) - before, ended) if ended or len(loads) > before else None

    def _ask(self) -> Iterator[Fetch]:
        room = self._tier.num_fetchable - sum(len(loading.come) for loading in self._by_key.values())
        for loading in self._by_key.values():
            while room > 0 and loading.reserved:
                fetch = loading.reserved.popleft()
                loading.under_way += 1
                self._asked.append(loading)
                self._tier.fetch(fetch)
                room -= 1
                yield fetch

    def _end(self, loading: _Loading) -> None:
        """Nothing that has not come yet is wanted."""
        loading.lost = True
        self._tier.release(loading.reserved)
        loading.reserved.clear()

    def check(self) -> None:
        """Check every invariant; for tests and debugging.

        Raises:
            AssertionError: a sequence waits for what is not under way.
        """
        self._tier.check(len(self._asked) + sum(len(loading.reserved) for loading in self._by_key.values()))
        for loading in self._by_key.values():
            assert loading.come or loading.reserved or loading.under_way, "something is to come"
            last = loading.next_page + len(loading.come) + len(loading.reserved) + loading.under_way
            assert loading.lost or last <= len(loading.sequence.pages), "what comes has pages"
