"""PagePool: which pages of the key/value pool are free, how many sequences hold each of the others, and what they hold.

Owns the free list, the reference counts and the names of contents. Reads nothing and knows no sequence: page ids come
out and go back in. It never touches the arrays that the pages name, and never moves a page.

Page ids are 0-based. ``num_pages``, one past the last, is no page: page tables are padded with it, and the device drops
what is written there. A page may be given the name of its content (``keep``). One with a name is *cached* when its last
holder has left it: it is free like any other, but whoever knows the name may still share it, and it is taken only when
no empty page is left (``IdlePages`` has the order); its name goes then. Whoever takes a page writes a position before
reading it.

Where contexts are spread over several devices, each has as many pages as the others: device d those from
``d * num_pages / devices`` on. Shard s of a sequence lies on the device s further, in turn, than its first shard, whose
device is the sequence's *home*. Homes differ, so that short sequences fill all devices alike.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from planner.idle import IdlePages

SHARD_LEN = 32 * 1024
"""Token positions of a shard where a plan does not say otherwise."""


def fullest(pages: int, shard_pages: int, devices: int) -> int:
    """Pages of a sequence on the device that holds most of them.

    Args:
        pages: of the sequence, above 0.
        shard_pages: pages of a shard.
        devices: that its shards go to in turn.
    """
    shards = -(-pages // shard_pages)
    at_home, last = -(-shards // devices), pages - (shards - 1) * shard_pages
    return (at_home - 1) * shard_pages + (last if (shards - 1) % devices == 0 else shard_pages)


class Cached(NamedTuple):
    """A page with content that has a name."""

    name: bytes
    page: int


class PageError(RuntimeError):
    """A page was taken, named, shared or given back against the rules; always a fault of the caller."""


class PagePool:
    """All pages of one engine. Taking and giving back cost O(1) a page.

    Args:
        num_pages: pages in the pool, above 0.
        page_size: token positions a page, above 0.
        devices: devices that contexts are spread over; a divisor of ``num_pages``.
        shard_pages: pages of a shard; without meaning on one device.

    Raises:
        PageError: one of them is out of range.
    """

    __slots__ = (
        "_free", "_given_up", "_idle", "_name_of", "_on_one", "_page_of", "_precious", "_references", "_shard_pages",
        "devices", "evictions", "num_pages", "page_size",
    )  # fmt: skip

    def __init__(self, num_pages: int, page_size: int, devices: int = 1, shard_pages: int = 1) -> None:
        if num_pages <= 0 or page_size <= 0:
            raise PageError(f"a pool of {num_pages} pages of {page_size} positions; both must be above 0")
        if devices <= 0 or num_pages % devices or shard_pages <= 0:
            raise PageError(
                f"a pool of {num_pages} pages on {devices} devices in shards of {shard_pages}; devices must divide the "
                "pages, and shards must have some"
            )
        self.num_pages = num_pages
        self.page_size = page_size
        self.devices = devices
        self._on_one = num_pages // devices
        self._shard_pages = shard_pages if devices > 1 else num_pages
        self._free = [
            list(range((device + 1) * self._on_one - 1, device * self._on_one - 1, -1)) for device in range(devices)
        ]
        self._references = [0] * num_pages
        self._idle = [IdlePages(self._on_one // 2) for _ in range(devices)]
        self._page_of: dict[bytes, int] = {}
        self._name_of: list[bytes | None] = [None] * num_pages
        self._precious = bytearray(num_pages)
        self._given_up: list[Cached] = []
        self.evictions = 0
        """Cached pages that were taken for something else."""

    @property
    def num_free(self) -> int:
        """Pages that nobody holds, on all devices; cached ones are among them."""
        return sum(map(len, self._free)) + self.num_cached

    @property
    def num_cached(self) -> int:
        """Pages that nobody holds and whose content can still be had."""
        return sum(map(len, self._idle))

    @property
    def unused(self) -> int:
        """The id that pads page tables."""
        return self.num_pages

    @property
    def longest(self) -> int:
        """Pages of the longest sequence that the empty pool holds."""
        rounds, rest = divmod(self._on_one, self._shard_pages)
        return rounds * self._shard_pages * self.devices + rest

    def pages_for(self, positions: int) -> int:
        """Pages that hold this many token positions."""
        return -(-positions // self.page_size)

    def free_on(self, device: int) -> int:
        """Pages of a device that nobody holds; cached ones are among them."""
        return len(self._free[device]) + len(self._idle[device])

    def homes(self) -> list[int]:
        """All devices, the one with most free pages first."""
        return sorted(range(self.devices), key=lambda device: (-self.free_on(device), device))

    def home_of(self, pages: Sequence[int]) -> int:
        """The home of a sequence that has these pages."""
        return pages[0] // self._on_one

    def device_of(self, home: int, index: int) -> int:
        """The device of page ``index`` of a sequence, counted from 0."""
        return (home + index // self._shard_pages) % self.devices

    def on_devices(self, home: int, first: int, count: int) -> list[int]:
        """How many of ``count`` pages of a sequence, from page ``first`` on, lie on each device."""
        if self.devices == 1:
            return [count]
        found, end = [0] * self.devices, first + count
        while first < end:
            stop = min(end, (first // self._shard_pages + 1) * self._shard_pages)
            found[self.device_of(home, first)] += stop - first
            first = stop
        return found

    def home_for(self, shared: Sequence[int], pages: int, growing: Sequence[int], *, reserve: bool) -> int | None:
        """Where a sequence can begin so that all its pages fit beside what others may need; None = nowhere.

        Args:
            shared: its first pages, if they are held or cached already: they have a home.
            pages: how many it has, these included.
            growing: pages of each device that others may need.
            reserve: whether one page more must fit.
        """
        have = len(shared)
        idle = [page // self._on_one for page in shared if not self._references[page]]
        for home in [self.home_of(shared)] if shared else self.homes():
            wanted = self.on_devices(home, have, pages - have)
            wanted[self.device_of(home, pages)] += reserve
            for device in idle:
                wanted[device] += 1
            if all(not new or self.free_on(d) >= new + growing[d] for d, new in enumerate(wanted)):
                return home
        return None

    def touches(self, pages: Sequence[int], device: int) -> bool:
        """Whether a sequence has pages on a device."""
        home = self.home_of(pages)
        return any(self.device_of(home, index) == device for index in range(0, len(pages), self._shard_pages))

    def take(self, count: int, home: int = 0, first: int = 0) -> list[int]:
        """Take ``count`` free pages, each with one reference.

        Args:
            count: how many.
            home: of the sequence that they are for.
            first: pages that the sequence has already.

        Raises:
            PageError: fewer are free on a device; nothing is taken. Callers look at what is free first.
        """
        for device, wanted in enumerate(self.on_devices(home, first, count)):
            if not 0 <= wanted <= self.free_on(device):
                raise PageError(
                    f"{wanted} pages asked of a pool with {self.free_on(device)} free on device {device}; look at what "
                    "is free first"
                )
        taken: list[int] = []
        while len(taken) < count:
            index = first + len(taken)
            size = min(count - len(taken), self._shard_pages - index % self._shard_pages)
            taken += self._take_on(self.device_of(home, index), size)
        for page in taken:
            self._references[page] = 1
        return taken

    def _take_on(self, device: int, count: int) -> list[int]:
        """Empty pages of a device, and cached ones when there are no more."""
        free = self._free[device]
        empty = free[max(len(free) - count, 0) :]
        del free[len(free) - len(empty) :]
        taken = empty[::-1]
        while len(taken) < count:
            page = self._idle[device].give_up()
            name = self._name_of[page]
            if name is not None:
                self._given_up.append(Cached(name, page))
            self._forget(page)
            self.evictions += 1
            taken.append(page)
        return taken

    def take_given_up(self) -> list[Cached]:
        """What was cached and has been taken since the last call, in that order; nothing is written there yet."""
        found, self._given_up = self._given_up, []
        return found

    def next_given_up(self, room: int) -> list[Cached]:
        """What would be taken, in that order, if so many pages were needed on the first device; O(``room``)."""
        found = list[Cached]()
        for page in islice(self._idle[0], max(0, room - len(self._free[0]))):
            name = self._name_of[page]
            if name is not None:
                found.append(Cached(name, page))
        return found

    def share(self, pages: Sequence[int]) -> None:
        """Add one reference to each of the pages, which somebody holds or which are cached.

        A cached page that is shared has been used again, and is precious from then on.

        Raises:
            PageError: one of them is empty; nothing is changed.
        """
        for page in pages:
            if self._name(page) is None:
                self._held(page, "share")
        for page in pages:
            if not self._references[page]:
                self._idle[page // self._on_one].remove(page)
            self._precious[page] = self._name_of[page] is not None
            self._references[page] += 1

    def give_back(self, pages: Sequence[int]) -> None:
        """Drop one reference of each of the pages; those without any are free again, or cached if they have a name.

        Raises:
            PageError: one of them is free already.
        """
        for page in reversed(pages):
            left = self._held(page, "give back") - 1
            self._references[page] = left
            if left:
                continue
            device = page // self._on_one
            if self._name_of[page] is None:
                self._free[device].append(page)
            else:
                self._idle[device].add(page, precious=bool(self._precious[page]))

    def keep(self, page: int, name: bytes, *, precious: bool = False) -> bool:
        """Name the content of a page that is held, so that it can be found; False: another page has that content.

        Args:
            page: whose content will not change any more.
            name: stands for the content and everything before it; equal names mean equal contents.
            precious: whether it is kept rather than others.

        Raises:
            PageError: the page is free, or has another name.
        """
        self._held(page, "name")
        if self._name_of[page] not in (None, name):
            raise PageError(f"cannot name page {page} twice: contents of named pages do not change")
        found = self._page_of.setdefault(name, page)
        self._precious[found] |= precious
        if found != page:
            return False
        self._name_of[page] = name
        return True

    def find(self, name: bytes) -> int | None:
        """The page with that content, held or cached."""
        return self._page_of.get(name)

    def named(self) -> Iterable[tuple[bytes, int]]:
        """All names and their pages; for tests and debugging."""
        return self._page_of.items()

    def num_held(self, pages: Iterable[int]) -> int:
        """How many of the pages somebody holds."""
        return sum(self._references[page] > 0 for page in pages)

    def fits_behind(self, pages: Sequence[int], page: int) -> bool:
        """Whether a page lies on the device whose turn it is behind these pages of a sequence."""
        return not pages or page // self._on_one == self.device_of(self.home_of(pages), len(pages))

    def references(self, page: int) -> int:
        """How many sequences hold the page."""
        return self._references[page]

    def check(self, holders: Iterable[Sequence[int]]) -> None:
        """Compare the pool with the page tables of everybody who holds pages; O(pages), for tests and debugging.

        Raises:
            PageError: a page is free and held, neither, held more or less often than counted, twice by one holder, or
                on another device than the one whose turn it is; or names and pages do not stand for each other.
        """
        held: Counter[int] = Counter()
        for pages in holders:
            if len(set(pages)) != len(pages):
                raise PageError(f"a page stands twice in one table: {list(pages)}")
            held.update(pages)
            outside = sorted(page for page in pages if not 0 <= page < self.num_pages)
            if outside:
                raise PageError(f"pages {outside} are held and outside the pool of {self.num_pages}")
            for index, page in enumerate(pages):
                if page // self._on_one != self.device_of(self.home_of(pages), index):
                    raise PageError(f"page {page} is on another device than number {index} of {list(pages)} must be")
        listed = [page for pages in [*self._free, *self._idle] for page in pages]
        free = set(listed)
        if len(free) != len(listed):
            raise PageError(f"a page is free twice: {sorted(listed)}")
        for page, counted in enumerate(self._references):
            if counted != held[page]:
                raise PageError(f"page {page} has {counted} references and {held[page]} holders")
            if (page in free) == (counted > 0):
                raise PageError(f"page {page} has {counted} references and is {'' if page in free else 'not '}free")
        self._check_names()

    def _check_names(self) -> None:
        named = {name: page for page, name in enumerate(self._name_of) if name is not None}
        if named != self._page_of:
            raise PageError("a name stands for another page than the one that has it")
        for device, idle in enumerate(self._idle):
            for page in idle:
                if page // self._on_one != device or self._name_of[page] is None:
                    raise PageError(f"page {page} is cached on device {device}, without a name or on another one")
        empty = [page for pages in self._free for page in pages if self._name_of[page] is not None]
        if empty:
            raise PageError(f"pages {empty} are empty and have names")

    def _forget(self, page: int) -> None:
        name = self._name(page)
        if name is not None:
            del self._page_of[name]
        self._name_of[page], self._precious[page] = None, 0

    def _name(self, page: int) -> bytes | None:
        return self._name_of[page] if 0 <= page < self.num_pages else None

    def _held(self, page: int, verb: str) -> int:
        if not 0 <= page < self.num_pages or not self._references[page]:
            raise PageError(f"cannot {verb} page {page}: it is free or outside the pool of {self.num_pages} pages")
        return self._references[page]
