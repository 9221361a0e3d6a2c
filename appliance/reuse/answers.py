"""KeptAnswers: whole answers to requests that were the same to the last id, given again without the engine.

Owns the answers of one worker, in memory and bounded. An answer is kept only where the same request must give the same
again: greedy, or with a seed of its own. It is found by a digest of everything that decides about it: tenant, model,
prompt ids, sampling and number of choices. Requests that merely resemble each other never meet. What is kept are the
events of the engine, and they go the same way again, so that streams and whole answers come out as they did.

Kept is what came to its own end; an answer that its client left, that failed or that a stop string cut short is not.
What a tenant asked to forget is forgotten by every worker of the node: a request takes the tenant's *mark* along when
it begins, and its answer counts only while the mark is the same. Never imports jax.
"""

import os
import secrets
from array import array
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Self

import msgspec
from prometheus_client import Counter

from api.ports import EngineStatus, Finished, Generation, GenerationRequest, Generator, Tokens

Event = Tokens | Finished

_ID_BYTES = 40
"""What an id of an answer takes in memory, with its share of the event around it."""
_LOGPROB_BYTES = 120
_ANSWER_BYTES = 600
_ENDS = frozenset({"stop", "length"})


class Marks:
    """A mark for each tenant, the same in all workers of a node; it changes when the tenant's answers are forgotten."""

    def __init__(self, folder: Path) -> None:
        """Keep them in a folder that the workers share and nobody else may enter."""
        self._folder = folder
        folder.mkdir(mode=0o700, exist_ok=True)

    def of(self, tenant: str) -> bytes:
        """The tenant's mark now."""
        try:
            return self._path(tenant).read_bytes()
        except FileNotFoundError:
            return b""

    def change(self, tenant: str) -> None:
        """Give the tenant another mark."""
        path = self._path(tenant)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_bytes(secrets.token_bytes(16))
        part.replace(path)

    def _path(self, tenant: str) -> Path:
        return self._folder / sha256(tenant.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class _Answer:
    events: tuple[Event, ...]
    mark: bytes
    until_s: float
    num_bytes: int


class KeptAnswers:
    """The answers of one worker. Lives on its event loop.

    Args:
        most_bytes: memory for answers, about; the ones used longest ago go first.
        ttl_s: how long an answer is kept.
        marks: of the node's tenants.
        clock: monotonic seconds.
        counted: by result: hit, miss, or no where the request may be answered otherwise the next time.
    """

    def __init__(
        self, most_bytes: int, ttl_s: float, marks: Marks, clock: Callable[[], float], counted: Counter
    ) -> None:
        self._most_bytes = most_bytes
        self._ttl_s = ttl_s
        self._marks = marks
        self._clock = clock
        self._counted = counted
        self._answers: OrderedDict[bytes, _Answer] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._answers)

    def over(self, generator: Generator) -> Generator:
        """A generator that asks another one only for what is not kept."""
        return _Generator(generator, self)

    def forget(self, tenant: str) -> None:
        """Give nothing again of what the tenant has asked before now, in no worker; see ``api.ports.Answers``."""
        self._marks.change(tenant)

    async def ask(self, request: GenerationRequest, generator: Generator) -> Generation:
        """An answer that is kept; else one of the generator's, whose events are kept once all have come."""
        if not is_repeatable(request):
            self._counted.labels("no").inc()
            return await generator.submit(request)
        key, mark = key_of(request), self._marks.of(request.tenant)
        events = self._find(key, mark)
        self._counted.labels("miss" if events is None else "hit").inc()
        if events is not None:
            return _Replayed(events, len(request.prompt_ids))
        generation = await generator.submit(request)
        return _Recorded(generation, request.num_choices, lambda events: self._keep(key, mark, events))

    def _find(self, key: bytes, mark: bytes) -> tuple[Event, ...] | None:
        answer = self._answers.get(key)
        if answer is None:
            return None
        if self._clock() >= answer.until_s or answer.mark != mark:
            self._drop(key)
            return None
        self._answers.move_to_end(key)
        return answer.events

    def _keep(self, key: bytes, mark: bytes, events: Sequence[Event]) -> None:
        size = _ANSWER_BYTES + sum(map(_bytes_of, events))
        if size > self._most_bytes:
            return
        self._drop(key)
        self._answers[key] = _Answer(tuple(events), mark, self._clock() + self._ttl_s, size)
        self.num_bytes += size
        while self.num_bytes > self._most_bytes:
            self._drop(next(iter(self._answers)))

    def _drop(self, key: bytes) -> None:
        answer = self._answers.pop(key, None)
        if answer is not None:
            self.num_bytes -= answer.num_bytes


