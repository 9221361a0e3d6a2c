"""Refusals: why a request is not taken in line.

Owns the rules and their words. Reads what waits and the bounds; changes nothing.
"""

from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import NamedTuple

from planner.sequence import Sequence
from planner.waiting import WaitingLines


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is not taken.

    ``kind``: overloaded | too_long | stale. ``retry_after_s`` is 0 when waiting does not help.
    """

    kind: str
    message: str
    retry_after_s: float = 0.0


class Bounds(NamedTuple):
    """Most ids of a sequence, most sequences that wait, and most ids of theirs."""

    capacity: int
    waiting: int
    waiting_tokens: int


def refuse(
    choices: Many[Sequence], stale: Many[int], waiting: WaitingLines, bounds: Bounds, tokens_per_s: float
) -> Refusal | None:
    """Why a request is not taken; None: it is.

    Args:
        choices: its sequences, at least one; all have the same prompt.
        stale: their keys that others still have.
        waiting: who waits.
        bounds: what is taken.
        tokens_per_s: recent throughput, for the estimate of when to come back; 0 = unknown.
    """
    prompt_len = choices[0].prompt_len
    if stale:
        return Refusal("stale", f"segment {stale[0]} still carries a live sequence; wait for its finish")
    if prompt_len + 1 > bounds.capacity:
        return Refusal(
            "too_long",
            f"a prompt of {prompt_len} ids and one new id pass the {bounds.capacity} positions that the page pool "
            f"has for one sequence; shorten the prompt, or raise the memory for pages or the plan's context",
        )
    if not len(waiting):
        return None
    if len(waiting) + len(choices) > bounds.waiting:
        bound = f"{len(waiting)} sequences wait and {bounds.waiting} may"
    elif waiting.num_tokens + prompt_len * len(choices) > bounds.waiting_tokens:
        bound = f"prompts of {waiting.num_tokens} ids wait and {bounds.waiting_tokens} may"
    else:
        return None
    wait_s = waiting.num_tokens / tokens_per_s if tokens_per_s > 0 else 1.0
    return Refusal("overloaded", f"{bound}; try again later", min(max(wait_s, 1.0), 60.0))
