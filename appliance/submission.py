"""From a worker's ``Submit`` to planner sequences: the last check before the engine sees a request.

Owns the rules that a request must keep for the loaded model, whatever the HTTP layer has already checked. Reads the
prompt where it lies, in its segment, which from then on is the sequence's ids; keeps no state and never touches a
socket.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from appliance.host.segments import SEGMENT_TOKENS, SegmentFile
from appliance.host.wire import Submit
from planner.batch import NUM_SUPPRESSED, NUM_TOP_LOGPROBS
from planner.ids import IdBuffer
from planner.sequence import Sampling, Sequence

_SEED_STEP = 0x9E37_79B9_7F4A_7C15
_SEED_MASK = 0xFFFF_FFFF_FFFF_FFFF


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What the loaded model allows. ``context`` counts prompt and completion ids together."""

    vocab: int
    context: int
    eos_ids: frozenset[int]


class SubmissionError(ValueError):
    """A request cannot run; ``kind`` is ``too_long`` or ``invalid`` as in ``appliance.host.wire.Refused``."""

    def __init__(self, kind: str, message: str) -> None:
        """Keep the kind beside the message."""
        super().__init__(message)
        self.kind = kind


def make_sequences(message: Submit, segments: SegmentFile, limits: ModelLimits, now_s: float) -> tuple[Sequence, ...]:
    """One sequence a choice.

    Every choice samples with its own seed, derived from the request's; the first choice has the request's seed itself,
    so that asking for more choices does not change the first.

    Raises:
        SubmissionError: a length, an id or a parameter is outside what the model allows.
    """
    first = message.segments[0]
    prompt_len = segments.prompt_len(first)
    _check_lengths(prompt_len, message.sampling.max_tokens, min(limits.context, SEGMENT_TOKENS))
    _check_ids(np.frombuffer(segments.tokens(first), np.int32, prompt_len), limits.vocab)
    base = _sampling(message, limits)
    sequences: list[Sequence] = []
    for index, key in enumerate(message.segments):
        sequences.append(
            Sequence(
                key=key,
                request_id=message.request_id,
                tenant=message.tenant,
                ids=IdBuffer(segments.tokens(key), prompt_len),
                prompt_len=prompt_len,
                sampling=base if index == 0 else _with_seed(base, index),
                arrival_s=now_s,
                precious=message.precious,
                deadline_s=message.deadline_ns / 1e9 if message.deadline_ns else None,
            )
        )
    return tuple(sequences)


def _check_lengths(prompt_len: int, max_tokens: int, context: int) -> None:
    if prompt_len < 1:
        raise SubmissionError("invalid", "the prompt has no ids; at least 1 is needed")
    if max_tokens < 1:
        raise SubmissionError("invalid", f"max_tokens is {max_tokens}; it must be at least 1")
    if prompt_len + max_tokens > context:
        raise SubmissionError(
            "too_long", f"{prompt_len} prompt ids and max_tokens {max_tokens} pass the context of {context}"
        )


def _check_ids(ids: npt.NDArray[np.int32], vocab: int) -> None:
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab:
        raise SubmissionError("invalid", f"token id {low if low < 0 else high} is outside the vocabulary of {vocab}")


def _sampling(message: Submit, limits: ModelLimits) -> Sampling:
    wire = message.sampling
    stop_ids = frozenset(wire.stop_token_ids) | (frozenset[int]() if wire.ignore_eos else limits.eos_ids)
    if wire.min_tokens > 0 and len(stop_ids) > NUM_SUPPRESSED:
        raise SubmissionError(
            "invalid", f"min_tokens with {len(stop_ids)} stop ids; at most {NUM_SUPPRESSED} can be held back"
        )
    if not -1 <= wire.top_logprobs <= NUM_TOP_LOGPROBS:
        raise SubmissionError("invalid", f"top_logprobs is {wire.top_logprobs}; at most {NUM_TOP_LOGPROBS} are given")
    if wire.logit_bias:
        _check_ids(np.array([token_id for token_id, _ in wire.logit_bias], np.int32), limits.vocab)
    return Sampling(
        max_tokens=wire.max_tokens,
        temperature=wire.temperature,
        top_k=wire.top_k,
        top_p=wire.top_p,
        min_p=wire.min_p,
        repetition_penalty=wire.repetition_penalty,
        presence_penalty=wire.presence_penalty,
        frequency_penalty=wire.frequency_penalty,
        logit_bias=wire.logit_bias,
        seed=wire.seed & _SEED_MASK,
        min_tokens=wire.min_tokens,
        stop_ids=stop_ids,
        top_logprobs=wire.top_logprobs,
    )


def _with_seed(base: Sampling, index: int) -> Sampling:
    """The same sampling with another choice's seed: multiples of the golden ratio in 64 bits, which never meet."""
    return replace(base, seed=(base.seed + index * _SEED_STEP) & _SEED_MASK)
