"""Requests of the Anthropic API: fields, ranges and what they ask of the engine.

Owns the request structs and their translation to ``api.run.Ask`` and ``api.ports.ChatMessage``. Never touches the
engine or the tokenizer. Answers are in ``api.schemas.anthropic_answers``.

Text blocks of one message and of ``system`` join without a separator; consecutive turns of one role are combined with a
blank line between. A last assistant message is a prefill: the answer continues it. ``cache_control``, wherever it
stands, asks that the whole prompt be kept for reuse before others. Accepted and inert: ``metadata``, ``service_tier``
and empty ``tools``. Anything else is refused by name.
"""

from collections.abc import Sequence

import msgspec
from msgspec import Raw, Struct

from api.errors import BadRequestError, UnsupportedError, quoted
from api.ports import ChatMessage, SamplingParams
from api.run import Ask
from api.schemas.checks import NULL, at_least, number, refuse_tools, stop_strings, top_k

MAX_STOPS = 16
TURN_SEPARATOR = "\n\n"
GREEDY_BELOW = 1e-5

_ROLES = ("user", "assistant", "system")


class Block(Struct, forbid_unknown_fields=True, frozen=True):
    """A content block; only text is taken, the other kinds are refused by name."""

    type: str
    text: str | None = None
    cache_control: Raw = NULL
    citations: Raw = NULL
    source: Raw = NULL
    title: Raw = NULL
    context: Raw = NULL
    id: Raw = NULL
    name: Raw = NULL
    input: Raw = NULL
    tool_use_id: Raw = NULL
    content: Raw = NULL
    is_error: Raw = NULL
    thinking: Raw = NULL
    signature: Raw = NULL
    data: Raw = NULL


class Turn(Struct, forbid_unknown_fields=True, frozen=True):
    """A message of the conversation."""

    role: str
    content: str | list[Block]


class Thinking(Struct, frozen=True):
    """``thinking``; refused by its type unless disabled."""

    type: str


class ToolChoice(Struct, frozen=True):
    """``tool_choice``; refused by its type unless it asks for no tool."""

    type: str


class CountRequest(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """``POST /v1/messages/count_tokens``, and what ``POST /v1/messages`` shares with it."""

    model: str
    messages: list[Turn]
    system: str | list[Block] | None = None
    thinking: Thinking | None = None
    tools: list[Raw] | None = None
    tool_choice: ToolChoice | None = None
    cache_control: Raw = NULL


class MessagesRequest(CountRequest, frozen=True, kw_only=True):
    """``POST /v1/messages``."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    metadata: Raw = NULL
    service_tier: Raw = NULL


class Conversation(Struct, frozen=True):
    """A conversation as the template sees it; ``continue_last`` when the last message is a prefill."""

    messages: tuple[ChatMessage, ...]
    continue_last: bool


messages_decoder = msgspec.json.Decoder(MessagesRequest)
count_decoder = msgspec.json.Decoder(CountRequest)


def messages_ask(request: MessagesRequest, vocab: int) -> Ask:
    """What a request asks for.

    Raises:
        BadRequestError: a field is outside its range or not supported; named.
    """
    limit = at_least("max_tokens", request.max_tokens, 1)
    temperature = number("temperature", request.temperature, 0.0, 1.0, 1.0)
    top_p = number("top_p", request.top_p, 0.0, 1.0, 1.0)
    greedy = temperature < GREEDY_BELOW or top_p == 0.0
    return Ask(
        model=request.model,
        max_tokens=limit,
        sampling=SamplingParams(
            max_tokens=request.max_tokens,
            temperature=0.0 if greedy else temperature,
            top_k=top_k(request.top_k, vocab),
            top_p=top_p or 1.0,
        ),
        stops=stop_strings("stop_sequences", request.stop_sequences, MAX_STOPS),
        keep_prefix=_marked(request),
    )


def _marked(request: CountRequest) -> bool:
    """Whether ``cache_control`` stands anywhere in a request and is not null."""
    contents = [request.system, *(turn.content for turn in request.messages)]
    blocks = [block for content in contents if isinstance(content, list) for block in content]
    marks = [request.cache_control, *(block.cache_control for block in blocks)]
    return any(bytes(mark) != b"null" for mark in marks)


def conversation_of(request: CountRequest) -> Conversation:
    """The conversation of a request.

    Raises:
        BadRequestError: empty, or with a role, a block or a feature that is not supported; named with its path.
    """
    refuse_tools(request.tools)
    if request.thinking is not None and request.thinking.type != "disabled":
        kind = quoted(request.thinking.type)
        raise UnsupportedError(f"thinking.type is {kind}; only 'disabled' is supported", param="thinking")
    if request.tool_choice is not None and request.tool_choice.type not in ("auto", "none"):
        kind = quoted(request.tool_choice.type)
        raise UnsupportedError(f"tool_choice.type is {kind}; tools are not supported yet", param="tool_choice")
    if not request.messages:
        raise BadRequestError("messages is empty; send at least one", param="messages")
    system = _text(request.system, "system")
    turns = [(_role(turn, index), _turn_text(request.messages, index)) for index, turn in enumerate(request.messages)]
    prefill = turns[-1][1] if turns[-1][0] == "assistant" else ""
    if prefill != prefill.rstrip():
        raise BadRequestError(
            f"messages[{len(turns) - 1}].content: a final assistant message cannot end with white space; trim it",
            param=f"messages[{len(turns) - 1}].content",
        )
    if turns[-1] == ("assistant", ""):
        turns.pop()
    messages = [("system", [system])] if system else []
    for role, text in turns:
        if messages and messages[-1][0] == role and role != "system":
            messages[-1][1].append(text)
        else:
            messages.append((role, [text]))
    if not messages:
        raise BadRequestError("messages has no content; send at least one user message", param="messages")
    return Conversation(
        tuple(
            msgspec.convert({"role": role, "content": TURN_SEPARATOR.join(texts)}, ChatMessage)
            for role, texts in messages
        ),
        continue_last=bool(prefill),
    )


def _role(turn: Turn, index: int) -> str:
    if turn.role not in _ROLES:
        path = f"messages[{index}].role"
        raise BadRequestError(f"{path} is {quoted(turn.role)}; it must be one of {', '.join(_ROLES)}", param=path)
    return turn.role


def _turn_text(turns: Sequence[Turn], index: int) -> str:
    turn, path = turns[index], f"messages[{index}].content"
    text = _text(turn.content, path)
    if not text and not (index == len(turns) - 1 and turn.role == "assistant"):
        raise BadRequestError(f"{path} is empty; only a final assistant message may be", param=path)
    return text


def _text(content: str | Sequence[Block] | None, path: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    pieces: list[str] = []
    for index, block in enumerate(content):
        if block.type != "text":
            where = f"{path}[{index}].type"
            raise UnsupportedError(f"{where} is {quoted(block.type)}; only 'text' is supported", param=where)
        if not block.text:
            where = f"{path}[{index}].text"
            raise BadRequestError(f"{where}: a text block must not be empty", param=where)
        pieces.append(block.text)
    return "".join(pieces)
