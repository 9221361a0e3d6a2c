"""Pieces: what the Triton kernels of paged_prefill for all pool formats have in common.

Owns which tile belongs to which row, the queries of a program, the two passes through a piece's keys, the softmax over
turns, and the piece that no format changes: a row's chunk. A format supplies the piece for what lies in its pages.
Source: tiles and the two passes, with masks only where some query does not see some key, as in FlashAttention-2 (arXiv
2307.08691); grouped heads share a tile as in arXiv 2305.13245; online softmax, arXiv 1805.02867.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Int32

from pallas_kernels.access import DIRECT
from pallas_kernels.operands import product, sum_of
from pallas_kernels.softmax import MASKED


class Plan(NamedTuple):
    """What each tile works on; a tile that is not needed begins behind its row's end.

    ``row`` is the number of rows for the tokens behind the last row, which see no key; ``first`` counts pairs from the
    row's beginning. ``start`` is the position of the row's first token, and the first ``held`` positions are in pages.
    """

    row: Int32[Array, " tiles"]
    first: Int32[Array, " tiles"]
    start: Int32[Array, " tiles"]
    length: Int32[Array, " tiles"]
    offset: Int32[Array, " tiles"]
    held: Int32[Array, " tiles"]


def plan_of(
    starts: Int32[Array, " rows"],
    lengths: Int32[Array, " rows"],
    offsets: Int32[Array, " rows"],
    held: Int32[Array, " rows"],
    tokens: int,
    group: int,
    queries: int,
) -> Plan:
    """What each tile of ``queries`` pairs of (token, one of ``group`` heads) works on, for a key/value head."""
    rows = starts.shape[0]
    end = (offsets + lengths).max(keepdims=True)
    added = ((starts, end * 0), (lengths, tokens - end), (offsets, end), (held, end * 0))
    starts, lengths, offsets, held = (jnp.concatenate(parts) for parts in added)
    ends = jnp.cumsum(pl.cdiv(lengths * group, queries))
    used = min(rows + 1, tokens)  # every row that has a token may leave the rest of its last tile empty
    tiles = jnp.arange((tokens * group + used * (queries - 1)) // queries, dtype=jnp.int32)
    row = jnp.minimum((tiles[:, None] >= ends).sum(axis=1, dtype=jnp.int32), rows)
    before = jnp.where(row > 0, ends[row - 1], 0)
    return Plan(row, (tiles - before) * queries, starts[row], lengths[row], offsets[row], held[row])


class Reach(NamedTuple):
    """Positions from and up to which some query sees keys, and those between which every query sees all of them.

    None: every turn needs masks.
    """

    begin: Array
    whole_begin: Array | None
    whole_end: Array | None
    end: Array


State = tuple[Array, ...]
"""Peak and total of the softmax and the weighted sum by chunks of channels; the peak counts powers of two."""


class Piece(NamedTuple):
    """Keys and values of one kind: a row's history, or its chunk.

    ``ahead`` loads what a turn must know before it can load keys, and is called a turn early; ``turn`` takes its index,
    that, and the state; it masks where told that some query does not see some key.
    """

    reach: Reach
    ahead: Callable[[Array], State]
    turn: Callable[[Array, State, State, bool], State]


def through(piece: Piece, size: int, state: State) -> State:
    """All turns in reach of ``size`` positions; those that need masks last."""
    reach = piece.reach
    begin = reach.begin // size
    end = jnp.maximum(pl.cdiv(reach.end, size), begin)

    def loop(turns: Array, place: Callable[[Array], Array], state: State, *, masked: bool) -> State:
        def turn(count: Array, carried: tuple[State, State]) -> tuple[State, State]:
            known, state = carried
            return piece.ahead(place(count + 1)), piece.turn(place(count), known, state, masked)

        return jax.lax.fori_loop(0, turns, turn, (piece.ahead(place(jnp.int32(0))), state))[1]

    if reach.whole_begin is None or reach.whole_end is None:
        return loop(end - begin, lambda count: begin + count, state, masked=True)
    whole_begin = jnp.minimum(pl.cdiv(reach.whole_begin, size), end)
    whole = jnp.maximum(reach.whole_end // size - whole_begin, 0)

    def at_an_edge(count: Array) -> Array:
        return begin + count + jnp.where(begin + count >= whole_begin, whole, 0)

    state = loop(whole, lambda count: whole_begin + count, state, masked=False)
    return loop(end - begin - whole, at_an_edge, state, masked=True)


class Queries(NamedTuple):
    """The queries of one program: a tile of the plan, for one key/value head."""

    head: Array
    row: Array
    start: Array
    length: Array
    offset: Array
    held: Array
    window: Array
    oldest: Array  # token of the row that the first query belongs to
    newest: Array  # and the last one; -1 behind the last row
    local: Array  # [queries] token of the row
    real: Array  # [queries] whether there is such a token
    matrix_row: Array  # [queries] row of the matrix of all tokens' query heads

    def seen(self, key: Array) -> Array:
        """[queries keys] which query sees the key at which position."""
        position = self.start + self.local
        floor = jnp.where(self.window > 0, position - self.window, -1)
        return (key[None, :] <= position[:, None]) & (key[None, :] > floor[:, None])

    def floor(self, token: Array) -> Array:
        """The first position that a token of the row sees."""
        return jnp.where(self.window > 0, jnp.maximum(self.start + token - self.window + 1, 0), 0)


def find_queries(plan_ref: jax.Ref, window_ref: jax.Ref, rows: int, kv_heads: int, group: int, size: int) -> Queries:
    """The queries of the program that runs; each call reads them again."""
    place, head = pl.num_programs(0) - 1 - pl.program_id(0), pl.program_id(1)  # the longest histories first
    # volatile: what is asked for again at the end is read again, where registers would hold it all the while
    fields = (plgpu.load(plan_ref.at[jnp.int32(field), place], volatile=True) for field in range(len(Plan._fields)))
    row, first, start, length, offset, held = fields
    pair = first + jnp.arange(size, dtype=jnp.int32)
    local = pair // group
    newest = jnp.minimum((first + size - 1) // group, length - 1)
    return Queries(
        head=head,
        row=row,
        start=start,
        length=length,
        offset=offset,
        held=held,
        window=DIRECT.load(window_ref, ()),
        oldest=first // group,
        newest=jnp.where(row < rows, newest, -1),
        local=local,
        real=pair < length * group,
        matrix_row=((offset + local) * kv_heads + head) * group + pair % group,
    )


class Softmax(NamedTuple):
    """How scores become weights: ``scale`` multiplies products; ``softcap`` as in the contract."""

    scale: float
    softcap: float

    def turn(
        self,
        state: State,
        products: Sequence[Array],
        seen: Sequence[Array] | None,
        sums: Callable[[Sequence[Array], Sequence[Array]], Sequence[Array]],
    ) -> State:
        """The state with a turn's products, tiles of [queries keys].

        ``sums`` takes the weights of the same tiles and the weighted sums so far, and adds those of its values.
        """
        peak, total, *weighted = state
        scores = [jnp.tanh(part * (self.scale / self.softcap)) if self.softcap else part for part in products]
        if seen is not None:
            scores = [jnp.where(inside, part, -jnp.inf) for inside, part in zip(seen, scores, strict=True)]
        unit = (self.softcap or self.scale) * math.log2(math.e)
        higher = jnp.maximum(peak, functools.reduce(jnp.maximum, scores).max(axis=1) * unit)
        weights = [jnp.exp2(part * unit - higher[:, None]) for part in scores]
        factor = jnp.exp2(peak - higher)
        total = total * factor + sum_of(weights).sum(axis=1)
        return higher, total, *sums(weights, [part * factor[:, None] for part in weighted])


class Channels(NamedTuple):
    """One chunk of channels; ``mask`` says which of them there are, None where all are."""

    columns: Array
    mask: Array | None

    def load(self, ref: jax.Ref, rows: Array, real: Array | None = None) -> Array:
        """These channels of rows of a matrix; zeros where a row is not ``real`` (None: all are)."""
        return DIRECT.load(ref, (rows[:, None], self.columns[None, :]), self.exists(real))

    def store(self, ref: jax.Ref, rows: Array, real: Array, value: Array) -> None:
        """Write these channels of the rows that are ``real``."""
        DIRECT.store(ref, (rows[:, None], self.columns[None, :]), value, self.exists(real))

    def exists(self, real: Array | None) -> Array | None:
        """Of which rows and channels there is anything; None where of all."""
        rows, columns = None if real is None else real[:, None], None if self.mask is None else self.mask[None, :]
        return columns if rows is None else rows if columns is None else rows & columns


def channels_of(chunks: Sequence[int], count: int, first: int = 0) -> list[Channels]:
    """``count`` channels from ``first`` on by chunks, which together may be larger."""
    found: list[Channels] = []
    for start, size in zip(itertools.accumulate(chunks, initial=0), chunks, strict=False):
        columns = start + jnp.arange(size, dtype=jnp.int32)
        found.append(Channels(first + columns, columns < count if start + size > count else None))
    return found


class Work(NamedTuple):
    """What pieces of plain keys and values need: positions of a turn, queries and how scores become weights.

    ``q`` are the queries by the chunks of ``key_channels``; sums are by those of ``value_channels``.
    """

    keys: int
    softmax: Softmax
    queries: Queries
    key_channels: Sequence[Channels]
    value_channels: Sequence[Channels]
    q: Sequence[Array]

    def turn(
        self,
        state: State,
        key: tuple[jax.Ref, Array],
        value: tuple[jax.Ref, Array],
        real: Array | None,
        seen: Array | None,
    ) -> State:
        """The state after a turn; keys and values are rows of a matrix, of which those that are ``real`` exist."""
        dtype = self.q[0].dtype
        keys = [part.load(*key, real).astype(dtype) for part in self.key_channels]

        def sums(weights: Sequence[Array], weighted: Sequence[Array]) -> list[Array]:
            values = [part.load(*value, real).astype(dtype) for part in self.value_channels]
            (weight,) = (part.astype(dtype) for part in weights)
            return [old + product(weight, part) for old, part in zip(weighted, values, strict=True)]

        return self.softmax.turn(state, [products(self.q, keys)], None if seen is None else [seen], sums)


def chunk_piece(work: Work, k_ref: jax.Ref, v_ref: jax.Ref, kv_heads: int, counts: Array) -> Piece:
    """The row's own tokens, none of them where ``counts`` is 0."""
    queries, size = work.queries, work.keys
    key = jnp.arange(size, dtype=jnp.int32)

    def turn(index: Array, _: State, state: State, masked: bool) -> State:
        token = index * size + key
        own = token < queries.length if masked else None
        place = (queries.offset + token) * kv_heads + queries.head
        seen = queries.seen(queries.start + token) if masked else None
        return work.turn(state, (k_ref, place), (v_ref, place), own, seen)

    begin, whole_begin = (
        jnp.maximum(queries.floor(token) - queries.start, 0) for token in (queries.oldest, queries.newest)
    )
    whole_end = (jnp.minimum(queries.oldest, queries.newest) + 1) * counts
    return Piece(Reach(begin, whole_begin, whole_end, (queries.newest + 1) * counts), lambda _: (), turn)


