"""HostTier: which contents of pages lie in host memory, and what moves between there and the page pool.

Owns the places of the tier, their order and who reads them, and what is on its way. Decides and counts; the bytes are
moved by whoever carries out what is planned here, and knows neither sequences nor clock.

A content that the pool gives up is *saved*: the page is read before the step that overwrites it, and copied to a place
of the tier meanwhile. Of more than can be read at once, those that the pool kept longest are saved. What the pool would
give up next is saved ahead, as far as a launch has room, so that a long prompt does not push out more at once than can
be read. A content that is wanted is *fetched* to the device and loaded into a page by a later step; it stays in the
tier, and so is not saved again. Contents go in the order in which they were used last; one that is being copied, either
way, keeps its place. Copies are made in the order in which they were planned, and their ends are told in that order.

At most ``PAGES_ON_THE_WAY`` launches' pages are on the device beside the pool: those of ``_SAVING`` that have been read
and are not copied yet, and in the other direction those of one launch that are being copied and those of two steps that
have been dispatched and have not run. Saves of one launch alone would end a step later than the next ones are needed.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import NamedTuple

from planner.pages import Cached, PagePool

PAGES_ON_THE_WAY = 6
"""Launches whose pages are on the device beside the pool, at most."""

_SAVING = 3
"""Launches whose pages are being saved, at most."""

_AHEAD = 4
"""Launches whose pages the pool could give up at once without a loss, once it has had the time to save them ahead."""


class Save(NamedTuple):
    """Copy what a page holds to a place of the tier."""

    page: int
    place: int
    name: bytes


class Store(NamedTuple):
    """Copy a content that a lower tier had to a place of this one."""

    place: int
    name: bytes
    content: object


class Fetch(NamedTuple):
    """Copy what a place of the tier holds to the device."""

    place: int
    name: bytes


@dataclass(slots=True)
class TierCounts:
    """Pages since the start: wanted and held, wanted and not held, saved, given up for others, and not saved in time.

    ``damaged`` were held and turned out not to be what they were when they were saved. ``held`` are there now.
    """

    hits: int = 0
    misses: int = 0
    saved: int = 0
    evictions: int = 0
    left_out: int = 0
    damaged: int = 0
    held: int = 0


class TierError(RuntimeError):
    """The end of a copy was told that nobody had planned; always a fault of the caller."""


class HostTier:
    """The places of one node's host memory for pages.

    Args:
        places: pages that it holds; 0 = there is no tier.
        at_once: pages that one launch moves, above 0.
    """

    __slots__ = ("_counts", "_fetching", "_filling", "_free", "_held", "_num_saving", "_readers", "at_once", "places")

    def __init__(self, places: int = 0, at_once: int = 1) -> None:
        self.places = places
        self.at_once = at_once
        self._free = list(range(places - 1, -1, -1))
        self._held: OrderedDict[bytes, int] = OrderedDict()
        self._filling: deque[Save | Store] = deque()
        self._num_saving = 0
        self._fetching: deque[Fetch] = deque()
        self._readers = [0] * places
        self._counts = TierCounts()

    @property
    def counts(self) -> TierCounts:
        """What it has brought so far."""
        return replace(self._counts, held=len(self._held))

    @property
    def num_fetchable(self) -> int:
        """How many fetches may be planned beside those that are on their way."""
        return max(0, self.at_once - len(self._fetching))

    # ------------------------------------------------------------------ out of the pool

    def plan_saves(self, pool: PagePool) -> list[Save]:
        """What this step reads out of the pool, at most ``_SAVING`` launches, after all its pages have been taken.

        Saves are to be carried out before anything else in the step.
        """
        given_up = pool.take_given_up()
        if not self.places:
            return []
        room = _SAVING * self.at_once - self._num_saving
        known = {save.name for save in self._filling}
        lost = [cached for cached in given_up if cached.name not in self._held and cached.name not in known]
        saves = self._saves(lost[: -room - 1 : -1])[::-1]
        spare = min(self.at_once, room) - len(saves)
        if spare > 0:
            # no more than half of the tier, or what is saved ahead would push itself out again for ever
            ahead = pool.next_given_up(min(_AHEAD * self.at_once, self.places // 2))
            saves += self._saves([c for c in ahead if c.name not in self._held and c.name not in known][:spare])
        self._filling += saves
        self._num_saving += len(saves)
        named = {save.name for save in saves}
        self._counts.left_out += sum(cached.name not in named for cached in lost)
        return saves

    def _saves(self, wanted: Iterable[Cached]) -> list[Save]:
        """Saves of the first of these that there are places for."""
        saves: list[Save] = []
        for cached in wanted:
            place = self._free_place()
            if place is None:
                break
            saves.append(Save(cached.page, place, cached.name))
        return saves

    def saved(self, ends: Iterable[bool]) -> None:
        """So many of the oldest saves and stores have ended, well or not.

        Raises:
            TierError: fewer are on their way.
        """
        for well in ends:
            if not self._filling:
                raise TierError("a save has ended that was not planned")
            save = self._filling.popleft()
            self._num_saving -= isinstance(save, Save)
            if well:
                self._held[save.name] = save.place
                self._counts.saved += isinstance(save, Save)
            else:
                self._free.append(save.place)

    def store(self, name: bytes, content: object) -> Store | None:
        """Where a content that a lower tier had goes; None: it is here already, or no place is free."""
        if self.knows(name):
            return None
        place = self._free_place()
        if place is None:
            return None
        stored = Store(place, name, content)
        self._filling.append(stored)
        return stored

    def knows(self, name: bytes) -> bool:
        """Whether a content is here, or on its way."""
        return name in self._held or self.is_filling(name)

    def is_filling(self, name: bytes) -> bool:
        """Whether a content is on its way here."""
        return any(copy.name == name for copy in self._filling)

    # ------------------------------------------------------------------ into the pool

    def reserve(self, names: Iterable[bytes]) -> list[Fetch]:
        """What can be fetched of contents that are wanted in this order: the first ones, up to a gap.

        They keep their places until each of them is either fetched and has come, or ``release``d.
        """
        wanted = list(names)
        found = [Fetch(self._held[name], name) for name in takewhile(self._held.__contains__, wanted)]
        for fetch in reversed(found):  # so that the beginning of a chain goes last
            self._held.move_to_end(fetch.name)
            self._readers[fetch.place] += 1
        self._counts.misses += len(wanted) - len(found)
        return found

    def release(self, reserved: Iterable[Fetch]) -> None:
        """These are not going to be fetched."""
        for fetch in reserved:
            self._let_go(fetch)

    def fetch(self, reserved: Fetch) -> None:
        """This is fetched from now on; at most ``num_fetchable`` are."""
        self._fetching.append(reserved)

    def fetched(self, *, well: bool) -> None:
        """The oldest fetch has ended; a content that is not what was saved is forgotten.

        Raises:
            TierError: none is on its way.
        """
        if not self._fetching:
            raise TierError("a fetch has ended that was not planned")
        fetch = self._fetching.popleft()
        if well:
            self._counts.hits += 1
        else:
            self._counts.damaged += 1
            if self._held.get(fetch.name) == fetch.place:
                del self._held[fetch.name]
        self._let_go(fetch)

    # ------------------------------------------------------------------ places

    def _let_go(self, fetch: Fetch) -> None:
        self._readers[fetch.place] -= 1
        if not self._readers[fetch.place] and self._held.get(fetch.name) != fetch.place:
            self._free.append(fetch.place)

    def _free_place(self) -> int | None:
        """An empty place, or that of the content used longest ago that nobody reads; None = all are being copied."""
        if self._free:
            return self._free.pop()
        name = next((name for name, place in self._held.items() if not self._readers[place]), None)
        if name is None:
            return None
        self._counts.evictions += 1
        return self._held.pop(name)

    def check(self, readers: int) -> None:
        """Check every invariant; for tests and debugging.

        Args:
            readers: contents that somebody has reserved or is fetching.

        Raises:
            AssertionError: a place is in two states, or in none.
        """
        reading = {place for place, readers in enumerate(self._readers) if readers}
        forgotten = reading - set(self._held.values())
        places = [*self._free, *self._held.values(), *(save.place for save in self._filling), *forgotten]
        assert sorted(places) == list(range(self.places)), "a place is empty, filled, full or forgotten and still read"
        assert min(self._readers, default=0) >= 0, "nobody is done reading twice"
        assert sum(self._readers) == readers, "a place is read by whoever reserved it"
        assert {fetch.place for fetch in self._fetching} <= reading, "what is fetched is read"
        assert self._num_saving == sum(isinstance(copy, Save) for copy in self._filling), "saves are counted"
        assert self._num_saving <= _SAVING * self.at_once, "saves are bounded"
        assert len(self._fetching) <= self.at_once, "fetches are bounded"
