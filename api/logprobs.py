"""Log-probabilities in the two shapes of the OpenAI API.

Owns the translation of ``Entry`` values; values are raw natural logarithms, before temperature and penalties.
"""

from collections.abc import Sequence

from msgspec import Struct

from api.ports import TextCodec
from api.run import Entry


class ChatAlternative(Struct):
    """One likely id."""

    token: str
    logprob: float
    bytes: list[int]


class ChatToken(Struct):
    """One chosen id and the likeliest ones there."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[ChatAlternative]


class ChatLogprobs(Struct):
    """``logprobs`` of a chat choice."""

    content: list[ChatToken]


class CompletionLogprobs(Struct):
    """``logprobs`` of a completion choice: four lists of one length."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


def chat_logprobs(codec: TextCodec, entries: Sequence[Entry]) -> ChatLogprobs:
    """The chat shape. ``bytes`` are the token's own, so that those of all tokens join to the text."""
    return ChatLogprobs(
        [
            ChatToken(
                codec.token_text(entry.logprob.token_id),
                entry.logprob.logprob,
                list(codec.token_bytes(entry.logprob.token_id)),
                [
                    ChatAlternative(codec.token_text(token_id), value, list(codec.token_bytes(token_id)))
                    for token_id, value in entry.logprob.top
                ],
            )
            for entry in entries
        ]
    )


def completion_logprobs(codec: TextCodec, entries: Sequence[Entry]) -> CompletionLogprobs:
    """The completion shape.

    The chosen id is always among ``top_logprobs``, which therefore has up to one more element than asked for; where two
    ids have the same text, the likelier one stays. Offsets count characters of the completion.
    """
    tops: list[dict[str, float]] = []
    for entry in entries:
        top: dict[str, float] = {}
        for token_id, value in (*entry.logprob.top, (entry.logprob.token_id, entry.logprob.logprob)):
            top.setdefault(codec.token_text(token_id), value)
        tops.append(top)
    return CompletionLogprobs(
        [codec.token_text(entry.logprob.token_id) for entry in entries],
        [entry.logprob.logprob for entry in entries],
        tops,
        [entry.offset for entry in entries],
    )
