"""The tiers below host memory: disk and Redis, behind one interface, and the one thread that asks them.

Owns what waits for that thread, with its bounds, and two breakers a tier, so that one that is full is still read. What
host memory gives up is handed over and written behind; when there is more of it than can be written, it is left out and
counted. Pages are looked for in the order in which a sequence has them, up to the first one that no tier has. Nothing
here is waited for by the engine, and every fault is a miss, a count and, when the state changes, one line of log.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import Literal, NamedTuple, Protocol

import structlog

from appliance.engine_ports import Found
from appliance.reuse.breaker import Breaker
from planner.searching import Search

MAX_WRITES = 16
"""Contents that wait to be written; one more is left out."""

_CLOSE_S = 5.0
"""Longest wait for the call that is under way when the tiers are closed, s."""

_log = structlog.get_logger("zccp.reuse")

Page = bytes | memoryview
"""The bytes of a page."""

Event = Literal["hit", "miss", "saved", "evicted", "left_out", "damaged", "failed"]


class DamagedPageError(ValueError):
    """A content is there and is not what was written; whoever raises it has removed it."""


class PageStore(Protocol):
    """One tier. Used by one thread, and may take its time."""

    label: str
    """What it is called in metrics."""

    def get(self, name: bytes, most_bytes: int) -> Page | None:
        """The content with that name, of at most so many bytes; None: it is not there.

        Raises:
            DamagedPageError: see there.
            Exception: the tier cannot be asked.
        """
        ...

    def put(self, name: bytes, content: Page) -> bool:
        """Keep a content; False: it was there already, or does not fit.

        Raises:
            Exception: the tier does not take it.
        """
        ...

    def close(self) -> None:
        """Let go of everything."""
        ...


class LowerObserver(Protocol):
    """Where tiers report; called on their thread."""

    def tier_event(self, tier: str, event: Event, num_bytes: int = 0) -> None:
        """Something became of a page, and so many bytes went into the tier or came out of it."""
        ...


class _Tier(NamedTuple):
    store: PageStore
    reads: Breaker
    writes: Breaker


class LowerTiers:
    """See the module. ``put`` is called by the thread that copies pages, the rest by the engine's.

    Args:
        stores: the tiers, the nearest first; at least one.
        page_bytes: of every content.
        observer: hears of every page.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        stores: Many[PageStore],
        page_bytes: int,
        observer: LowerObserver,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stores = [_Tier(store, Breaker(clock), Breaker(clock)) for store in stores]
        self._page_bytes = page_bytes
        self._observer = observer
        self._searches: deque[Search] = deque()
        self._writes: deque[tuple[bytes, bytes]] = deque()
        self._found: deque[Found] = deque()
        self._wake = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="lower tiers", daemon=True)
        self._thread.start()

    def put(self, name: bytes, content: memoryview) -> None:
        """Write a content behind, if there is room for it; it is copied."""
        with self._wake:
            if len(self._writes) >= MAX_WRITES:
                full = True
            else:
                full = False
                self._writes.append((name, bytes(content)))
                self._wake.notify()
        if full:
            for tier in self._stores:
                self._observer.tier_event(tier.store.label, "left_out")

    def search(self, searches: Many[Search]) -> None:
        """Look for contents, soon."""
        with self._wake:
            self._searches.extend(searches)
            self._wake.notify()

    def found(self) -> list[Found]:
        """What searches have found since the last call, by their number: the first contents up to a gap."""
        return [self._found.popleft() for _ in range(len(self._found))]

    def close(self) -> None:
        """Ask nothing more; what waits to be written is left out."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join(_CLOSE_S)

    def _work(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._closed or self._searches or self._writes)
                if self._closed:
                    break
                search = self._searches.popleft() if self._searches else None
                write = self._writes.popleft() if search is None else None
            if search is not None:
                self._found.append(Found(search.number, self._look(search.names)))
            elif write is not None:
                for tier in self._stores:
                    self._write(tier.store, tier.writes, *write)
        for tier in self._stores:
            tier.store.close()

    def _look(self, names: Many[bytes]) -> list[Page]:
        contents: list[Page] = []
        for name in names:
            content = next((c for t in self._stores if (c := self._read(t.store, t.reads, name)) is not None), None)
            if content is None:
                break
            contents.append(content)
        return contents

    def _read(self, store: PageStore, breaker: Breaker, name: bytes) -> Page | None:
        if not breaker.allows():
            self._observer.tier_event(store.label, "left_out")
            return None
        try:
            content = store.get(name, self._page_bytes)
        except DamagedPageError:
            _log.error("a page in a tier was damaged; it is forgotten and computed again", tier=store.label)
            self._observer.tier_event(store.label, "damaged")
            return None
        except Exception as error:  # noqa: BLE001 - whatever a tier does, it is a miss
            self._failed(store, breaker, "get", error)
            return None
        self._answered(store, breaker, "get")
        if content is not None and len(content) != self._page_bytes:
            self._observer.tier_event(store.label, "damaged")
            return None
        self._observer.tier_event(store.label, "miss" if content is None else "hit", len(content or b""))
        return content

    def _write(self, store: PageStore, breaker: Breaker, name: bytes, content: bytes) -> None:
        if not breaker.allows():
            self._observer.tier_event(store.label, "left_out")
            return
        try:
            new = store.put(name, content)
        except Exception as error:  # noqa: BLE001 - the same
            self._failed(store, breaker, "put", error)
            return
        self._answered(store, breaker, "put")
        if new:
            self._observer.tier_event(store.label, "saved", len(content))

    def _failed(self, store: PageStore, breaker: Breaker, what: str, error: Exception) -> None:
        self._observer.tier_event(store.label, "failed")
        if breaker.failed():
            cause = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
            _log.warning(
                "a tier does not work; requests go on without it", tier=store.label, operation=what, cause=cause
            )

    def _answered(self, store: PageStore, breaker: Breaker, what: str) -> None:
        if breaker.succeeded():
            _log.info("a tier works again", tier=store.label, operation=what)
