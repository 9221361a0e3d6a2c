"""A codec whose ids a person can read and an engine that emits what a test scripts.

Ids 0-255 are single bytes; a few more are longer pieces and control tokens. The engine plays steps: events, pauses in
seconds, gates to wait for, and exceptions; it records what was asked of it and what was cancelled.
"""

import asyncio
import codecs
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from api.errors import ApiError
from api.ports import (
    ChatMessage,
    ChatTemplateError,
    EngineStatus,
    Finished,
    FinishReason,
    Generation,
    GenerationRequest,
    TokenLogprob,
    Tokens,
)

BOS, EOS, SYSTEM, USER, ASSISTANT = 256, 257, 258, 259, 260
SPECIAL = {BOS: "<|bos|>", EOS: "<|end|>", SYSTEM: "<|system|>", USER: "<|user|>", ASSISTANT: "<|assistant|>"}
PIECES = {
    261: b"hello",
    262: b" world",
    263: "\U0001fae0".encode()[:2],
    264: "\U0001fae0".encode()[2:],
    265: b"q;r;s",
    266: b"y" * 50_000,
}
VOCAB = 272

Step = Tokens | Finished | float | asyncio.Event | Exception
Script = Callable[[GenerationRequest], Sequence[Step]]


class ScriptedDecoder:
    """Incremental UTF-8 over token bytes."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return "" if token_id in SPECIAL else self._decoder.decode(raw(token_id))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class ScriptedCodec:
    """One id a byte; chats are ``<role> text <end>`` and end with the assistant's header."""

    def __init__(self) -> None:
        self.calls = 0
        self.tenants: list[str] = []

    def encode(self, text: str, *, parse_special: bool, tenant: str = "") -> list[int]:
        self.calls += 1
        self.tenants.append(tenant)
        if not parse_special:
            return [BOS, *text.encode()]
        ids = [BOS]
        while text:
            for token_id, literal in SPECIAL.items():
                if text.startswith(literal):
                    ids.append(token_id)
                    text = text[len(literal) :]
                    break
            else:
                ids.extend(text[0].encode())
                text = text[1:]
        return ids

    def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        continue_last: bool = False,
        template_args: Mapping[str, Any] | None = None,
        tenant: str = "",
    ) -> list[int]:
        self.calls += 1
        self.tenants.append(tenant)
        ids = [BOS]
        for index, message in enumerate(messages):
            if message.content == "REFUSE":
                raise ChatTemplateError("roles must alternate")
            header = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT}[message.role]
            ids += [header, *message.content.encode()]
            if not (continue_last and index == len(messages) - 1):
                ids.append(EOS)
        return ids if continue_last else [*ids, ASSISTANT]

    def decoder(self, prompt_ids: Sequence[int] = ()) -> ScriptedDecoder:
        return ScriptedDecoder()

    def token_bytes(self, token_id: int) -> bytes:
        return raw(token_id)

    def token_text(self, token_id: int) -> str:
        return raw(token_id).decode("utf-8", "replace")


def raw(token_id: int) -> bytes:
    """Bytes of one id."""
    if token_id < 256:
        return bytes([token_id])
    return SPECIAL[token_id].encode() if token_id in SPECIAL else PIECES.get(token_id, b"?")


