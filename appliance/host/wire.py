"""Messages between an API worker and the engine: Unix SOCK_SEQPACKET, one msgpack struct a packet.

Owns the message types and their encoding. Token ids never travel here, only the ids of the segments that hold them.
A worker opens the connection with ``Attach``; the engine answers ``Welcome`` and then sends ``Status`` when something
changes and at least twice a second.
"""

import msgspec
from msgspec import Struct

MAX_PACKET_BYTES = 160 * 1024
"""Largest packet either side sends: below the kernel's default socket buffer of 212,992 bytes with its overhead."""


class WireSampling(Struct, frozen=True, array_like=True):
    """Sampling of one request; see ``planner.sequence.Sampling`` for the meaning. ``seed`` is always given here."""

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: tuple[tuple[int, float], ...]
    seed: int
    min_tokens: int
    ignore_eos: bool
    stop_token_ids: tuple[int, ...]
    top_logprobs: int
    """-1: no log-probabilities; 0: the chosen token's; n: and those of the n likeliest."""


class Attach(Struct, frozen=True, tag=1, array_like=True):
    """First message of a worker. It owns segments ``[first_segment, first_segment + num_segments)``."""

    worker: int
    pid: int
    first_segment: int
    num_segments: int


class Submit(Struct, frozen=True, tag=2, array_like=True):
    """Run one request: one segment a choice, each holding the whole prompt.

    ``deadline_ns`` is on CLOCK_MONOTONIC, 0 = none. ``grammar_id`` 0 = none. ``whole``: the worker wants to hear of the
    end only, unless log-probabilities come on the way. ``precious``: the client asked that the prompt be cached.
    """

    segments: tuple[int, ...]
    epoch: int
    owner_pid: int
    request_id: str
    tenant: str
    sampling: WireSampling
    grammar_id: int
    deadline_ns: int
    traceparent: str
    whole: bool = False
    precious: bool = False


class Cancel(Struct, frozen=True, tag=3, array_like=True):
    """Give up the sequences in these segments; each still gets its ``Finish``."""

    segments: tuple[int, ...]


class Welcome(Struct, frozen=True, tag=16, array_like=True):
    """The engine's answer to ``Attach``: its epoch. Whatever an older epoch was running is lost."""

    epoch: int


class Status(Struct, frozen=True, tag=17, array_like=True):
    """The engine's state. ``state``: starting | ready | draining; counts are sequences, pages of the pool.

    ``cached_pages`` are among the free ones; ``hit_rate`` is the share of prompt ids reused since the start, 0 to 1.
    """

    epoch: int
    state: str
    reason: str
    running: int
    waiting: int
    waiting_tokens: int
    free_pages: int
    total_pages: int
    cached_pages: int
    hit_rate: float
    last_step_ns: int


class Admitted(Struct, frozen=True, tag=18, array_like=True):
    """The request whose first segment this is has entered the queue."""

    segment: int


class Refused(Struct, frozen=True, tag=19, array_like=True):
    """The request whose first segment this is was not taken. ``kind``: overloaded | draining | too_long | stale |
    invalid.
    """

    segment: int
    kind: str
    message: str
    retry_after_s: float


class Progress(Struct, frozen=True, array_like=True):
    """A sequence's ids up to ``completion_len`` are in its segment.

    ``logprobs`` belongs to the ids since the last progress: little-endian records of ``1 + top`` pairs
    (id i32, log-probability f32), the chosen token first; empty when not asked for.
    """

    segment: int
    completion_len: int
    logprobs: bytes


class Advance(Struct, frozen=True, tag=20, array_like=True):
    """New ids of several sequences, one message a step and worker."""

    items: tuple[Progress, ...]


class Finish(Struct, frozen=True, tag=21, array_like=True):
    """The last message about a segment; its owner may reuse it afterwards.

    ``reason``: stop | length | cancelled | error. ``stop_token_id`` -1 when none. ``cached_tokens`` and
    ``created_tokens`` count ids of the prompt that were reused, and that others can reuse now. Times in seconds, on the
    engine.
    """

    segment: int
    completion_len: int
    reason: str
    stop_token_id: int
    error: str
    prompt_len: int
    cached_tokens: int
    created_tokens: int
    queue_s: float
    prefill_s: float
    decode_s: float


ToEngine = Attach | Submit | Cancel
ToWorker = Welcome | Status | Admitted | Refused | Advance | Finish

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_to_worker = msgspec.msgpack.Decoder(ToWorker)


class WireError(ValueError):
    """A packet that is no message of this protocol; the connection it came over is closed."""


def encode(message: ToEngine | ToWorker) -> bytes:
    """One message as one packet.

    Raises:
        WireError: the packet would pass ``MAX_PACKET_BYTES``.
    """
    packet = _encoder.encode(message)
    if len(packet) > MAX_PACKET_BYTES:
        raise WireError(f"a {type(message).__name__} of {len(packet)} bytes passes the bound of {MAX_PACKET_BYTES}")
    return packet


def decode_to_engine(packet: bytes | memoryview) -> ToEngine:
    """A worker's message.

    Raises:
        WireError: the packet is malformed.
    """
    try:
        return _to_engine.decode(packet)
    except msgspec.DecodeError as error:
        raise WireError(f"malformed packet of {len(packet)} bytes from a worker: {error}") from error


def decode_to_worker(packet: bytes | memoryview) -> ToWorker:
    """The engine's message.

    Raises:
        WireError: the packet is malformed.
    """
    try:
        return _to_worker.decode(packet)
    except msgspec.DecodeError as error:
        raise WireError(f"malformed packet of {len(packet)} bytes from the engine: {error}") from error
