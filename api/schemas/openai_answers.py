"""Answers of the OpenAI API: whole bodies and stream events, for chat and for text completions.

Owns the structs and the two ``Frames``. Reads ``api.run`` events; never the engine.
"""

from collections.abc import Sequence

from msgspec import UNSET, Struct, UnsetType

from api import sse
from api.errors import ApiError, Shape, error_body
from api.exchange import Tally
from api.logprobs import ChatLogprobs, CompletionLogprobs, chat_logprobs, completion_logprobs
from api.ports import TextCodec
from api.run import Completed, Delta, End

_DONE = b"data: [DONE]\n\n"
_REASONS = {"stop": "stop", "stop_string": "stop", "length": "length"}


class PromptDetails(Struct):
    """Part of the prompt whose keys and values were reused, in tokens."""

    cached_tokens: int


class Usage(Struct):
    """Token counts of a request; ``completion_tokens`` over all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class AssistantMessage(Struct):
    """The message of a chat choice."""

    content: str
    role: str = "assistant"
    refusal: None = None


class ChatChoice(Struct):
    """A choice of a whole chat answer."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str


class ChatDelta(Struct, omit_defaults=True):
    """What is new in a chat chunk."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(Struct):
    """A choice of a chat chunk."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class CompletionChoice(Struct):
    """A choice of a whole text completion, and of its chunks."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None


class OpenAIAnswer(Struct):
    """A whole answer or a chunk of one; ``usage`` only where it is wanted."""

    id: str
    object: str
    created: int
    model: str
    choices: Sequence[ChatChoice] | Sequence[ChatChunkChoice] | Sequence[CompletionChoice]
    usage: Usage | UnsetType = UNSET


class Head(Struct, frozen=True):
    """What all parts of one answer share."""

    id: str
    created: int
    model: str
    request_id: str


def usage_of(tally: Tally) -> Usage:
    """The counts so far."""
    prompt, completion = tally.prompt_tokens, tally.completion_tokens
    return Usage(prompt, completion, prompt + completion, PromptDetails(min(prompt, tally.cached_tokens)))


def chat_answer(
    head: Head, codec: TextCodec, choices: Sequence[Completed], tally: Tally, *, logprobs: bool
) -> OpenAIAnswer:
    """A whole chat answer."""
    return OpenAIAnswer(
        head.id,
        "chat.completion",
        head.created,
        head.model,
        [
            ChatChoice(
                choice.choice,
                AssistantMessage(choice.text),
                chat_logprobs(codec, choice.entries) if logprobs else None,
                _REASONS[choice.end.reason],
            )
            for choice in choices
        ],
        usage_of(tally),
    )


def completion_answer(
    head: Head, codec: TextCodec, choices: Sequence[Completed], tally: Tally, *, logprobs: bool, echoes: Sequence[str]
) -> OpenAIAnswer:
    """A whole text completion; ``echoes`` holds what stands before each choice's text."""
    return OpenAIAnswer(
        head.id,
        "text_completion",
        head.created,
        head.model,
        [
            CompletionChoice(
                choice.choice,
                echo + choice.text,
                completion_logprobs(codec, choice.entries) if logprobs else None,
                _REASONS[choice.end.reason],
            )
            for choice, echo in zip(choices, echoes, strict=True)
        ],
        usage_of(tally),
    )


class _OpenAIFrames:
    """What the streams of both endpoints share."""

    __slots__ = ("_codec", "_head", "_logprobs", "_tally", "_usage")

    ping = b": ping\n\n"
    kind = ""

    def __init__(self, head: Head, codec: TextCodec, tally: Tally, *, logprobs: bool, usage: bool) -> None:
        self._head = head
        self._codec = codec
        self._tally = tally
        self._logprobs = logprobs
        self._usage = usage

    def closing(self) -> bytes:
        """The usage chunk where wanted, then the end mark."""
        if not self._usage:
            return _DONE
        head = self._head
        chunk = OpenAIAnswer(head.id, self.kind, head.created, head.model, (), usage_of(self._tally))
        return sse.data(chunk) + _DONE

    def failure(self, error: ApiError) -> bytes:
        """An error event; the end mark does not follow."""
        return b"data: " + error_body(error, Shape.OPENAI, self._head.request_id) + b"\n\n"

    def _chunk(self, choices: Sequence[ChatChunkChoice] | Sequence[CompletionChoice]) -> bytes:
        return sse.data(OpenAIAnswer(self._head.id, self.kind, self._head.created, self._head.model, choices))


class ChatFrames(_OpenAIFrames):
    """Stream of a chat answer: one role chunk a choice, deltas, one finish chunk a choice."""

    __slots__ = ("_num_choices",)

    kind = "chat.completion.chunk"

    def __init__(
        self, head: Head, codec: TextCodec, tally: Tally, *, logprobs: bool, usage: bool, num_choices: int
    ) -> None:
        super().__init__(head, codec, tally, logprobs=logprobs, usage=usage)
        self._num_choices = num_choices

    def opening(self) -> bytes:
        """The role chunks."""
        return b"".join(
            self._chunk([ChatChunkChoice(index, ChatDelta("assistant", ""))]) for index in range(self._num_choices)
        )

    def delta(self, delta: Delta) -> bytes:
        """A content chunk."""
        logprobs = chat_logprobs(self._codec, delta.entries) if self._logprobs and delta.entries else None
        return self._chunk([ChatChunkChoice(delta.choice, ChatDelta(content=delta.text), logprobs)])

    def end(self, end: End) -> bytes:
        """A finish chunk."""
        return self._chunk([ChatChunkChoice(end.choice, ChatDelta(), None, _REASONS[end.reason])])


class CompletionFrames(_OpenAIFrames):
    """Stream of a text completion: the echo where wanted, texts, one finish chunk a choice."""

    __slots__ = ("_echoes",)

    kind = "text_completion"

    def __init__(
        self, head: Head, codec: TextCodec, tally: Tally, *, logprobs: bool, usage: bool, echoes: Sequence[str]
    ) -> None:
        super().__init__(head, codec, tally, logprobs=logprobs, usage=usage)
        self._echoes = echoes

    def opening(self) -> bytes:
        """The echoes."""
        return b"".join(self._chunk([CompletionChoice(index, echo)]) for index, echo in enumerate(self._echoes) if echo)

    def delta(self, delta: Delta) -> bytes:
        """A text chunk."""
        logprobs = completion_logprobs(self._codec, delta.entries) if self._logprobs and delta.entries else None
        return self._chunk([CompletionChoice(delta.choice, delta.text, logprobs)])

    def end(self, end: End) -> bytes:
        """A finish chunk."""
        return self._chunk([CompletionChoice(end.choice, "", None, _REASONS[end.reason])])
