"""Prefixes: which pages of a sequence are there already, and which somebody is about to compute.

Owns the names of pages, given to the pool as they fill, and the promises of sequences whose prompt is being computed.
Reads sequences and the pool; takes no page and decides nobody's turn.

A full page is named by a chain of SHA-256: the digest of the page before, then its ids as little-endian int32. The
first link is a digest of what else decides about keys and values (model, adapter, format, as ``identity`` says) and of
the tenant, so that equal ids of two tenants have different names unless tenants are told to share. Equal names are
taken for equal contents.

A page is named as soon as the launch that fills it is planned: programs run in the order of dispatch, so whoever is
admitted in a later step reads it after it was written. Only full pages have names, and a sequence writes behind the
pages that it shares, so no named page is ever written again. The page with the last id of a sequence is never shared
with it: at least one id has to be computed.

A sequence that enters *promises* the full pages of its ids that it is going to compute. One whose next page is promised
waits for the last promised page of its own chain instead of computing the same; when that page is named, or its promise
is broken because the one that made it is gone, it comes in line again. Pages that are loaded from a tier are named when
their content is on its way into them, like those that a launch fills.
"""

from array import array
from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import islice
from sys import byteorder

from planner.host_tier import TierCounts
from planner.pages import PagePool
from planner.sequence import Sequence

_ID_BYTES = 4
_WARM_PART = 10
"""A prompt is long, for warming up, when this part of it is a page or more."""

assert byteorder == "little", "ids lie in memory as they are hashed"


def identity_of(*parts: str) -> bytes:
    """What names of pages depend on beside ids and tenant: one digest of all parts and of where they end."""
    return sha256(b"".join(sha256(part.encode()).digest() for part in parts)).digest()


@dataclass(frozen=True, slots=True)
class PrefixSettings:
    """What is shared.

    ``reuse`` False: nothing is. ``identity`` is what names depend on beside ids (``identity_of``), and ``all_tenants``
    says whether tenants share pages. ``lead`` counts the first positions of a sequence that its slot needs computed
    whatever pages there are. ``warm_up``: of a long prompt of which nothing is there, a tenth at most is computed
    first, in a step of its own, so that others can begin behind it.
    """

    reuse: bool = True
    identity: bytes = b""
    all_tenants: bool = False
    lead: int = 0
    warm_up: bool = False


@dataclass(slots=True)
class ReuseCounts:
    """What reuse has brought since the start, in ids of prompts that entered, waits for running prefills, and pages."""

    prompt_tokens: int = 0
    reused_tokens: int = 0
    joins: int = 0
    evictions: int = 0
    tier: TierCounts = field(default_factory=TierCounts)

    @property
    def hit_rate(self) -> float:
        """Share of prompt ids that were not computed, 0 to 1."""
        return self.reused_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