def is_repeatable(request: GenerationRequest) -> bool:
    """Whether the same request must give the same answer again."""
    return request.sampling.temperature == 0 or request.sampling.seed is not None


def key_of(request: GenerationRequest) -> bytes:
    """A digest of everything that decides about an answer, and of where each part ends."""
    given = request.prompt_ids
    ids = (given if isinstance(given, array) else array("i", given)).tobytes()
    parts = msgspec.msgpack.encode(
        (1, request.tenant, request.model, request.num_choices, msgspec.structs.astuple(request.sampling), len(ids))
    )
    return sha256(parts + ids).digest()


def _bytes_of(event: Event) -> int:
    if isinstance(event, Finished):
        return 0
    return _ID_BYTES * len(event.ids) + sum(_LOGPROB_BYTES * (1 + len(entry.top)) for entry in event.logprobs)


class _Generator:
    """Asks for what is not kept, and keeps what comes."""

    def __init__(self, inner: Generator, answers: KeptAnswers) -> None:
        self._inner = inner
        self._answers = answers

    async def submit(self, request: GenerationRequest) -> Generation:
        """An answer that is kept, else one of the engine's."""
        return await self._answers.ask(request, self._inner)

    def status(self) -> EngineStatus:
        """What is known of the engine."""
        return self._inner.status()


class _Recorded:
    """A running generation; its events are handed over once each choice has come to its own end."""

    def __init__(self, inner: Generation, num_choices: int, keep: Callable[[list[Event]], None]) -> None:
        self._inner = inner
        self._source: AsyncIterator[Event] = aiter(inner)
        self._open = num_choices
        self._events: list[Event] | None = []
        self._keep = keep

    @property
    def unread(self) -> int:
        """See ``api.ports.Generation``."""
        return self._inner.unread

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        event = await anext(self._source)
        if self._events is not None:
            self._events.append(event)
            if isinstance(event, Finished):
                self._open -= 1
                if event.reason not in _ENDS:
                    self._events = None
                elif not self._open:
                    self._keep(self._events)
        return event

    def cancel(self, choice: int | None = None) -> None:
        """Give up; what was given up is not kept."""
        if self._open:
            self._events = None
        self._inner.cancel(choice)


class _Replayed:
    """An answer that is given again; its prompt was not computed, so all of it counts as reused."""

    def __init__(self, events: Sequence[Event], prompt_len: int) -> None:
        self._events = iter(events)
        self._prompt_len = prompt_len
        self._given_up: set[int] | None = set()

    @property
    def unread(self) -> int:
        """Nothing: it cost nothing."""
        return 0

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        for event in self._events:
            left = self._given_up is None or event.choice in self._given_up
            if isinstance(event, Finished):
                reused = self._prompt_len if event.choice == 0 else 0
                return Finished(
                    event.choice, "cancelled" if left else event.reason, event.stop_token_id, cached_tokens=reused
                )
            if not left:
                return event
        raise StopAsyncIteration

    def cancel(self, choice: int | None = None) -> None:
        """Give no more ids of one choice, or of all."""
        if choice is None:
            self._given_up = None
        elif self._given_up is not None:
            self._given_up.add(choice)
