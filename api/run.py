"""Run: one client request in the engine, from prompt ids to the texts of its choices.

Owns submission, the state of every choice, the counting of tokens and the giving up of what nobody waits for any more.
Reads ids and finishes from ``api.ports``; never HTTP, never JSON. Streams and whole answers consume the same events, so
both give the same text.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Literal

import msgspec
from msgspec import Struct

from api import limits
from api.errors import ContextLengthError, GenerationError, NotReadyError
from api.exchange import Exchange, Tally
from api.ports import Finished, Generation, GenerationRequest, Generator, SamplingParams, TokenLogprob, Tokens
from api.services import Services
from api.text_stream import TextStream

EndReason = Literal["stop", "stop_string", "length"]

_QUEUED_EVENTS = 16


class Ask(Struct, frozen=True, kw_only=True):
    """What a request wants of each of its prompts, the same for all APIs.

    ``max_tokens`` None means what is left of the context, 0 asks for no token at all; ``sampling.max_tokens`` is filled
    in from it. ``keep_prefix`` as in ``api.ports.GenerationRequest``.
    """

    model: str
    max_tokens: int | None
    sampling: SamplingParams
    num_choices: int = 1
    stops: tuple[str, ...] = ()
    include_stop: bool = False
    keep_prefix: bool = False


class Entry(Struct, frozen=True):
    """Log-probabilities of one id; ``offset`` is where its text begins, in characters of the completion."""

    logprob: TokenLogprob
    offset: int


class Delta(Struct, frozen=True):
    """New text of one choice, and the entries of the ids behind it when asked for."""

    choice: int
    text: str
    entries: tuple[Entry, ...] = ()


class End(Struct, frozen=True):
    """One choice is complete; ``stop_string`` is the one that ended it."""

    choice: int
    reason: EndReason
    stop_string: str | None = None


class Completed(Struct, frozen=True):
    """The whole of one choice."""

    choice: int
    text: str
    entries: tuple[Entry, ...]
    end: End


class _Choice:
    """State of one choice."""

    __slots__ = ("finished", "index", "text")

    def __init__(self, index: int, text: TextStream) -> None:
        self.index = index
        self.text = text
        self.finished = False

    def take(self, event: Tokens, tally: Tally) -> Delta | None:
        """The visible part of new ids; None when there is nothing to show. Ids after a stop string are not counted."""
        pieces: list[str] = []
        entries: list[Entry] = []
        for position, token_id in enumerate(event.ids):
            if self.text.found is not None:
                break
            if event.logprobs:
                entries.append(Entry(event.logprobs[position], self.text.decoded))
            pieces.append(self.text.push(token_id))
            tally.completion_tokens += 1
        text = "".join(pieces)
        return Delta(self.index, text, tuple(entries)) if text or entries else None

    def finish(self, event: Finished) -> tuple[Delta | None, End]:
        """The rest of the text and the end.

        Raises:
            GenerationError: the engine gave the choice up.
            NotReadyError: the appliance did, because of a deadline or its own end.
        """
        self.finished = True
        if self.text.found is None:
            if event.reason == "error":
                raise GenerationError(event.error or "the engine gave this request up without a reason")
            if event.reason == "cancelled":
                raise NotReadyError(
                    event.error or "the appliance gave this request up (deadline or shutdown); try again"
                )
        rest = self.text.flush()
        delta = Delta(self.index, rest) if rest else None
        if self.text.found is not None:
            return delta, End(self.index, "stop_string", self.text.found)
        return delta, End(self.index, "length" if event.reason == "length" else "stop")


class Run:
    """A submitted request. Iterate ``events`` once; ``close`` always."""

    __slots__ = ("_choices", "_closed", "_exchange", "_generations", "_per_prompt", "_services")

    def __init__(
        self,
        services: Services,
        exchange: Exchange,
        generations: list[Generation],
        choices: list[_Choice],
        per_prompt: int,
    ) -> None:
        self._services = services
        self._exchange = exchange
        self._generations = generations
        self._choices = choices
        self._per_prompt = per_prompt
        self._closed = False

    @property
    def num_choices(self) -> int:
        """Choices of all prompts together."""
        return len(self._choices)

    async def events(self) -> AsyncGenerator[Delta | End]:
        """Deltas and ends of all choices, in the order in which they come; each choice ends exactly once.

        Raises:
            ApiError: a choice failed; the others are not worth anything then.
        """
        if not self._generations:
            for choice in self._choices:
                choice.finished = True
                yield self._ended(End(choice.index, "length"))
            return
        async with aclosing(_merged(self._generations)) as merged:
            async for index, event in merged:
                choice = self._choices[index * self._per_prompt + event.choice]
                if isinstance(event, Tokens):
                    delta = self._take(index, choice, event)
                    if delta is not None:
                        yield delta
                    continue
                if event.choice == 0:
                    self._exchange.tally.cached_tokens += event.cached_tokens
                    self._exchange.tally.created_tokens += event.created_tokens
                    if index == 0:
                        self._exchange.was_in_engine(event)
                delta, end = choice.finish(event)
                if delta is not None:
                    yield delta
                yield self._ended(end)
                if all(choice.finished for choice in self._choices):
                    return
        raise GenerationError("the engine ended this request without finishing it")

    async def completed(self) -> list[Completed]:
        """All choices as wholes, by index.

        Raises:
            ApiError: a choice failed.
        """
        texts: list[list[str]] = [[] for _ in self._choices]
        entries: list[list[Entry]] = [[] for _ in self._choices]
        ends: dict[int, End] = {}
        async with aclosing(self.events()) as events:
            async for event in events:
                if isinstance(event, End):
                    ends[event.choice] = event
                else:
                    texts[event.choice].append(event.text)
                    entries[event.choice].extend(event.entries)
        return [
            Completed(index, "".join(texts[index]), tuple(entries[index]), ends[index])
            for index in range(self.num_choices)
        ]

    def close(self) -> None:
        """Give up whatever has not finished, and count the completion against the key. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for index, generation in enumerate(self._generations):
            own = self._choices[index * self._per_prompt : (index + 1) * self._per_prompt]
            if not all(choice.finished for choice in own):
                self._exchange.tally.completion_tokens += generation.unread
                generation.cancel()
        tenant = self._exchange.tenant
        if tenant is not None and tenant.key_id and self._exchange.tally.completion_tokens:
            self._services.quota.add_tokens(tenant, self._exchange.tally.completion_tokens)

    def _take(self, index: int, choice: _Choice, event: Tokens) -> Delta | None:
        if choice.text.found is not None:
            return None
        tally = self._exchange.tally
        tally.last_token_s = self._services.clock.monotonic()
        if tally.first_token_s is None:
            tally.first_token_s = tally.last_token_s
        delta = choice.take(event, tally)
        if choice.text.found is not None:
            self._generations[index].cancel(event.choice)
        return delta

    def _ended(self, end: End) -> End:
        self._exchange.tally.finish_reasons.add(end.reason)
        return end


