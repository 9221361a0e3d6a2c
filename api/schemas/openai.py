"""Requests of the OpenAI API: fields, ranges and what they ask of the engine.

Owns the request structs and their translation to ``api.run.Ask`` and ``api.ports.ChatMessage``. Never touches the
engine or the tokenizer. Answers are in ``api.schemas.openai_answers``.

Beyond the reference there are the extensions ``top_k`` (0 and -1 off), ``min_p``, ``repetition_penalty``,
``min_tokens``, ``ignore_eos``, ``stop_token_ids`` and ``include_stop_str_in_output``. Stop strings act from the first
token on; ``min_tokens`` defers only ids that end a sequence. ``top_p`` 0 is greedy. Accepted and inert: ``user``,
``safety_identifier``, ``prompt_cache_key``, ``metadata``, ``store``, ``service_tier``, ``parallel_tool_calls`` and an
empty ``tools``. Anything else is refused by name.
"""

from collections.abc import Sequence

import msgspec
from msgspec import Raw, Struct

from api.errors import BadRequestError, UnsupportedError, quoted
from api.ports import ChatMessage, SamplingParams
from api.run import Ask
from api.schemas.checks import NULL, at_least, number, refuse_tools, stop_strings, top_k, whole

MAX_CHOICES = 8
MAX_STOPS = 4
MAX_STOP_IDS = 4
MAX_BIASES = 4096
MAX_CHAT_LOGPROBS = 20
MAX_COMPLETION_LOGPROBS = 5
COMPLETION_MAX_TOKENS = 16
GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: the scaled logits would leave the range of float32."""

_ROLES = ("system", "developer", "user", "assistant")
_SEED = 2**63


class StreamOptions(Struct, forbid_unknown_fields=True, frozen=True):
    """``stream_options``; ``include_obfuscation`` is inert."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class OpenAIRequest(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Fields that chat and text completions share."""

    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    stop: str | list[str] | None = None
    include_stop_str_in_output: bool | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Raw = NULL
    safety_identifier: Raw = NULL
    prompt_cache_key: Raw = NULL
    metadata: Raw = NULL
    store: Raw = NULL
    service_tier: Raw = NULL

    @property
    def usage_wanted(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class ContentPart(Struct, forbid_unknown_fields=True, frozen=True):
    """A part of a message's content; only text is taken, the other kinds are refused by name."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: Raw = NULL
    input_audio: Raw = NULL
    file: Raw = NULL


class Message(Struct, forbid_unknown_fields=True, frozen=True):
    """A message of a conversation; the last fields are what SDKs send back of an answer, taken when empty."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[Raw] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    annotations: list[Raw] | None = None
    audio: Raw = NULL
    function_call: Raw = NULL


class ResponseFormat(Struct, frozen=True):
    """``response_format``; anything but text is refused by its type."""

    type: str


class ChatRequest(OpenAIRequest, frozen=True, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    tools: list[Raw] | None = None
    tool_choice: Raw = NULL
    parallel_tool_calls: bool | None = None
    modalities: list[str] | None = None


class CompletionRequest(OpenAIRequest, frozen=True, kw_only=True):
    """``POST /v1/completions``; special tokens in a text prompt are parsed as such."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None
    best_of: int | None = None


chat_decoder = msgspec.json.Decoder(ChatRequest)
completion_decoder = msgspec.json.Decoder(CompletionRequest)


def chat_ask(request: ChatRequest, vocab: int) -> Ask:
    """What a chat request asks for. ``max_completion_tokens`` wins over ``max_tokens``; neither: all that is left.

    Raises:
        BadRequestError: a field is outside its range or not supported; named.
    """
    if request.response_format is not None and request.response_format.type != "text":
        kind = quoted(request.response_format.type)
        raise UnsupportedError(f"response_format is {kind}; only 'text' is supported", param="response_format")
    refuse_tools(request.tools)
    if bytes(request.tool_choice) not in (b"null", b'"none"', b'"auto"'):
        raise UnsupportedError(
            "tool_choice asks for a tool; tools are not supported yet, send 'none'", param="tool_choice"
        )
    if request.modalities not in (None, ["text"]):
        raise UnsupportedError('modalities asks for more than text; only ["text"] is supported', param="modalities")
    top = request.top_logprobs
    whole("top_logprobs", top, 0, MAX_CHAT_LOGPROBS, 0)
    if top is not None and not request.logprobs:
        raise BadRequestError("top_logprobs is given without logprobs; set logprobs to true", param="top_logprobs")
    name = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    limit = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    at_least("max_tokens", request.max_tokens, 1)
    return _ask(request, vocab, name, at_least(name, limit, 1), (top or 0) if request.logprobs else None)


def completion_ask(request: CompletionRequest, vocab: int) -> Ask:
    """What a text completion asks for; ``max_tokens`` is 16 unless given, and may be 0.

    Raises:
        BadRequestError: a field is outside its range or not supported; named.
    """
    if request.suffix:
        raise UnsupportedError("suffix is not supported; leave it out", param="suffix")
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise UnsupportedError(f"best_of is {request.best_of}; only the value of n is supported", param="best_of")
    if request.logprobs is not None:
        whole("logprobs", request.logprobs, 0, MAX_COMPLETION_LOGPROBS, 0)
        if request.echo:
            raise UnsupportedError("echo together with logprobs is not supported; ask for one of them", param="echo")
    given = at_least("max_tokens", request.max_tokens, 0)
    limit = COMPLETION_MAX_TOKENS if given is None else given
    return _ask(request, vocab, "max_tokens", limit, request.logprobs)


def prompts_of(request: CompletionRequest, vocab: int, most: int) -> list[str] | list[list[int]]:
    """The prompts of a text completion, all texts or all ids.

    Raises:
        BadRequestError: none, too many, mixed kinds, an empty one, or an id outside the vocabulary.
    """
    given = request.prompt
    if isinstance(given, str):
        given = [given]
    elif given and all(isinstance(item, int) for item in given):
        given = [[item for item in given if isinstance(item, int)]]
    if not given:
        raise BadRequestError("prompt is empty; send at least one", param="prompt")
    choices = len(given) * (request.n or 1)
    if choices > most:
        raise BadRequestError(f"prompt times n makes {choices} choices; at most {most} are taken", param="prompt")
    texts = [item for item in given if isinstance(item, str)]
    if len(texts) == len(given):
        return texts
    rows = [item for item in given if isinstance(item, list)]
    if len(rows) != len(given):
        raise BadRequestError("prompt mixes texts and ids; send one kind", param="prompt")
    for index, row in enumerate(rows):
        path = f"prompt[{index}]" if len(rows) > 1 else "prompt"
        if not row:
            raise BadRequestError(f"{path} is empty; send at least one id", param=path)
        if min(row) < 0 or max(row) >= vocab:
            outside = next(item for item in row if not 0 <= item < vocab)
            raise BadRequestError(f"{path} holds {quoted(outside)}; ids are between 0 and {vocab - 1}", param=path)
    return rows


def chat_messages(messages: Sequence[Message]) -> list[ChatMessage]:
    """A conversation as the template sees it; ``developer`` is ``system``, text parts join without a separator.

    Raises:
        BadRequestError: none, or one with a role or content that is not supported; named with its index.
    """
    if not messages:
        raise BadRequestError("messages is empty; send at least one", param="messages")
    return [_chat_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _chat_message(message: Message, path: str) -> ChatMessage:
    if message.role not in _ROLES:
        roles = ", ".join(_ROLES)
        raise BadRequestError(f"{path}.role is {quoted(message.role)}; it must be one of {roles}", param=f"{path}.role")
    if message.tool_calls:
        raise UnsupportedError(f"{path}.tool_calls[0]: tools are not supported yet", param=f"{path}.tool_calls[0]")
    for name in ("audio", "function_call"):
        if bytes(getattr(message, name)) != b"null":
            raise UnsupportedError(f"{path}.{name} is not supported; leave it out", param=f"{path}.{name}")
    if message.content is None and message.role != "assistant":
        raise BadRequestError(f"{path}.content: the field is required", param=f"{path}.content")
    role = "system" if message.role == "developer" else message.role
    return msgspec.convert(
        {"role": role, "content": _text(message.content, f"{path}.content"), "name": message.name}, ChatMessage
    )


def _text(content: str | Sequence[ContentPart] | None, path: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    pieces: list[str] = []
    for index, part in enumerate(content):
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in ("text", "refusal"):
            where = f"{path}[{index}].type"
            raise UnsupportedError(f"{where} is {quoted(part.type)}; only 'text' is supported", param=where)
        if text is None:
            where = f"{path}[{index}].{part.type}"
            raise BadRequestError(f"{where}: the field is required", param=where)
        pieces.append(text)
    return "".join(pieces)


def _ask(request: OpenAIRequest, vocab: int, limit_name: str, limit: int | None, top_logprobs: int | None) -> Ask:
    if request.stream_options is not None and not request.stream:
        raise BadRequestError("stream_options is given without stream; set stream to true", param="stream_options")
    min_tokens = at_least("min_tokens", request.min_tokens, 0) or 0
    if limit is not None and min_tokens > limit:
        raise BadRequestError(f"min_tokens is {min_tokens}; {limit_name} is only {limit}", param="min_tokens")
    temperature = number("temperature", request.temperature, 0.0, 2.0, 1.0)
    top_p = number("top_p", request.top_p, 0.0, 1.0, 1.0)
    greedy = temperature < GREEDY_BELOW or top_p == 0.0
    sampling = SamplingParams(
        max_tokens=limit or 0,
        temperature=0.0 if greedy else temperature,
        top_k=top_k(request.top_k, vocab),
        top_p=top_p or 1.0,
        min_p=number("min_p", request.min_p, 0.0, 1.0, 0.0),
        repetition_penalty=number("repetition_penalty", request.repetition_penalty, 0.01, 100.0, 1.0),
        presence_penalty=number("presence_penalty", request.presence_penalty, -2.0, 2.0, 0.0),
        frequency_penalty=number("frequency_penalty", request.frequency_penalty, -2.0, 2.0, 0.0),
        logit_bias=_biases(request.logit_bias, vocab),
        seed=None if request.seed is None else whole("seed", request.seed, -_SEED, _SEED - 1, 0),
        min_tokens=min_tokens,
        ignore_eos=bool(request.ignore_eos),
        stop_token_ids=_stop_ids(request.stop_token_ids, vocab),
        top_logprobs=top_logprobs,
    )
    return Ask(
        model=request.model,
        max_tokens=limit,
        sampling=sampling,
        num_choices=whole("n", request.n, 1, MAX_CHOICES, 1),
        stops=stop_strings("stop", request.stop, MAX_STOPS),
        include_stop=bool(request.include_stop_str_in_output),
    )


def _biases(given: dict[str, float] | None, vocab: int) -> tuple[tuple[int, float], ...]:
    if not given:
        return ()
    if len(given) > MAX_BIASES:
        raise BadRequestError(
            f"logit_bias has {len(given)} entries; at most {MAX_BIASES} are taken", param="logit_bias"
        )
    biases: list[tuple[int, float]] = []
    for key, value in given.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < vocab):
            raise BadRequestError(
                f"logit_bias holds {quoted(key)}; keys are token ids between 0 and {vocab - 1}", param="logit_bias"
            )
        if not -100 <= value <= 100:
            raise BadRequestError(
                f"logit_bias of {key} is {value}; it must be between -100 and 100", param="logit_bias"
            )
        biases.append((int(key), value))
    return tuple(biases)


def _stop_ids(given: Sequence[int] | None, vocab: int) -> tuple[int, ...]:
    if not given:
        return ()
    if len(given) > MAX_STOP_IDS:
        raise BadRequestError(
            f"stop_token_ids has {len(given)} ids; at most {MAX_STOP_IDS} are taken", param="stop_token_ids"
        )
    for token_id in given:
        whole("stop_token_ids", token_id, 0, vocab - 1, 0)
    return tuple(given)
