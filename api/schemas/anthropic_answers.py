"""Answers of the Anthropic API: whole messages and the strict order of stream events.

Owns the structs and the ``Frames``. Reads ``api.run`` events; never the engine. Order of a stream: message_start,
content_block_start, ping, content_block_delta..., content_block_stop, message_delta, message_stop.
"""

from msgspec import Struct

from api import sse
from api.errors import ApiError, Shape, error_body
from api.exchange import Tally
from api.run import Completed, Delta, End

_ROLE = "assistant"
_BLOCK = 0
_REASONS = {"stop": "end_turn", "stop_string": "stop_sequence", "length": "max_tokens"}


class Usage(Struct):
    """Token counts; the three input counts add up to the prompt.

    ``cache_read_input_tokens`` were reused, ``cache_creation_input_tokens`` computed and kept for requests that begin
    alike, whether or not they were marked; ``input_tokens`` are the others. At the start of a stream nothing of this is
    known yet, and all counts as input.
    """

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class TextBlock(Struct, tag_field="type", tag="text"):
    """The one content block of an answer."""

    text: str


class Message(Struct, tag_field="type", tag="message"):
    """A whole answer, and the shell of one at the start of a stream."""

    id: str
    role: str
    model: str
    content: list[TextBlock]
    stop_reason: str | None
    stop_sequence: str | None
    usage: Usage


class TokenCount(Struct):
    """Answer of ``count_tokens``."""

    input_tokens: int


class _Started(Struct, tag_field="type", tag="message_start"):
    message: Message


class _BlockStarted(Struct, tag_field="type", tag="content_block_start"):
    index: int
    content_block: TextBlock


class _TextDelta(Struct, tag_field="type", tag="text_delta"):
    text: str


class _BlockDelta(Struct, tag_field="type", tag="content_block_delta"):
    index: int
    delta: _TextDelta


class _BlockStopped(Struct, tag_field="type", tag="content_block_stop"):
    index: int


class _Stop(Struct):
    stop_reason: str
    stop_sequence: str | None


class _MessageDelta(Struct, tag_field="type", tag="message_delta"):
    delta: _Stop
    usage: Usage


class _Ping(Struct, tag_field="type", tag="ping"):
    pass


class _Stopped(Struct, tag_field="type", tag="message_stop"):
    pass


def usage_of(tally: Tally) -> Usage:
    """The counts so far."""
    cached = min(tally.prompt_tokens, tally.cached_tokens)
    created = min(tally.prompt_tokens - cached, tally.created_tokens)
    return Usage(tally.prompt_tokens - cached - created, created, cached, tally.completion_tokens)


def message_answer(message_id: str, model: str, choice: Completed, tally: Tally) -> Message:
    """A whole answer."""
    reason = _REASONS[choice.end.reason]
    return Message(message_id, _ROLE, model, [TextBlock(choice.text)], reason, choice.end.stop_string, usage_of(tally))


class MessageFrames:
    """Stream of one answer."""

    __slots__ = ("_end", "_id", "_model", "_request_id", "_tally")

    ping = sse.named("ping", _Ping())

    def __init__(self, message_id: str, model: str, request_id: str, tally: Tally) -> None:
        self._id = message_id
        self._model = model
        self._request_id = request_id
        self._tally = tally
        self._end: End | None = None

    def opening(self) -> bytes:
        """The empty message, the start of its one block, and a ping."""
        shell = Message(self._id, _ROLE, self._model, [], None, None, usage_of(self._tally))
        return (
            sse.named("message_start", _Started(shell))
            + sse.named("content_block_start", _BlockStarted(_BLOCK, TextBlock("")))
            + self.ping
        )

    def delta(self, delta: Delta) -> bytes:
        """New text."""
        return sse.named("content_block_delta", _BlockDelta(_BLOCK, _TextDelta(delta.text)))

    def end(self, end: End) -> bytes:
        """The end of the block; the reason follows in ``closing``."""
        self._end = end
        return sse.named("content_block_stop", _BlockStopped(_BLOCK))

    def closing(self) -> bytes:
        """Why the message ended, what it took, and the end mark.

        Raises:
            RuntimeError: the choice has not ended.
        """
        if self._end is None:
            raise RuntimeError("a message stream was closed before its choice ended")
        stop = _Stop(_REASONS[self._end.reason], self._end.stop_string)
        return sse.named("message_delta", _MessageDelta(stop, usage_of(self._tally))) + sse.named(
            "message_stop", _Stopped()
        )

    def failure(self, error: ApiError) -> bytes:
        """An error event; the end mark does not follow."""
        return b"event: error\ndata: " + error_body(error, Shape.ANTHROPIC, self._request_id) + b"\n\n"