def products(a: Sequence[Array], b: Sequence[Array]) -> Array:
    """The products of all rows of ``a`` with all rows of ``b``, both by chunks."""
    return sum_of([product(left, right.T) for left, right in zip(a, b, strict=True)])


def nothing(queries: int, channels: Sequence[Channels]) -> State:
    """The state before any turn."""
    return (
        jnp.full((queries,), MASKED, jnp.float32),
        jnp.zeros((queries,), jnp.float32),
        *(jnp.zeros((queries, part.columns.shape[0]), jnp.float32) for part in channels),
    )


def store(out_ref: jax.Ref, lse_ref: jax.Ref, queries: Queries, state: State, channels: Sequence[Channels]) -> None:
    """Write what the softmax comes to, zeros for queries that saw no key, and the logarithms of its totals."""
    peak, total, *weighted = state
    inverse = 1 / jnp.maximum(total, 1e-30)
    lse = jnp.where(total > 0, (peak + jnp.log2(jnp.maximum(total, 1e-30))) * math.log(2), MASKED)
    DIRECT.store(lse_ref, (queries.matrix_row,), lse, queries.real)
    for part, found in zip(channels, weighted, strict=True):
        part.store(out_ref, queries.matrix_row, queries.real, (found * inverse[:, None]).astype(out_ref.dtype))
