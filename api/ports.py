"""What the HTTP layer needs of the rest of the process: text, generation, readiness, keys, quotas, observation.

Owns the seam types and protocols. The gateway of ``appliance`` implements them; tests implement them with scripts.
Nothing here knows arrays, plans, sockets or processes.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Literal, Protocol

from msgspec import Struct

from api.trace import TraceContext

FinishReason = Literal["stop", "length", "cancelled", "error"]


class SamplingParams(Struct, frozen=True, kw_only=True):
    """How the next token of a sequence is chosen. Every field is already checked against its documented range.

    ``top_k`` 0 and ``top_p`` 1 are off. ``top_logprobs`` None asks for no log-probabilities, 0 for the chosen token's
    alone. ``stop_token_ids`` end a sequence beside the model's own end-of-sequence ids; ``ignore_eos`` turns only the
    latter off. ``seed`` None means a fresh random one.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    top_logprobs: int | None = None


class GenerationRequest(Struct, frozen=True, kw_only=True):
    """One client request after decoding: prompt ids and how to continue them.

    ``deadline_s`` is a duration from submission, in seconds; None leaves it to the appliance's configuration.
    ``whole``: nobody reads ids before a choice has ended, so they may all come then.
    ``keep_prefix``: the client expects to send a prompt that begins like this one again.
    """

    request_id: str
    model: str
    tenant: str
    prompt_ids: Sequence[int]
    sampling: SamplingParams
    num_choices: int = 1
    deadline_s: float | None = None
    traceparent: str | None = None
    whole: bool = False
    keep_prefix: bool = False


class TokenLogprob(Struct, frozen=True):
    """Raw log-probability of the chosen token and of the likeliest alternatives, best first (natural logarithm)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Tokens(Struct, frozen=True):
    """New ids of one choice; ``logprobs`` is as long as ``ids`` when asked for, else empty."""

    choice: int
    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


class Finished(Struct, frozen=True):
    """The last event of one choice.

    ``stop_token_id`` is the id that ended it when ``reason`` is ``stop`` (it is not among the ``Tokens``);
    ``cached_tokens`` counts prompt ids whose keys and values were reused, ``created_tokens`` those that were computed
    and can be reused by others now; ``error`` says what failed when ``reason`` is ``error``. ``queue_s``, ``prefill_s``
    and ``decode_s`` follow one another from submission on, in seconds.
    """

    choice: int
    reason: FinishReason
    stop_token_id: int | None = None
    cached_tokens: int = 0
    created_tokens: int = 0
    error: str = ""
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0


class Generation(Protocol):
    """A submitted request: iterate for its events; every choice ends with exactly one ``Finished``."""

    @property
    def unread(self) -> int:
        """Ids of all choices that have been made and not been read; none of a choice that was given up."""
        ...

    def __aiter__(self) -> AsyncIterator[Tokens | Finished]: ...

    def cancel(self, choice: int | None = None) -> None:
        """Give up one choice, or all. Idempotent; a no-op once finished. The choice still ends with ``Finished``."""
        ...


class Generator(Protocol):
    """Runs requests. ``submit`` returns once the engine has admitted the request to its queue.

    Raises (all from ``api.errors``):
        OverloadedError: the queue is full; carries the seconds to wait.
        NotReadyError: the engine is starting, draining or gone.
        ContextLengthError: the prompt can never fit; carries both numbers.
    """

    async def submit(self, request: GenerationRequest) -> Generation:
        """Hand a request to the engine; returns once it is in the engine's queue."""
        ...

    def status(self) -> "EngineStatus":
        """What is known of the engine now, without asking it."""
        ...


class Answers(Protocol):
    """Answers that are kept to be given again."""

    def forget(self, tenant: str) -> None:
        """Give nothing again of what the tenant has asked before now."""
        ...


class EngineStatus(Struct, frozen=True, kw_only=True):
    """What a worker knows of the engine; ``state`` other than ``ready`` comes with a reason for people.

    ``cached_pages`` are among the free ones; ``hit_rate`` is the share of prompt ids reused since the start, 0 to 1.
    """

    state: Literal["starting", "ready", "draining", "lost"]
    reason: str = ""
    running: int = 0
    waiting: int = 0
    free_pages: int = 0
    total_pages: int = 0
    cached_pages: int = 0
    hit_rate: float = 0.0
    last_step_age_s: float = 0.0


class ModelCard(Struct, frozen=True, kw_only=True):
    """What clients may know of the served model. ``context`` counts prompt and completion ids together."""

    name: str
    aliases: tuple[str, ...] = ()
    created: int = 0
    context: int
    vocab: int
    has_chat_template: bool


