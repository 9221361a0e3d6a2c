"""IdlePages: pages that nobody holds and whose content is still worth something, in the order they are given up.

Owns that order for one device. Knows neither what the pages hold nor who held them.

There are two lines, each with the page that was left longest ago in front. A page that has been used again, or that its
request asked to keep, is *precious* and stands in a line of its own, which is touched only when the other is empty.
That line holds half of the device at most: beyond it, its first page goes to the end of the other, so that what was
precious once cannot stay for ever. Pages are added last page first, so that of one prefix the later pages go before the
earlier ones, without which they would be of no use.

Source: the segmented LRU of Karedla, Love and Wherry, "Caching Strategies to Improve Disk System Performance", IEEE
Computer 27(3), 1994.
"""

from collections import OrderedDict
from collections.abc import Iterator


class IdlePages:
    """The idle pages of one device; each operation costs O(1).

    Args:
        most_precious: pages that the line of the precious may hold.
    """

    __slots__ = ("_most_precious", "_plain", "_precious")

    def __init__(self, most_precious: int) -> None:
        self._most_precious = most_precious
        self._plain: OrderedDict[int, None] = OrderedDict()
        self._precious: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._plain) + len(self._precious)

    def __iter__(self) -> Iterator[int]:
        """All of them, in the order in which they would be given up if nothing else happened."""
        yield from self._plain
        yield from self._precious

    def add(self, page: int, *, precious: bool) -> None:
        """A page has been left by its last holder."""
        if not precious:
            self._plain[page] = None
            return
        self._precious[page] = None
        if len(self._precious) > self._most_precious:
            self._plain[self._precious.popitem(last=False)[0]] = None

    def remove(self, page: int) -> None:
        """A page is held again."""
        if page in self._precious:
            del self._precious[page]
        else:
            del self._plain[page]

    def give_up(self) -> int:
        """Take out the page whose content is worth least.

        Raises:
            KeyError: there is none.
        """
        return (self._plain or self._precious).popitem(last=False)[0]