class Prefixes:
    """The prefixes of one pool.

    Costs O(1) a page of a sequence; nothing grows with the pool. Pages that are looked for and not found cost a digest
    and a look-up each.
    """

    __slots__ = ("_pool", "_promises", "_settings", "_waiting", "counts")

    def __init__(self, pool: PagePool, settings: PrefixSettings) -> None:
        self._pool = pool
        self._settings = settings
        self._promises: dict[bytes, Sequence] = {}
        self._waiting: dict[bytes, list[Sequence]] = {}
        self.counts = ReuseCounts()

    def submitted(self, choices: Many[Sequence]) -> None:
        """Name the pages of a request's prompt, once for all its choices."""
        if self._settings.reuse:
            first = choices[0]
            self._extend(first, len(first.ids) // self._pool.page_size)
            for choice in choices[1:]:
                choice.chain = list(first.chain)

    def resident(self, sequence: Sequence) -> list[int]:
        """The pages that a waiting sequence could share now: the longest chain without a gap."""
        found: list[int] = []
        for name in self._wanted(sequence):
            page = self._pool.find(name)
            if page is None or not self._pool.fits_behind(found, page):
                break
            found.append(page)
        return found if len(found) * self._pool.page_size > self._settings.lead else []

    def awaits(self, sequence: Sequence, resident: int) -> bool:
        """Whether somebody computes the page behind these; the sequence is then among those given back for it later."""
        last: bytes | None = None
        for name in islice(self._wanted(sequence), resident, None):
            if name not in self._promises:
                break
            last = name
        if last is None:
            return False
        self._waiting.setdefault(last, []).append(sequence)
        self.counts.joins += 1
        return True

    def entered(self, sequence: Sequence, shared: int) -> int:
        """A sequence has its pages, ``shared`` of them from others: it promises the others that its ids fill.

        Sets where its computing begins. Returns how many of its positions it does not compute.
        """
        sequence.kept = sequence.promised = shared
        if self._settings.reuse:
            sequence.promised = len(sequence.ids) // self._pool.page_size
            for name in islice(sequence.chain, shared, sequence.promised):
                self._promises.setdefault(name, sequence)
        return self.begin(sequence)

    def begin(self, sequence: Sequence) -> int:
        """Let a sequence compute what is behind its pages that are full; how many positions it does not compute."""
        sequence.computed = spared = sequence.kept * self._pool.page_size
        if spared and self._settings.lead:
            sequence.computed, sequence.resume_at = 0, spared
            spared -= self._settings.lead
        return spared

    def behind(self, sequence: Sequence, shared: int) -> Iterator[bytes]:
        """Names of the pages that a sequence could have without computing them, beside its first ``shared`` ones."""
        return islice(self._wanted(sequence), shared, None)

    def loaded(self, sequence: Sequence, pages: int) -> list[Sequence]:
        """So many pages more of a sequence get their contents in this step, from a tier; who waited for them."""
        woken: list[Sequence] = []
        for index in range(sequence.kept, sequence.kept + pages):
            name = sequence.chain[index]
            self._pool.keep(sequence.pages[index], name, precious=True)
            woken += self._kept(name)
        sequence.kept += pages
        return woken

    def next_end(self, sequence: Sequence) -> int:
        """Where the next chunk of a sequence ends at the latest, so that what others can use comes first."""
        end, page_size = len(sequence.ids), self._pool.page_size
        if sequence.resume_at:
            return self._settings.lead
        if self._waiting:
            for index in range(sequence.kept, sequence.promised):
                if sequence.chain[index] in self._waiting:
                    awaited = (index + 1) * page_size
                    return awaited if end - awaited > page_size else end
        first = end // _WARM_PART // page_size * page_size
        return first if self._settings.warm_up and first and not sequence.computed else end

    def publish(self, sequence: Sequence) -> list[Sequence]:
        """Name the pages that are full by now; who waited for them."""
        page_size = self._pool.page_size
        full = min(len(sequence.ids), sequence.computed) // page_size
        if not self._settings.reuse or full <= sequence.kept:
            return []
        self._extend(sequence, full)
        woken: list[Sequence] = []
        of_prompt = sequence.prompt_len // page_size
        for index in range(sequence.kept, full):
            name, prompt = sequence.chain[index], index < of_prompt
            new = self._pool.keep(sequence.pages[index], name, precious=prompt and sequence.precious)
            sequence.created_tokens += page_size * (new and prompt and not sequence.preemptions)
            if index < sequence.promised:
                woken += self._kept(name)
        sequence.kept = full
        return woken

    def left(self, sequence: Sequence) -> list[Sequence]:
        """A sequence gives its pages back: its last full ones are named, its promises broken; who waited for them."""
        woken = self.publish(sequence)
        for name in islice(sequence.chain, sequence.kept, sequence.promised):
            if self._promises.get(name) is sequence:
                del self._promises[name]
                woken += self._waiting.pop(name, ())
        sequence.promised = sequence.resume_at = 0
        return woken

    def check(self, running: Many[Sequence]) -> None:
        """Check every invariant; for tests and debugging.

        Raises:
            AssertionError: a promise is nobody's, or somebody waits for nothing.
        """
        for name, sequence in self._promises.items():
            assert sequence in running, "only who runs promises"
            assert name in sequence.chain[sequence.kept : sequence.promised], "what is promised is still to come"
        assert set(self._waiting) <= set(self._promises), "whoever waits was promised something"

    def _kept(self, name: bytes) -> list[Sequence]:
        """A page that was promised is there; who waited for it."""
        return [] if self._promises.pop(name, None) is None else self._waiting.pop(name, [])

    def _wanted(self, sequence: Sequence) -> Iterator[bytes]:
        """Names of the pages that a sequence may share: all but the one with its last id."""
        if not self._settings.reuse:
            return iter(())
        page_size = self._pool.page_size
        self._extend(sequence, len(sequence.ids) // page_size)
        return islice(sequence.chain, (len(sequence.ids) - 1) // page_size)

    def _extend(self, sequence: Sequence, pages: int) -> None:
        """Name so many pages of a sequence."""
        chain = sequence.chain
        if len(chain) >= pages:
            return
        page_size = self._pool.page_size
        name = chain[-1] if chain else self._salt(sequence.tenant)
        first, size = len(chain) * page_size, page_size * _ID_BYTES
        ids = _bytes_of(sequence, first, pages * page_size)
        for start in range(0, len(ids), size):
            digest = sha256(name)
            digest.update(ids[start : start + size])
            name = digest.digest()
            chain.append(name)

    def _salt(self, tenant: str) -> bytes:
        identity = self._settings.identity
        return identity if self._settings.all_tenants else sha256(identity + tenant.encode()).digest()


def _bytes_of(sequence: Sequence, first: int, end: int) -> memoryview:
    """A part of a sequence's ids as it is hashed."""
    part = sequence.ids[first:end]
    return part.cast("B") if isinstance(part, memoryview) else memoryview(array("i", part)).cast("B")
