"""The index of fingerprints: which node holds the prefix of a prompt like this one.

Owns what an entry is, how candidates are ranked, the interface, and the index in memory that serves where no Redis is
configured: one a worker process, bounded, least recently used entries first out, with a time to live on the monotonic
clock. Under each band key lies the newest entry published with it, whole, so that nothing can point to what is gone.
Candidates are proposals: whoever uses one finds out by itself what is really shared. Never imports jax or numpy.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from threading import Lock
from typing import TYPE_CHECKING, Annotated, Protocol

import msgspec
from msgspec import Meta, Struct

from appliance.reuse.prefix import MARK_BYTES, MAX_MARKS

if TYPE_CHECKING:
    from appliance.reuse.fingerprint import Fingerprint

SCHEMA = 1
"""Of entries; those of another one are not seen."""
MAX_REFERENCE_BYTES = MAX_MARKS * MARK_BYTES
MAX_NODE_CHARS = 128
MAX_VALUE_BYTES = 1024
"""More than any entry takes; a longer value is none of ours."""
MAX_CANDIDATES = 4


class Entry(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A prefix that a node holds or is computing.

    ``reference`` is opaque to the index (``appliance.reuse.prefix`` makes it); ``tokens`` is the length of the prefix;
    ``warmup`` says that the rest of the prompt is still being computed.
    """

    reference: Annotated[bytes, Meta(max_length=MAX_REFERENCE_BYTES)]
    node: Annotated[str, Meta(min_length=1, max_length=MAX_NODE_CHARS)]
    tokens: Annotated[int, Meta(ge=1, le=1 << 31)]
    warmup: bool = False


class Candidate(Struct, frozen=True):
    """An entry that shares ``bands`` band keys with the prompt that was looked up."""

    entry: Entry
    bands: int


class FingerprintIndex(Protocol):
    """Where entries are published and found. Every call returns soon and none ever raises.

    ``space`` keeps tenants and models apart (``appliance.reuse.prefix.space_of``).
    """

    def propose(self, space: bytes, fingerprint: "Fingerprint") -> tuple[Candidate, ...]:
        """At most ``MAX_CANDIDATES``, the one with most bands first; none where the index cannot be asked."""
        ...

    def publish(self, space: bytes, fingerprint: "Fingerprint", entry: Entry) -> bool:
        """Put an entry under every band key, in place of older ones; whether that was done."""
        ...

    def close(self) -> None:
        """Let go of connections and memory."""
        ...


class EmbeddedIndex:
    """The index in this process. Safe to share between threads."""

    def __init__(self, most_entries: int, ttl_s: float, clock: Callable[[], float]) -> None:
        """Hold at most ``most_entries``, each for ``ttl_s`` seconds of ``clock``, which never goes back."""
        self._most = most_entries
        self._ttl_s = ttl_s
        self._clock = clock
        self._lock = Lock()
        self._held: OrderedDict[bytes, tuple[float, Entry]] = OrderedDict()

    def __len__(self) -> int:
        """Band keys held; an entry has as many as its fingerprint has bands."""
        return len(self._held)

    def propose(self, space: bytes, fingerprint: "Fingerprint") -> tuple[Candidate, ...]:
        """See ``FingerprintIndex``."""
        now, found = self._clock(), list[Entry]()
        with self._lock:
            for key in fingerprint.keys:
                until_s, entry = self._held.get(space + key, (0.0, None))
                if entry is None:
                    continue
                if until_s <= now:
                    del self._held[space + key]
                    continue
                self._held.move_to_end(space + key)
                found.append(entry)
        return ranked(found)

    def publish(self, space: bytes, fingerprint: "Fingerprint", entry: Entry) -> bool:
        """See ``FingerprintIndex``."""
        if encoded(entry) is None:
            return False
        until_s = self._clock() + self._ttl_s
        with self._lock:
            for key in fingerprint.keys:
                self._held[space + key] = (until_s, entry)
                self._held.move_to_end(space + key)
            while len(self._held) > self._most * len(fingerprint.keys):
                self._held.popitem(last=False)
        return True

    def close(self) -> None:
        """See ``FingerprintIndex``."""
        with self._lock:
            self._held.clear()


def ranked(entries: Iterable[Entry]) -> tuple[Candidate, ...]:
    """The different entries with their counts: most bands first, then the longest prefix."""
    counts: dict[Entry, int] = {}
    for entry in entries:
        counts[entry] = counts.get(entry, 0) + 1
    order = sorted(counts.items(), key=lambda item: (item[1], item[0].tokens), reverse=True)
    return tuple(Candidate(entry, bands) for entry, bands in order[:MAX_CANDIDATES])


def encoded(entry: Entry) -> bytes | None:
    """An entry as a value of the index; None where it breaks a bound of its fields."""
    value = _encoder.encode((SCHEMA, entry))
    return value if decoded(value) is not None else None


def decoded(value: bytes) -> Entry | None:
    """The entry in a value; None for anything that this version did not write, whatever it is."""
    if len(value) > MAX_VALUE_BYTES:
        return None
    try:
        schema, entry = _decoder.decode(value)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
    return entry if schema == SCHEMA else None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(tuple[int, Entry])
