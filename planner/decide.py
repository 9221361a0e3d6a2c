"""decide: how one context is held, from its length and the free memory of the devices.

Owns the decision tree. Reads nothing but its arguments, every one of which comes from plans and their memory; never
imports jax. Every input has an answer, and a refusal is a value with its reason.

1. A context of one shard (32K positions) at most is one shard.
2. Of two shards at most it is one shard on one device where the format with the most bits has room for all positions
   of two shards, and two shards, whose pages are taken as they are needed, otherwise.
3. Longer ones are as many shards as they need, and never more than ``MOST_SHARDS``: beyond that neighbours merge.
4. Shards go to the context devices in turn. The format is the one with the most bits whose pages fit on the device that
   gets most of them.

On one device the number of shards is a matter of accounting: the kernels split and merge any context alike.
"""

import random
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from planner import kv
from planner.buckets import Bucket, Phase, round_up
from planner.memory import memory_plan
from planner.pages import fullest
from planner.plan import Plan, PlanError, program_key

MOST_SHARDS = 16
"""Shards of one context; a longer one has shards of twice, three times ... as many positions."""


class Reason(StrEnum):
    """Why a context cannot be held."""

    EMPTY = "empty"
    TOO_LONG = "too_long"
    NO_MEMORY = "no_memory"


@dataclass(frozen=True, slots=True)
class Declined:
    """A context that cannot be held, and why."""

    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class Decision:
    """How a context is held.

    ``shards`` of ``shard_len`` positions at most lie on ``devices`` of the plan's context devices; ``num_bytes`` is
    what the one with most of them needs. ``prefill`` and ``decode`` are the buckets of its largest prompt chunk and of
    its row, when nobody else runs.
    """

    plan: Plan
    shards: int
    shard_len: int
    devices: int
    num_bytes: int
    prefill: Bucket
    decode: Bucket

    @property
    def programs(self) -> tuple[str, str]:
        """The keys of both programs."""
        return program_key(self.plan, self.prefill), program_key(self.plan, self.decode)


@dataclass(frozen=True, slots=True)
class Offer:
    """One format that a node can serve: its plan, and what the tree reads of it.

    ``extra_bytes`` is what the format takes on each device before any page, compared with the first offer.
    ``prefills`` and ``decodes`` have a bucket of one row for each width, ``prefills`` also one for each chunk.
    """

    plan: Plan
    page_bytes: int
    shard_pages: int
    extra_bytes: int
    prefills: tuple[tuple[Bucket, ...], ...]
    decodes: tuple[Bucket, ...]


@dataclass(frozen=True, slots=True)
class Terms:
    """What decisions are made by: the offers, most bits first, and what all of them share."""

    offers: tuple[Offer, ...]
    context: int
    shard_len: int
    devices: int


def terms_of(plans: Iterable[Plan]) -> Terms:
    """The terms of plans that differ in their format of keys and values only.

    Raises:
        PlanError: there is no plan, or they differ in what all of them must share.
    """
    ordered = sorted(plans, key=lambda plan: -kv.bits_per_element(plan.kv_format, plan.architecture.head_dim))
    if not ordered:
        raise PlanError("there is no format to decide about; give at least one plan")
    first = ordered[0]
    shared = {(p.architecture, p.context, p.shard_len, p.devices, p.context_devices, p.target) for p in ordered}
    if len(shared) > 1 or len({plan.kv_format for plan in ordered}) < len(ordered):
        raise PlanError("plans to decide between must differ in kv_format, and in nothing that all of them share")
    held = [_held_bytes(plan) for plan in ordered]
    return Terms(
        offers=tuple(_offer(plan, extra - held[0]) for plan, extra in zip(ordered, held, strict=True)),
        context=first.context,
        shard_len=first.shard_len,
        devices=first.context_devices,
    )


def decide(terms: Terms, context_len: int, expected_output: int, free_bytes: int) -> Decision | Declined:
    """How a context is held.

    Args:
        terms: of the node.
        context_len: ids that are there.
        expected_output: ids that may come; what passes the longest context counts as far as that.
        free_bytes: bytes for pages, as the first offer leaves them, on the device that has the fewest.
    """
    return _decide(terms, context_len, expected_output, free_bytes, None)


def explain(terms: Terms, context_len: int, expected_output: int, free_bytes: int) -> tuple[str, ...]:
    """The path that ``decide`` takes, a line for every step."""
    path: list[str] = []
    made = _decide(terms, context_len, expected_output, free_bytes, path)
    if isinstance(made, Declined):
        return (*path, f"declined ({made.reason}): {made.message}")
    where = f"{_count(made.shards, 'shard')} on {_count(made.devices, 'device')}"
    return (*path, f"{made.plan.kv_format}, {where}", *(f"program {key}" for key in made.programs))


