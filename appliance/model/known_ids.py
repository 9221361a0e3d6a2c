"""Known ids: the ids of texts that were encoded before, so that they are not encoded again.

Owns a map from a digest of who asked and what was encoded to the ids, bounded in bytes; what was not used for longest
goes first. Texts are not kept, and nothing leaves the memory of this process.

An entry is found only with the tenant that made it, so no tenant learns from an answer's time what another has sent.
They do share the memory: a tenant that fills it makes the others encode again, which tells them no more than load does.
"""

import hashlib
import threading
from array import array
from collections import OrderedDict

OVERHEAD_BYTES = 250
"""What an entry takes beside its ids: digest, array, links."""


class KnownIds:
    """Ids by what they were made from. Thread-safe."""

    def __init__(self, most_bytes: int) -> None:
        """Keep at most ``most_bytes``; 0 keeps nothing."""
        self._most_bytes = most_bytes
        self._bytes = 0
        self._entries: OrderedDict[bytes, array[int]] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        """Bytes of all entries."""
        return self._bytes

    @property
    def keeps(self) -> bool:
        """Whether anything is kept at all."""
        return self._most_bytes > 0

    def get(self, key: bytes) -> "array[int] | None":
        """The ids under a key; not to be changed."""
        with self._lock:
            found = self._entries.get(key)
            if found is not None:
                self._entries.move_to_end(key)
            return found

    def put(self, key: bytes, ids: "array[int]") -> None:
        """Keep ids under a key; ids too many for the whole memory are not kept."""
        size = _size(ids)
        if size > self._most_bytes:
            return
        with self._lock:
            earlier = self._entries.pop(key, None)
            if earlier is not None:
                self._bytes -= _size(earlier)
            self._entries[key] = ids
            self._bytes += size
            while self._bytes > self._most_bytes:
                _, oldest = self._entries.popitem(last=False)
                self._bytes -= _size(oldest)


class Keys:
    """Keys of one tenant's texts; different tenants and different ways to encode never have the same key."""

    __slots__ = ("_start",)

    def __init__(self, tenant: str) -> None:
        """Keys of one tenant."""
        name = tenant.encode()
        self._start = hashlib.sha256(len(name).to_bytes(8, "little") + name)

    def key(self, way: int, text: str) -> bytes:
        """The key of a text that is encoded in one of several ways, numbered from 0 to 255."""
        digest = self._start.copy()
        digest.update(bytes((way,)))
        digest.update(text.encode(errors="surrogatepass"))  # which no engine takes; it says so itself
        return digest.digest()


def _size(ids: "array[int]") -> int:
    return OVERHEAD_BYTES + len(ids) * ids.itemsize
