"""Stretches: how the programs of a launch share the histories, and how their partial sums become one.

Owns what the Triton kernels of all quantised pools have in common. A program has a stretch of one slot's history and a
tile of the query heads that share a key/value head. Stretches are equal parts of what a slot really has, so that ragged
slots stay balanced. Tiles of scores and sums are [keys or channels, query heads]: what the tensor cores take eight of
at a time are then the query heads, of which there are few. Source: split-K decoding and its merge by log-sum-exp as in
FlashDecoding; online softmax, arXiv 1805.02867.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from pallas_kernels.access import Access
from pallas_kernels.card import MULTIPROCESSORS
from pallas_kernels.softmax import MASKED, Partial

_FEWEST_ROWS = 8  # query heads that the tensor cores take together
_MOST_ROWS = 16
_WIDE = 256  # head dim whose sums leave no registers for more than the fewest
_SHARE_OF_PARTIALS = 0.04  # of the bytes of a stretch


@dataclass(frozen=True, slots=True)
class Program:
    """One program: which stretch of which slot it has, and which query heads of which key/value head.

    ``place`` is the row of each query head in the queries, ``out`` in the partial sums; ``real`` are those that exist.
    """

    split: Array
    head: Array
    slot: Array
    place: Array
    out: Array
    real: Array

    def query(self, q_ref: jax.Ref, channel: Array, exists: Array, access: Access) -> Array:
        """Channels of the queries, [channels, rows]; zero where they do not exist."""
        mask = exists[:, None] & self.real[None, :]
        return access.load(q_ref, (self.place[None, :], channel[:, None]), mask)

    def store(
        self,
        refs: tuple[jax.Ref, jax.Ref, jax.Ref],
        sums: tuple[Array, Array, Sequence[Array]],
        channels: Sequence[tuple[Array, Array]],
        access: Access,
    ) -> None:
        """Write peaks, which are logarithms to base two, totals, and weighted parts [channels, rows].

        ``channels`` has each part's channels and which of them exist.
        """
        weighted_ref, peak_ref, total_ref = refs
        peak, total, weighted = sums
        access.store(peak_ref, (self.out,), peak * math.log(2), self.real)
        access.store(total_ref, (self.out,), total, self.real)
        for part, (channel, exists) in zip(weighted, channels, strict=True):
            mask = exists[:, None] & self.real[None, :]
            access.store(weighted_ref, (self.out[None, :], channel[:, None]), part, mask)


@dataclass(frozen=True, slots=True)
class Shares:
    """``splits`` programs share the history of a slot, ``least_turns`` or more turns of ``positions`` each.

    Each has ``rows`` query heads. Where a group has more, several programs go through the same stretch.
    """

    rows: int
    positions: int
    splits: int
    least_turns: int

    def grid(self, slots: int, kv_heads: int, group: int) -> tuple[int, int, int]:
        """The programs of a launch; those with the same stretch follow each other and find it in a cache."""
        return self.splits * pl.cdiv(group, self.rows), kv_heads, slots

    def program(self, group: int) -> Program:
        """The program that runs."""
        tiles = pl.cdiv(group, self.rows)
        index, head, slot = (pl.program_id(axis) for axis in range(3))
        split, row = index // tiles, index % tiles * self.rows + jnp.arange(self.rows, dtype=jnp.int32)
        group_of = slot * pl.num_programs(1) + head
        return Program(
            split=split,
            head=head,
            slot=slot,
            place=group_of * group + row,
            out=(group_of * self.splits + split) * group + row,
            real=row < group,
        )

    def turns(self, first: Array, end: Array, split: Array) -> tuple[Array, Array]:
        """The turns, from and up to, in which a program goes through its part of the positions from first to end."""
        first_turn, end_turn = first // self.positions, pl.cdiv(end, self.positions)
        share = jnp.maximum(pl.cdiv(end_turn - first_turn, self.splits), self.least_turns)
        begin = first_turn + split * share
        return begin, jnp.minimum(begin + share, end_turn)

    def partials(self, slots: int, kv_heads: int, group: int, head_dim: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        """What the programs of a launch return: weighted sums, peaks and totals, a row a stretch and query head."""
        rows = slots * kv_heads * self.splits * group
        float32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
        return float32((rows, head_dim)), float32((rows,)), float32((rows,))


def shares(
    slots: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    context: int,
    positions: int,
    turn_bytes: int,
    per_multiprocessor: int,
) -> Shares:
    """Enough stretches to fill the card, none so short that its partial sums cost much beside what it reads.

    Args:
        slots: of the launch.
        q_heads: of the model.
        kv_heads: of the model.
        head_dim: of the model.
        context: most positions of a slot.
        positions: of a turn.
        turn_bytes: that a turn reads.
        per_multiprocessor: programs to each.
    """
    group = q_heads // kv_heads
    rows = _FEWEST_ROWS if group <= _FEWEST_ROWS or head_dim >= _WIDE else _MOST_ROWS
    partial_bytes = 2 * group * (head_dim + 2) * 4  # written and read
    least = max(1, round(partial_bytes / (_SHARE_OF_PARTIALS * turn_bytes)))
    wanted = pl.cdiv(per_multiprocessor * MULTIPROCESSORS, slots * kv_heads * pl.cdiv(group, rows))
    return Shares(rows, positions, min(wanted, max(1, pl.cdiv(context, least * positions))), least)


FLOOR = -1e20
"""Least peak, so that a masked score weighs nothing even where no other is there; no score is as low."""


@dataclass(frozen=True, slots=True)
class Softmax:
    """The softmax over keys that come turn by turn; ``scale`` is positive."""

    scale: float
    softcap: float

    @property
    def factor(self) -> float:
        """What scores are to be multiplied by before they are weighed, which costs less where it is part of a scale."""
        return self.scale / self.softcap if self.softcap else self.scale * math.log2(math.e)

    def weigh(self, scores: Sequence[Array], seen: Sequence[Array], peak: Array) -> tuple[Array, Array, list[Array]]:
        """The new peak [rows], what earlier sums are multiplied by, and the weights of tiles of scores [keys, rows].

        Peaks are logarithms to base two. Keys that are not ``seen`` weigh nothing.
        """
        if self.softcap:
            scores = [jnp.tanh(part) * (self.softcap * math.log2(math.e)) for part in scores]
        scores = [jnp.where(inside[:, None], part, MASKED) for part, inside in zip(scores, seen, strict=True)]
        higher = jnp.maximum(peak, functools.reduce(jnp.maximum, scores).max(axis=0))
        return higher, jnp.exp2(peak - higher), [jnp.exp2(part - higher[None, :]) for part in scores]


def columns(chunks: Sequence[int]) -> list[Array]:
    """The channels of each chunk."""
    starts = (sum(chunks[:index]) for index in range(len(chunks)))
    return [start + jnp.arange(size, dtype=jnp.int32) for start, size in zip(starts, chunks, strict=True)]


def over_stretches(weighted: Array, peak: Array, total: Array, by_stretch: tuple[int, int, int, int]) -> Partial:
    """The partial sums of all stretches in one, [slots kv_heads group ...]; ``by_stretch`` is what the rows are."""
    peak, total = peak.reshape(by_stretch), total.reshape(by_stretch)
    weighted = weighted.reshape(*by_stretch, weighted.shape[-1])
    highest = peak.max(axis=2)
    factor = jnp.exp(peak - highest[:, :, None])
    return Partial(highest, (total * factor).sum(axis=2), (weighted * factor[..., None]).sum(axis=2))