class ScriptedGeneration:
    """Plays one script."""

    def __init__(self, request: GenerationRequest, steps: Sequence[Step], on_end: Callable[[], None]) -> None:
        self.request = request
        self.cancels: list[int | None] = []
        self.emitted = 0
        self.unread = 0
        self._steps = steps
        self._cached = {step.choice: step.cached_tokens for step in steps if isinstance(step, Finished)}
        self._on_end = on_end
        self._given_up: set[int] = set()
        self._finished: set[int] = set()
        self._wake = asyncio.Event()

    def cancel(self, choice: int | None = None) -> None:
        self.cancels.append(choice)
        self._given_up.update(range(self.request.num_choices) if choice is None else (choice,))
        self._wake.set()
        if choice is None and len(self._finished) < self.request.num_choices:
            self._finished.update(range(self.request.num_choices))
            self._on_end()

    def __aiter__(self) -> AsyncIterator[Tokens | Finished]:
        return self._play()

    async def _play(self) -> AsyncIterator[Tokens | Finished]:
        for step in self._steps:
            if isinstance(step, float | int | asyncio.Event):
                await self._pause(step)
                continue
            if isinstance(step, Exception):
                raise step
            for event in self._given_up_now():
                yield event
            if step.choice in self._finished:
                continue
            self.emitted += 1
            if isinstance(step, Finished):
                self._close(step.choice)
            yield step
        for event in self._given_up_now():
            yield event

    async def _pause(self, step: float | asyncio.Event) -> None:
        pause = step.wait() if isinstance(step, asyncio.Event) else asyncio.sleep(step)
        waits = {asyncio.ensure_future(pause), asyncio.ensure_future(self._wake.wait())}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        self._wake.clear()

    def _given_up_now(self) -> list[Finished]:
        choices = sorted(self._given_up - self._finished)
        for choice in choices:
            self._close(choice)
        return [Finished(choice, "cancelled", None, self._cached.get(choice, 0)) for choice in choices]

    def _close(self, choice: int) -> None:
        self._finished.add(choice)
        if len(self._finished) == self.request.num_choices:
            self._on_end()


class ScriptedEngine:
    """Implements ``api.ports.Generator``."""

    def __init__(self, script: Script | None = None) -> None:
        self.script: Script = script or say("ok")
        self.state = EngineStatus(state="ready")
        self.refusal: ApiError | None = None
        self.admission: asyncio.Event | None = None
        self.requests: list[GenerationRequest] = []
        self.generations: list[ScriptedGeneration] = []
        self.running = 0

    async def submit(self, request: GenerationRequest) -> Generation:
        if self.refusal is not None:
            raise self.refusal
        self.requests.append(request)
        if self.admission is not None:
            await self.admission.wait()
        generation = ScriptedGeneration(request, self.script(request), self._ended)
        self.generations.append(generation)
        self.running += 1
        return generation

    def status(self) -> EngineStatus:
        return self.state

    @property
    def cancels(self) -> list[list[int | None]]:
        """What was cancelled, a list a generation."""
        return [generation.cancels for generation in self.generations]

    def _ended(self) -> None:
        self.running -= 1


def tokens(request: GenerationRequest, choice: int, *ids: int) -> Tokens:
    """An event with log-probabilities where asked for: -0.5 for the chosen id, then -1.5 and less for ``id + 1`` on."""
    top = request.sampling.top_logprobs
    if top is None:
        return Tokens(choice, ids)
    return Tokens(
        choice,
        ids,
        tuple(
            TokenLogprob(token_id, -0.5, tuple(((token_id + k) % VOCAB, -0.5 - k) for k in range(top)))
            for token_id in ids
        ),
    )


def emit(*ids: int, reason: FinishReason = "stop", per_event: int = 1, cached: int = 0, pause: float = 0) -> Script:
    """A script: these ids for each choice in turn, cut at ``max_tokens`` as the engine does."""

    def script(request: GenerationRequest) -> list[Step]:
        limit = request.sampling.max_tokens
        cut = ids[:limit]
        steps: list[Step] = []
        for start in range(0, len(cut), per_event):
            if pause:
                steps.append(pause)
            steps += [tokens(request, c, *cut[start : start + per_event]) for c in range(request.num_choices)]
        end: FinishReason = "length" if len(ids) >= limit else reason
        stop_id = EOS if end == "stop" else None
        return [*steps, *(Finished(c, end, stop_id, cached) for c in range(request.num_choices))]

    return script


def say(text: str, *, reason: FinishReason = "stop", per_event: int = 1, cached: int = 0, pause: float = 0) -> Script:
    """A script: this text, one id a byte."""
    return emit(*text.encode(), reason=reason, per_event=per_event, cached=cached, pause=pause)