async def start(
    services: Services, exchange: Exchange, ask: Ask, prompts: Sequence[Sequence[int]], *, stream: bool
) -> Run:
    """Submit a request. The run is closed with the exchange at the latest.

    What nobody reads before its end is asked for as a whole, which saves a wake-up of this process for every id; a stop
    string has to be looked for on the way.

    Raises:
        ContextLengthError: a prompt leaves no room for an answer.
        RateLimitError: the prompts pass the key's tokens of this minute.
        ApiError: what ``api.ports.Generator.submit`` raises.
    """
    rooms = [_room(len(prompt), services.card.context) for prompt in prompts]
    tally, tenant = exchange.tally, exchange.tenant
    tally.prompt_tokens = sum(map(len, prompts))
    if tenant is not None:
        limits.take(services, exchange, tenant, tokens=tally.prompt_tokens)
    choices = [
        _Choice(
            index * ask.num_choices + choice,
            TextStream(services.codec.decoder(prompt), ask.stops, include_stop=ask.include_stop),
        )
        for index, prompt in enumerate(prompts)
        for choice in range(ask.num_choices)
    ]
    generations: list[Generation] = []
    run = Run(services, exchange, generations, choices, ask.num_choices)
    exchange.on_close(run.close)
    tally.model = services.card.name
    if ask.max_tokens == 0:
        return run
    tally.submitted_s = services.clock.monotonic()
    for prompt, room in zip(prompts, rooms, strict=True):
        limit = room if ask.max_tokens is None else min(room, ask.max_tokens)
        request = GenerationRequest(
            request_id=exchange.request_id,
            model=services.card.name,
            tenant=exchange.tenant_name,
            prompt_ids=prompt,
            sampling=msgspec.structs.replace(
                ask.sampling, max_tokens=limit, min_tokens=min(limit, ask.sampling.min_tokens)
            ),
            num_choices=ask.num_choices,
            traceparent=exchange.trace.traceparent,
            whole=not stream and not ask.stops,
            keep_prefix=ask.keep_prefix,
        )
        generations.append(await _submit(services.generator, request))
    return run


def _room(prompt_len: int, context: int) -> int:
    if prompt_len >= context:
        raise ContextLengthError(
            f"the prompt has {prompt_len} tokens; the context holds {context}, at least one of them for the answer: "
            f"shorten the prompt by {prompt_len - context + 1} tokens or more"
        )
    return context - prompt_len


async def _submit(generator: Generator, request: GenerationRequest) -> Generation:
    """Submit so that a client leaving meanwhile neither tears the submission apart nor leaves it running."""
    submission = asyncio.ensure_future(generator.submit(request))
    try:
        return await asyncio.shield(submission)
    except asyncio.CancelledError:
        submission.add_done_callback(_cancel_late)
        raise


def _cancel_late(submission: "asyncio.Future[Generation]") -> None:
    if not submission.cancelled() and submission.exception() is None:
        submission.result().cancel()


async def _merged(generations: Sequence[Generation]) -> AsyncGenerator[tuple[int, Tokens | Finished]]:
    """The events of several generations as they come, each with its generation's index."""
    if len(generations) == 1:
        async for event in generations[0]:
            yield 0, event
        return
    queue: asyncio.Queue[tuple[int, Tokens | Finished | None]] = asyncio.Queue(_QUEUED_EVENTS)

    async def pump(index: int, generation: Generation) -> None:
        try:
            async for event in generation:
                await queue.put((index, event))
        finally:
            await queue.put((index, None))

    pumps = [asyncio.create_task(pump(index, generation)) for index, generation in enumerate(generations)]
    open_pumps = len(pumps)
    try:
        while open_pumps:
            index, event = await queue.get()
            if event is None:
                open_pumps -= 1
                await pumps[index]
            else:
                yield index, event
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