class ChatMessage(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One message as the chat template sees it: plain text content and, for tools, the fields of the OpenAI shape."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    name: str | None = None
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    tool_call_id: str | None = None


class ChatTemplateError(ValueError):
    """The template refused the conversation or there is none; the message is the template's own, fit for a client."""


class TokenDecoder(Protocol):
    """Turns the ids of one choice into text, holding back bytes that do not yet form a character."""

    def push(self, token_id: int) -> str:
        """Text that this id completes; may be empty. Special tokens give no text."""
        ...

    def flush(self) -> str:
        """What was held back, undecodable bytes as one U+FFFD run. Call once, at the end."""
        ...


class TextCodec(Protocol):
    """Text to ids and back, the only place where that happens. Thread-safe; the calls are pure and CPU-bound."""

    def encode(self, text: str, *, parse_special: bool, tenant: str = "") -> Sequence[int]:
        """Ids of raw text, with exactly one BOS where the model wants it.

        ``parse_special`` True turns the text of control tokens into those tokens (``/v1/completions``). What was
        worked out for one ``tenant`` may make the same text quicker for that tenant, and for no other.
        """
        ...

    def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        continue_last: bool = False,
        template_args: Mapping[str, Any] | None = None,
        tenant: str = "",
    ) -> Sequence[int]:
        """Ids of a conversation through the model's chat template, ending with the assistant's header.

        Control-token text inside message content stays text. ``continue_last`` leaves the last assistant message open,
        so that the completion continues it. ``tenant`` as for ``encode``.

        Raises:
            ChatTemplateError: no template, a template error, or its time or size bound was passed.
        """
        ...

    def decoder(self, prompt_ids: Sequence[int] = ()) -> TokenDecoder:
        """A fresh decoder for a completion of ``prompt_ids`` (the last of them decide about a leading space)."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The raw bytes of one token (its literal text for special tokens)."""
        ...

    def token_text(self, token_id: int) -> str:
        """The token as clients see it in log-probabilities; undecodable bytes become U+FFFD."""
        ...


class Tenant(Struct, frozen=True, kw_only=True):
    """Who a key stands for and what it may use; limits of 0 are off."""

    name: str
    key_id: str
    admin: bool = False
    requests_per_minute: int = 0
    tokens_per_minute: int = 0


class KeyRing(Protocol):
    """API keys. ``open`` means that no key is needed (loopback without keys, or so configured)."""

    @property
    def open(self) -> bool:
        """Whether requests without a key are taken."""
        ...

    def find(self, key: bytes) -> Tenant | None:
        """The tenant of a valid, unexpired key, compared in constant time."""
        ...


class QuotaState(Struct, frozen=True, kw_only=True):
    """Where a key stands in this minute; ``reset_s`` is when the window is whole again, in seconds."""

    allowed: bool
    limit_requests: int
    remaining_requests: int
    limit_tokens: int
    remaining_tokens: int
    reset_s: float


class Quota(Protocol):
    """Per-key limits, shared by all workers of a node."""

    def take(self, tenant: Tenant, *, requests: int, tokens: int) -> QuotaState:
        """Count ``requests`` and ``tokens`` if they fit this minute's window; nothing is counted when refused."""
        ...

    def add_tokens(self, tenant: Tenant, tokens: int) -> None:
        """Count completion tokens after the fact; may overdraw."""
        ...


class RequestPhase(Struct, frozen=True):
    """A part of a request: when it began after the request's arrival, and how long it took; in seconds."""

    name: Literal["receive", "tokenise", "queue", "prefill", "decode", "stream"]
    began_s: float
    took_s: float


class RequestRecord(Struct, frozen=True, kw_only=True):
    """What one finished request was, for metrics, the log and traces; never its text.

    Durations in seconds, None = never came. ``phases`` are those that the request came to, in order; those in the
    engine are of its first choice.
    """

    request_id: str
    trace: TraceContext
    route: str
    tenant: str
    status: int
    finish_reason: str
    stream: bool
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    time_to_first_token_s: float | None = None
    time_per_output_token_s: float | None = None
    duration_s: float = 0.0
    phases: tuple[RequestPhase, ...] = ()
    model: str = ""
    error: str = ""


class Observer(Protocol):
    """Where the HTTP layer reports what happened."""

    def request_started(self, route: str) -> None:
        """A request has arrived; ``route`` is a template, never a path."""
        ...

    def request_finished(self, record: RequestRecord) -> None:
        """The request is over, however it ended; called once for each that was started."""
        ...

    def exposition(self) -> tuple[str, bytes]:
        """Content type and body of ``/metrics``, merged over the processes of the node."""
        ...
