"""Proposals: each request's prompt is fingerprinted, looked up and published, beside the request and never before it.

Owns the one thread of a worker that does this, what waits for it, and what is remembered of a request until it ends. A
request is handed to the engine first; its text is then made from its first ids, so that every API is treated alike.
When there is more to do than the thread can, prompts are left out and counted. A candidate is believed as far as the
marks of its prefix are those of the prompt. Never imports jax; no text and no id leaves the process.

Source: the warm-up entry of the first tenth of a prompt is mechanism M9 of the requirements.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Literal

import structlog

from api.ports import EngineStatus, Generation, GenerationRequest, Generator, RequestRecord
from appliance.reuse.index import Candidate, Entry, FingerprintIndex
from appliance.reuse.prefix import MARK_TOKENS, common_tokens, reference_of, space_of
from appliance.telemetry import FingerprintMetrics

if TYPE_CHECKING:
    from appliance.reuse.fingerprint import Fingerprint, Fingerprinter

MAX_WAITING = 16
"""Prompts that wait for the thread; a prompt that finds so many is left out."""
MAX_REMEMBERED = 4096
TEXT_IDS = 2048
"""First ids from which the text is made: enough for the light tokens of any prose."""
WARMUP_SHARE = 10
"""The first entry of a prompt stands for one part in so many."""

_log = structlog.get_logger("zccp.reuse")

Result = Literal["hit", "different", "miss", "none", "skipped"]


@dataclass(frozen=True, slots=True)
class Looked:
    """What is known of one prompt: where it belongs, what it is like, and the candidate that shares most of it.

    ``shared`` counts ids, in whole marks; ``node`` is empty where nothing is shared.
    """

    space: bytes
    fingerprint: "Fingerprint"
    entry: Entry
    result: Result
    node: str = ""
    shared: int = 0
    bands: int = 0
    is_published: bool = False


class Proposals:
    """The look-ups of one worker. ``offer`` and ``ended`` are called on its event loop and never wait."""

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        make: "Callable[[], tuple[Fingerprinter, FingerprintIndex]]",
        metrics: FingerprintMetrics,
        *,
        node: str,
        model: str,
        warmup: bool,
    ) -> None:
        """Prepare.

        Args:
            token_bytes: the text of an id.
            make: gives what makes fingerprints and the index where they are looked up. It is called in the thread,
                which alone uses both, so that nothing has to wait until they are loaded.
            metrics: where to count.
            node: this node's name in the index.
            model: what the ids belong to, the same on every node that serves it.
            warmup: whether a prompt is published before it is computed.
        """
        self._token_bytes = token_bytes
        self._metrics = metrics
        self._node = node
        self._model = model
        self._warmup = warmup
        self._thread = ThreadPoolExecutor(1, "fingerprints")
        self._parts = self._thread.submit(make)
        self._lock = Lock()
        self._waiting = 0
        self._known: OrderedDict[str, Looked] = OrderedDict()

    def over(self, generator: Generator) -> Generator:
        """A generator that runs requests with another one and offers what it has handed to the engine."""
        return _Generator(generator, self.offer)

    def offer(self, request: GenerationRequest) -> None:
        """Look a request's prompt up, soon; prompts that are shorter than one mark have nothing to share."""
        if len(request.prompt_ids) < MARK_TOKENS:
            self._metrics.fingerprints.labels("none").inc()
        elif self._waiting >= MAX_WAITING:
            self._metrics.fingerprints.labels("skipped").inc()
        else:
            self._run(self._look, request.request_id, request.tenant, request.prompt_ids)

    def ended(self, record: RequestRecord) -> None:
        """Publish the prompt of a request that was answered."""
        if record.status == 200 and record.completion_tokens:
            with self._lock:
                is_waiting = bool(self._waiting) or record.request_id in self._known
            if is_waiting:
                self._run(self._publish, record.request_id)

    def attributes(self, request_id: str) -> dict[str, str | int]:
        """What a trace says of a request's look-up; empty where there was none or it is not over."""
        with self._lock:
            looked = self._known.get(request_id)
        if looked is None:
            return {}
        return {
            "zccp.fingerprint.result": looked.result,
            "zccp.fingerprint.bands": looked.bands,
            "zccp.fingerprint.shared_tokens": looked.shared,
            "zccp.fingerprint.node": looked.node,
        }

    def settle(self) -> None:
        """Wait until nothing waits; for tests and for the end."""
        self._thread.submit(lambda: None).result()

    def close(self) -> None:
        """Finish what waits, let go of the index, and take nothing more; returns at once."""
        with suppress(RuntimeError):  # closed before
            self._thread.submit(self._close_index)
        self._thread.shutdown(wait=False)

    def _close_index(self) -> None:
        self._parts.result()[1].close()

    def _run(self, job: Callable[..., None], *given: object) -> None:
        with self._lock:
            self._waiting += 1
        try:
            self._thread.submit(job, *given).add_done_callback(self._done)
        except RuntimeError:  # closed
            self._waiting -= 1

    def _done(self, job: "Future[None]") -> None:
        with self._lock:
            self._waiting -= 1
        error = job.exception()
        if error is not None:
            self._metrics.fingerprints.labels("skipped").inc()
            _log.error("a fingerprint failed; its request is not concerned", exc_info=error)

    def _look(self, request_id: str, tenant: str, ids: Sequence[int]) -> None:
        fingerprinter, index = self._parts.result()
        began_s = time.perf_counter()
        text = b"".join(map(self._token_bytes, ids[:TEXT_IDS])).decode(errors="replace")
        fingerprint = fingerprinter.of(text)
        self._metrics.fingerprint_seconds.observe(time.perf_counter() - began_s)
        if fingerprint is None:
            self._metrics.fingerprints.labels("none").inc()
            return
        space = space_of(tenant, self._model)
        own = Entry(reference_of(space, ids), self._node, len(ids))
        looked = self._compared(space, fingerprint, own, index.propose(space, fingerprint))
        self._count(looked)
        with self._lock:
            self._known[request_id] = looked
            self._known.move_to_end(request_id)
            while len(self._known) > MAX_REMEMBERED:
                self._known.popitem(last=False)
        start = max(MARK_TOKENS, len(ids) // WARMUP_SHARE)
        if self._warmup and looked.shared < start:
            index.publish(space, fingerprint, Entry(own.reference, self._node, start, warmup=True))

    def _compared(
        self, space: bytes, fingerprint: "Fingerprint", own: Entry, candidates: tuple[Candidate, ...]
    ) -> Looked:
        """The candidate that shares most, by its marks and never by what it says; none may share the last id."""
        best = Looked(space, fingerprint, own, "different" if candidates else "miss")
        for candidate in candidates:
            entry = candidate.entry
            shared = min(common_tokens(own.reference, entry.reference), entry.tokens, own.tokens - 1)
            if shared > best.shared:
                same = entry == own and candidate.bands == len(fingerprint.keys)
                best = Looked(space, fingerprint, own, "hit", entry.node, shared, candidate.bands, same)
        return best

    def _count(self, looked: Looked) -> None:
        self._metrics.fingerprints.labels(looked.result).inc()
        self._metrics.fingerprint_bands.inc(looked.bands)
        self._metrics.fingerprint_tokens.labels("looked_up").inc(looked.entry.tokens)
        self._metrics.fingerprint_tokens.labels("shared").inc(looked.shared)

    def _publish(self, request_id: str) -> None:
        with self._lock:
            looked = self._known.pop(request_id, None)
        if looked is not None and not looked.is_published:
            self._parts.result()[1].publish(looked.space, looked.fingerprint, looked.entry)


class _Generator:
    """A ``Generator`` that offers what it has handed to the engine."""

    __slots__ = ("_generator", "_offer")

    def __init__(self, generator: Generator, offer: Callable[[GenerationRequest], None]) -> None:
        self._generator = generator
        self._offer = offer

    async def submit(self, request: GenerationRequest) -> Generation:
        """See ``api.ports.Generator``."""
        generation = await self._generator.submit(request)
        self._offer(request)
        return generation

    def status(self) -> EngineStatus:
        """See ``api.ports.Generator``."""
        return self._generator.status()


class IndexMetrics:
    """Counts the calls of an index; see ``appliance.reuse.redis_index.IndexObserver``."""

    __slots__ = ("_metrics",)

    def __init__(self, metrics: FingerprintMetrics) -> None:
        """Count in ``metrics``."""
        self._metrics = metrics

    def index_called(self, operation: str, outcome: str, took_s: float) -> None:
        """One call is over."""
        self._metrics.index_calls.labels(operation, outcome).inc()
        if took_s:
            self._metrics.index_seconds.labels(operation).observe(took_s)

    def index_is_down(self, down: bool) -> None:
        """The index is left alone from now on, or asked again."""
        self._metrics.index_down.set(int(down))
