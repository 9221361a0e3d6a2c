"""PagePool: which pages of the key/value pool are free, and how many sequences hold each of the others.

Owns the free list and the reference counts. Reads nothing and knows no sequence: page ids come out and go back in.
It never touches the arrays that the pages name, and never moves a page.

Page ids are 0-based. ``num_pages``, one past the last, is no page: page tables are padded with it, and the device drops
what is written there. Giving a page back says nothing about its content; whoever takes it next writes a position before
reading it.
"""

from collections import Counter
from collections.abc import Iterable, Sequence


class PageError(RuntimeError):
    """A page was taken, shared or given back against the rules; always a fault of the caller."""


class PagePool:
    """All pages of one engine. Taking and giving back cost O(1) a page.

    Args:
        num_pages: pages in the pool, above 0.
        page_size: token positions a page, above 0.

    Raises:
        PageError: either is not above 0.
    """

    __slots__ = ("_free", "_references", "num_pages", "page_size")

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages <= 0 or page_size <= 0:
            raise PageError(f"a pool of {num_pages} pages of {page_size} positions; both must be above 0")
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages - 1, -1, -1))
        self._references = [0] * num_pages

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    @property
    def unused(self) -> int:
        """The id that pads page tables."""
        return self.num_pages

    def pages_for(self, positions: int) -> int:
        """Pages that hold this many token positions."""
        return -(-positions // self.page_size)

    def take(self, count: int) -> list[int]:
        """Take ``count`` free pages, each with one reference.

        Raises:
            PageError: fewer are free; nothing is taken. Callers look at ``num_free`` first.
        """
        if not 0 <= count <= len(self._free):
            raise PageError(f"{count} pages asked of a pool with {len(self._free)} free; look at num_free first")
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        taken.reverse()
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
                self._free.append(page)

    def references(self, page: int) -> int:
        """How many sequences hold the page."""
        return self._references[page]

    def check(self, holders: Iterable[Sequence[int]]) -> None:
        """Compare the pool with the page tables of everybody who holds pages; O(pages), for tests and debugging.

        Raises:
            PageError: a page is free and held, neither, held more or less often than counted, or twice by one holder.
        """
        held: Counter[int] = Counter()
        for pages in holders:
            if len(set(pages)) != len(pages):
                raise PageError(f"a page stands twice in one table: {list(pages)}")
            held.update(pages)
        free = set(self._free)
        if len(free) != len(self._free):
            raise PageError(f"a page is free twice: {sorted(self._free)}")
        for page, counted in enumerate(self._references):
            if counted != held[page]:
                raise PageError(f"page {page} has {counted} references and {held[page]} holders")
            if (page in free) == (counted > 0):
                raise PageError(f"page {page} has {counted} references and is {'' if page in free else 'not '}free")
        outside = sorted(page for page in held if not 0 <= page < self.num_pages)
        if outside:
            raise PageError(f"pages {outside} are held and outside the pool of {self.num_pages}")

    def _held(self, page: int, verb: str) -> int:
        if not 0 <= page < self.num_pages or not self._references[page]:
            raise PageError(f"cannot {verb} page {page}: it is free or outside the pool of {self.num_pages} pages")
        return self._references[page]
