"""PagePool: which pages of the key/value pool are free, and how many sequences hold each of the others.

Owns the free list and the reference counts. Reads nothing and knows no sequence: page ids come out and go back in.
It never touches the arrays that the pages name, and never moves a page.

Page ids are 0-based. ``num_pages``, one past the last, is no page: page tables are padded with it, and the device drops
what is written there. Giving a page back says nothing about its content; whoever takes it next writes a position before
reading it.

Where contexts are spread over several devices, each has as many pages as the others: device d those from
``d * num_pages / devices`` on. Shard s of a sequence lies on the device s further, in turn, than its first shard, whose
device is the sequence's *home*. Homes differ, so that short sequences fill all devices alike.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

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


class PageError(RuntimeError):
    """A page was taken, shared or given back against the rules; always a fault of the caller."""


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

    __slots__ = ("_free", "_on_one", "_references", "_shard_pages", "devices", "num_pages", "page_size")

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

    @property
    def num_free(self) -> int:
        """Pages that nobody holds, on all devices."""
        return sum(map(len, self._free))

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
        """Pages of a device that nobody holds."""
        return len(self._free[device])

    def homes(self) -> list[int]:
        """All devices, the one with most free pages first."""
        return sorted(range(self.devices), key=lambda device: (-len(self._free[device]), device))

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
            shared: its first pages, if somebody holds them already: they have a home.
            pages: how many it has, these included.
            growing: pages of each device that others may need.
            reserve: whether one page more must fit.
        """
        have = len(shared)
        for home in [self.home_of(shared)] if shared else self.homes():
            wanted = self.on_devices(home, have, pages - have)
            wanted[self.device_of(home, pages)] += reserve
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
            if not 0 <= wanted <= len(self._free[device]):
                raise PageError(
                    f"{wanted} pages asked of a pool with {len(self._free[device])} free on device {device}; look at "
                    "what is free first"
                )
        taken: list[int] = []
        while len(taken) < count:
            index = first + len(taken)
            size = min(count - len(taken), self._shard_pages - index % self._shard_pages)
            free = self._free[self.device_of(home, index)]
            taken += reversed(free[len(free) - size :])
            del free[len(free) - size :]
        for page in taken:
            self._references[page] = 1
        return taken

    def share(self, pages: Sequence[int]) -> None:
        """Add one reference to each of the pages.

        Raises:
            PageError: one of them is free; nothing is changed.
        """
        for page in pages:
            self._held(page, "share")
        for page in pages:
            self._references[page] += 1

    def give_back(self, pages: Sequence[int]) -> None:
        """Drop one reference of each of the pages; those without any are free again.

        Raises:
            PageError: one of them is free already.
        """
        for page in pages:
            left = self._held(page, "give back") - 1
            self._references[page] = left
            if not left:
                self._free[page // self._on_one].append(page)

    def references(self, page: int) -> int:
        """How many sequences hold the page."""
        return self._references[page]

    def check(self, holders: Iterable[Sequence[int]]) -> None:
        """Compare the pool with the page tables of everybody who holds pages; O(pages), for tests and debugging.

        Raises:
            PageError: a page is free and held, neither, held more or less often than counted, twice by one holder, or
                on another device than the one whose turn it is.
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
        listed = [page for pages in self._free for page in pages]
        free = set(listed)
        if len(free) != len(listed):
            raise PageError(f"a page is free twice: {sorted(listed)}")
        for page, counted in enumerate(self._references):
            if counted != held[page]:
                raise PageError(f"page {page} has {counted} references and {held[page]} holders")
            if (page in free) == (counted > 0):
                raise PageError(f"page {page} has {counted} references and is {'' if page in free else 'not '}free")

    def _held(self, page: int, verb: str) -> int:
        if not 0 <= page < self.num_pages or not self._references[page]:
            raise PageError(f"cannot {verb} page {page}: it is free or outside the pool of {self.num_pages} pages")
        return self._references[page]
