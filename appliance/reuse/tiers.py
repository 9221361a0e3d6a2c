"""Host memory for pages: the bytes of the host tier, and the one thread that copies between them and the device.

Owns the memory, a checksum of every content and the order of the copies: one after the other, as they were asked for,
and their ends are told in that order. Which content lies where is ``planner.host_tier``'s decision. The engine hands
over and collects; it never waits for a copy. Whatever fails here is a miss: it is counted, logged and told as such.

The checksum is CRC-32: what it guards against is damage of memory, not anybody's intent, and zlib computes 3.9 GB/s of
it on one core, where SHA-256 takes twice as long. On a GPU host the memory is page-locked by whoever made it.
"""

import mmap
import threading
import zlib
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Many
from queue import SimpleQueue
from typing import Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import structlog

from appliance.engine_ports import Found, Moved, PageCopy
from planner.host_tier import Fetch, Save, Store
from planner.searching import Search

_CLOSE_S = 5.0
"""Longest wait for the copy that is under way when the tier is closed, s."""

_log = structlog.get_logger("zccp.reuse")


class TierObserver(Protocol):
    """Where a tier reports what it moved; called on its thread."""

    def tier_moved(self, direction: Literal["in", "out"], num_bytes: int) -> None:
        """A content has been copied into the tier, or out of it."""
        ...


class Below(Protocol):
    """The tiers below, which take what is given up here and are asked for what is not here. Nothing waits for them."""

    def put(self, name: bytes, content: memoryview) -> None:
        """Keep a content, soon; it is copied."""
        ...

    def search(self, searches: Many[Search]) -> None:
        """Look for contents, soon."""
        ...

    def found(self) -> list[Found]:
        """What has been found since the last call."""
        ...

    def close(self) -> None:
        """Nothing more is asked."""
        ...


class PageForm(NamedTuple):
    """How a page is laid out: the shape and dtype of its array, all devices together."""

    shape: tuple[int, ...]
    dtype: npt.DTypeLike

    @property
    def num_bytes(self) -> int:
        """Bytes of one."""
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


class HostMemory:
    """See the module. ``save``, ``fetch`` and ``moved`` are called by the engine's thread alone.

    Args:
        places: pages that it holds, above 0.
        form: of a page.
        to_device: copies an array to where programs take it, and returns when the array may change again.
        observer: hears of every copy.
        lock: makes the memory one that a device reads itself; called once, before the first copy.
        below: the tiers below, if there are any.

    Raises:
        MemoryError: the system does not give so much.
    """

    def __init__(
        self,
        places: int,
        form: PageForm,
        to_device: Callable[[np.ndarray], object],
        observer: TierObserver,
        lock: Callable[[memoryview], None] | None = None,
        below: Below | None = None,
    ) -> None:
        self._form = form
        self._to_device = to_device
        self._observer = observer
        try:
            memory = mmap.mmap(-1, places * form.num_bytes)
        except OSError as error:
            raise MemoryError(
                f"the system gives no {places * form.num_bytes} bytes for pages ({error}); lower cache.host_tier_mb"
            ) from error
        if lock is not None:
            lock(memoryview(memory))
        self._bytes = np.frombuffer(memory, np.uint8).reshape(places, form.num_bytes)
        self._checksums = [0] * places
        self._names: list[bytes | None] = [None] * places
        self._below = below
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._saved: deque[bool] = deque()
        self._contents: deque[object | None] = deque()
        self._news = threading.Event()
        self._thread = threading.Thread(target=self._work, name="pages", daemon=True)
        self._thread.start()

    def save(self, copies: Many[PageCopy], saves: Many[Save]) -> None:
        """See ``appliance.engine_ports.PageMover``."""
        for copy in copies:
            copy.copy_to_host_async()
        for copy, save in zip(copies, saves, strict=True):
            self._jobs.put(lambda copy=copy, save=save: self._saved.append(self._save(copy, save.place, save.name)))

    def store(self, stores: Many[Store]) -> None:
        """See ``appliance.engine_ports.PageMover``."""
        for store in stores:
            self._jobs.put(lambda store=store: self._saved.append(self._store(store)))

    def fetch(self, fetches: Many[Fetch]) -> None:
        """See ``appliance.engine_ports.PageMover``."""
        for fetch in fetches:
            self._jobs.put(lambda fetch=fetch: self._contents.append(self._fetch(fetch.place)))

    def search(self, searches: Many[Search]) -> None:
        """See ``appliance.engine_ports.PageMover``."""
        if self._below is not None:
            self._below.search(searches)

    def moved(self, wait_s: float) -> Moved:
        """See ``appliance.engine_ports.PageMover``."""
        if wait_s:
            self._news.wait(wait_s)
        self._news.clear()
        # only what stands there by now: the thread goes on adding
        saved = [self._saved.popleft() for _ in range(len(self._saved))]
        contents = [self._contents.popleft() for _ in range(len(self._contents))]
        return Moved(saved, contents, [] if self._below is None else self._below.found())

    def close(self) -> None:
        """See ``appliance.engine_ports.PageMover``."""
        self._jobs.put(None)
        self._thread.join(_CLOSE_S)
        if self._below is not None:
            self._below.close()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # so that nothing on the device is held while there is nothing to do
            self._news.set()

    def _save(self, copy: PageCopy, place: int, name: bytes) -> bool:
        self._hand_down(place)
        try:
            np.copyto(self._page(place), np.asarray(copy), casting="no")
            self._checksums[place] = zlib.crc32(self._bytes[place])
            self._names[place] = name
        except Exception as error:  # noqa: BLE001 - a page that cannot be kept is one that has to be computed again
            _log.warning("a page was not copied to host memory; it is forgotten", cause=type(error).__name__)
            return False
        self._observer.tier_moved("in", self._form.num_bytes)
        return True

    def _store(self, store: Store) -> bool:
        """Keep what came from below; it is not handed down again."""
        self._hand_down(store.place)
        try:
            content = memoryview(store.content)  # pyright: ignore[reportArgumentType] - what ``found`` gave
            np.copyto(self._bytes[store.place], np.frombuffer(content, np.uint8))
        except (TypeError, ValueError) as error:
            _log.warning("a page from a lower tier has another form; it is forgotten", cause=type(error).__name__)
            return False
        self._checksums[store.place] = zlib.crc32(content)
        self._observer.tier_moved("in", self._form.num_bytes)
        return True

    def _hand_down(self, place: int) -> None:
        """Give what lies in a place to the tiers below before something else comes there, unless it is damaged."""
        name, self._names[place] = self._names[place], None
        if name is None or self._below is None:
            return
        if zlib.crc32(self._bytes[place]) == self._checksums[place]:
            self._below.put(name, self._bytes[place].data)
        else:
            _log.error("a page in host memory is damaged; it is forgotten")

    def _fetch(self, place: int) -> object | None:
        if zlib.crc32(self._bytes[place]) != self._checksums[place]:
            _log.error("a page in host memory is damaged; it is forgotten and computed again")
            return None
        try:
            content = self._to_device(self._page(place))
        except Exception as error:  # noqa: BLE001 - the same
            _log.warning("a page was not copied to the device; it is computed again", cause=type(error).__name__)
            return None
        self._observer.tier_moved("out", self._form.num_bytes)
        return content

    def _page(self, place: int) -> np.ndarray:
        return self._bytes[place].view(self._form.dtype).reshape(self._form.shape)