def decisions_per_s(terms: Terms, clock: Callable[[], float], count: int = 100_000) -> float:
    """How many decisions a second this machine makes, on inputs that all differ.

    Args:
        terms: of a node.
        clock: seconds, monotonic.
        count: decisions to time.
    """
    source = random.Random(0)  # noqa: S311 - inputs of a measurement
    lengths = source.sample(range(1, 2 * terms.context + count), count)
    most = 2 * max(1, _bytes_on_fullest(terms.offers[0], terms.context, 1, terms.devices))
    inputs = [(length % terms.context + 1, length % 4096, source.randrange(most)) for length in lengths]
    began = clock()
    for context_len, expected_output, free_bytes in inputs:
        _decide(terms, context_len, expected_output, free_bytes, None)
    return count / (clock() - began)


def _decide(
    terms: Terms, context_len: int, expected_output: int, free_bytes: int, path: list[str] | None
) -> Decision | Declined:
    if context_len <= 0 or expected_output < 0:
        return Declined(Reason.EMPTY, f"{context_len} ids with {expected_output} to come; at least 1 and 0 are needed")
    if context_len >= terms.context:
        message = f"{context_len} ids leave no room for an answer in the longest context of {terms.context}"
        return Declined(Reason.TOO_LONG, message)
    length = min(context_len + expected_output, terms.context)
    shards = -(-length // terms.shard_len)
    merged = -(-shards // MOST_SHARDS)
    shards = -(-shards // merged)
    if path is not None:
        path.append(f"{context_len} ids and {expected_output} to come: {length} positions of {terms.context}")
        path.append(_shards_line(terms, length, shards, merged))
    if shards == 2 and terms.devices == 1 and _whole_fits(terms, free_bytes, path):
        first = terms.offers[0]
        return _decision(terms, first, length, context_len, 1, 2, _bytes_on_fullest(first, length, 1, 1))
    for offer in terms.offers:
        needed = _bytes_on_fullest(offer, length, merged, terms.devices)
        fits = needed <= free_bytes
        if path is not None:
            verdict = "fits" if fits else "does not fit"
            where = f" on the fullest of {terms.devices} devices" if terms.devices > 1 else ""
            path.append(f"{offer.plan.kv_format}: {_size(needed)}{where}; {_size(free_bytes)} free: {verdict}")
        if fits:
            return _decision(terms, offer, length, context_len, shards, merged, needed)
    least = min(_bytes_on_fullest(offer, length, merged, terms.devices) for offer in terms.offers)
    return Declined(
        Reason.NO_MEMORY,
        f"{length} positions take {least} bytes on a device at least and {free_bytes} are free; wait until others have "
        "ended, allow formats with fewer bits, or take more memory for pages",
    )


def _whole_fits(terms: Terms, free_bytes: int, path: list[str] | None) -> bool:
    """Whether the first offer has room for every position of two shards."""
    first = terms.offers[0]
    needed = _bytes_on_fullest(first, min(2 * terms.shard_len, terms.context), 2, 1)
    fits = needed <= free_bytes
    if path is not None:
        verdict = "one shard" if fits else "two shards, whose pages are taken as they are needed"
        path.append(
            f"{first.plan.kv_format}: all of two shards take {_size(needed)}; {_size(free_bytes)} free: {verdict}"
        )
    return fits


def _decision(
    terms: Terms, offer: Offer, length: int, context_len: int, shards: int, merged: int, num_bytes: int
) -> Decision:
    lattice, pages = offer.plan.lattice, -(-length // offer.plan.page_size)
    width, chunks = bisect_left(lattice.widths, pages), lattice.prefill_chunks
    return Decision(
        plan=offer.plan,
        shards=shards,
        shard_len=merged * terms.shard_len,
        devices=min(shards, terms.devices),
        num_bytes=num_bytes,
        prefill=offer.prefills[width][min(bisect_left(chunks, context_len), len(chunks) - 1)],
        decode=offer.decodes[width],
    )


def _bytes_on_fullest(offer: Offer, length: int, merged: int, devices: int) -> int:
    """Bytes that a context takes on the device that gets most of it."""
    pages = -(-length // offer.plan.page_size)
    if devices > 1:
        pages = fullest(pages, offer.shard_pages * merged, devices)
    return offer.extra_bytes + pages * offer.page_bytes


def _offer(plan: Plan, extra_bytes: int) -> Offer:
    lattice = plan.lattice
    return Offer(
        plan=plan,
        page_bytes=plan.page_bytes,
        shard_pages=plan.shard_pages,
        extra_bytes=extra_bytes,
        prefills=tuple(
            tuple(round_up(lattice, Phase.PREFILL, 1, chunk, width) for chunk in lattice.prefill_chunks)
            for width in lattice.widths
        ),
        decodes=tuple(round_up(lattice, Phase.DECODE, 1, 1, width) for width in lattice.widths),
    )


def _held_bytes(plan: Plan) -> int:
    memory = memory_plan(plan)
    return memory.total_bytes - memory.pages_bytes


def _shards_line(terms: Terms, length: int, shards: int, merged: int) -> str:
    if length <= terms.shard_len:
        return f"at most {terms.shard_len}: one shard"
    if shards == 2:
        return f"at most {2 * merged * terms.shard_len}: one shard or two"
    line = f"above {2 * terms.shard_len}: {shards} shards of at most {merged * terms.shard_len} positions"
    return line if merged == 1 else f"{line}, since {MOST_SHARDS} are the most"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"
