"""paged_prefill by a Triton kernel: each program takes a tile of one row's queries through its pages and its chunk.

Owns the kernel, the sizes of its tiles and which tile belongs to which row. Reads float pages (bf16 on a GPU; float32
pages are for interpreted tests). A tile packs (token, query head) pairs of one key/value head, so that every head that
shares keys shares their loads.
Source: tiles and the two passes, with masks only where some query does not see some key, as in FlashAttention-2 (arXiv
2307.08691); grouped heads share a tile as in arXiv 2305.13245; online softmax, arXiv 1805.02867.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.access import DIRECT
from pallas_kernels.errors import require
from pallas_kernels.pages import Pages, kind
from pallas_kernels.softmax import MASKED

LEAST_HEAD_DIM, MOST_HEAD_DIM = 8, 256
MULTIPROCESSORS = 108
"""Of the card that the height of tiles is chosen for; another card runs the same program less evenly."""

_LEAST_CHUNK = 16  # channels, of an operand of the tensor cores
_MOST_CHUNK = 128
_STAGES = 3  # two tiles of keys and values are in flight


@dataclass(frozen=True, slots=True)
class Tiling:
    """Sizes of one launch.

    ``queries`` (token, head) pairs meet ``keys`` positions a turn; channels go through in ``chunks``, powers of two, of
    which the last may reach past the head dim; ``warps`` and ``stages`` are Triton's.
    """

    queries: int
    keys: int
    chunks: tuple[int, ...]
    warps: int
    stages: int


def tiling(tokens: int, q_heads: int, kv_heads: int, head_dim: int) -> Tiling:
    """The sizes for a launch of so many tokens.

    Raises:
        ContractError: the kernel does not take this head dim.
    """
    require(
        LEAST_HEAD_DIM <= head_dim <= MOST_HEAD_DIM and head_dim % 8 == 0,
        f"head_dim {head_dim} has no tile; this kernel takes multiples of 8 from {LEAST_HEAD_DIM} to {MOST_HEAD_DIM}",
    )
    chunks = channel_chunks(head_dim)
    if head_dim > 128:
        return Tiling(128, 16, chunks, 8, _STAGES)  # 64 queries by four warps spill
    if tokens * q_heads // kv_heads // 128 * kv_heads < MULTIPROCESSORS:
        return Tiling(64, 64 if head_dim <= 64 else 32, chunks, 4, _STAGES)
    return Tiling(128, 64, chunks, 4 if head_dim <= 64 else 8, _STAGES)


def channel_chunks(head_dim: int) -> tuple[int, ...]:
    """``head_dim`` as one or two powers of two; whatever the second has too many is masked."""
    first = max(_LEAST_CHUNK, min(_MOST_CHUNK, 1 << (head_dim.bit_length() - 1)))
    rest = head_dim - first
    return (first, max(_LEAST_CHUNK, pl.next_power_of_2(rest))) if rest > 0 else (first,)


class _Plan(NamedTuple):
    """What each tile works on; a tile that is not needed begins behind its row's end.

    ``row`` is the number of rows for the tokens behind the last row, which see no key; ``first`` counts pairs from the
    row's beginning.
    """

    row: Int32[Array, " tiles"]
    first: Int32[Array, " tiles"]
    start: Int32[Array, " tiles"]
    length: Int32[Array, " tiles"]
    offset: Int32[Array, " tiles"]


def _plan(
    starts: Int32[Array, " rows"],
    lengths: Int32[Array, " rows"],
    offsets: Int32[Array, " rows"],
    tokens: int,
    group: int,
    queries: int,
) -> _Plan:
    rows = starts.shape[0]
    end = (offsets + lengths).max(keepdims=True)
    starts, lengths, offsets = (
        jnp.concatenate(parts) for parts in ((starts, end * 0), (lengths, tokens - end), (offsets, end))
    )
    ends = jnp.cumsum(pl.cdiv(lengths * group, queries))
    used = min(rows + 1, tokens)  # every row that has a token may leave the rest of its last tile empty
    tiles = jnp.arange((tokens * group + used * (queries - 1)) // queries, dtype=jnp.int32)
    row = jnp.minimum((tiles[:, None] >= ends).sum(axis=1, dtype=jnp.int32), rows)
    before = jnp.where(row > 0, ends[row - 1], 0)
    return _Plan(row, (tiles - before) * queries, starts[row], lengths[row], offsets[row])


class _Reach(NamedTuple):
    """Positions from and up to which some query sees keys, and those between which every query sees all of them."""

    begin: Array
    whole_begin: Array
    whole_end: Array
    end: Array


State = tuple[Array, ...]
"""Peak and total of the softmax and the weighted sum by chunks of channels; the peak counts powers of two."""


class _Piece(NamedTuple):
    """Keys and values of one kind: a row's history, or its chunk.

    ``ahead`` loads what a turn must know before it can load keys, and is called a turn early; ``turn`` takes its index,
    that, and the state; it masks where told that some query does not see some key.
    """

    reach: _Reach
    ahead: Callable[[Array], State]
    turn: Callable[[Array, State, State, bool], State]


def _through(piece: _Piece, size: int, state: State) -> State:
    """All turns in reach of ``size`` positions; those that need masks last."""
    reach = piece.reach
    begin = reach.begin // size
    end = jnp.maximum(pl.cdiv(reach.end, size), begin)
    whole_begin = jnp.minimum(pl.cdiv(reach.whole_begin, size), end)
    whole = jnp.maximum(reach.whole_end // size - whole_begin, 0)

    def loop(turns: Array, place: Callable[[Array], Array], state: State, *, masked: bool) -> State:
        def turn(count: Array, carried: tuple[State, State]) -> tuple[State, State]:
            known, state = carried
            return piece.ahead(place(count + 1)), piece.turn(place(count), known, state, masked)

        return jax.lax.fori_loop(0, turns, turn, (piece.ahead(place(jnp.int32(0))), state))[1]

    def at_an_edge(count: Array) -> Array:
        return begin + count + jnp.where(begin + count >= whole_begin, whole, 0)

    state = loop(whole, lambda count: whole_begin + count, state, masked=False)
    return loop(end - begin - whole, at_an_edge, state, masked=True)


class _Queries(NamedTuple):
    """The queries of one program: a tile of the plan, for one key/value head."""

    head: Array
    row: Array
    start: Array
    length: Array
    offset: Array
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


def _queries(plan_ref: jax.Ref, window_ref: jax.Ref, rows: int, kv_heads: int, group: int, size: int) -> _Queries:
    place, head = pl.num_programs(0) - 1 - pl.program_id(0), pl.program_id(1)  # the longest histories first
    # volatile: what is asked for again at the end is read again, where registers would hold it all the while
    fields = (plgpu.load(plan_ref.at[jnp.int32(field), place], volatile=True) for field in range(len(_Plan._fields)))
    row, first, start, length, offset = fields
    pair = first + jnp.arange(size, dtype=jnp.int32)
    local = pair // group
    newest = jnp.minimum((first + size - 1) // group, length - 1)
    return _Queries(
        head=head,
        row=row,
        start=start,
        length=length,
        offset=offset,
        window=DIRECT.load(window_ref, ()),
        oldest=first // group,
        newest=jnp.where(row < rows, newest, -1),
        local=local,
        real=pair < length * group,
        matrix_row=((offset + local) * kv_heads + head) * group + pair % group,
    )


class _Softmax(NamedTuple):
    """How scores become weights: ``scale`` multiplies products; ``softcap`` as in the contract."""

    scale: float
    softcap: float

    def turn(
        self, state: State, products: Array, seen: Array | None, sums: Callable[[Array], Sequence[Array]]
    ) -> State:
        """The state with a turn's products [queries keys]; ``sums`` gives the weighted sums of its values by chunks."""
        peak, total, *weighted = state
        scores = jnp.tanh(products * (self.scale / self.softcap)) if self.softcap else products
        if seen is not None:
            scores = jnp.where(seen, scores, -jnp.inf)
        unit = (self.softcap or self.scale) * math.log2(math.e)
        higher = jnp.maximum(peak, scores.max(axis=1) * unit)
        weights = jnp.exp2(scores * unit - higher[:, None])
        factor = jnp.exp2(peak - higher)
        total = total * factor + weights.sum(axis=1)
        new = sums(weights)
        return higher, total, *(old * factor[:, None] + part for old, part in zip(weighted, new, strict=True))


class _Channels(NamedTuple):
    """One chunk of channels; ``mask`` says which of them there are, None where all are."""

    columns: Array
    mask: Array | None

    def load(self, ref: jax.Ref, rows: Array, real: Array | None) -> Array:
        """These channels of rows of a matrix; zeros where a row is not ``real`` (None: all are)."""
        return DIRECT.load(ref, (rows[:, None], self.columns[None, :]), self._exists(real))

    def store(self, ref: jax.Ref, rows: Array, real: Array, value: Array) -> None:
        """Write these channels of the rows that are ``real``."""
        DIRECT.store(ref, (rows[:, None], self.columns[None, :]), value, self._exists(real))

    def _exists(self, real: Array | None) -> Array | None:
        rows, columns = None if real is None else real[:, None], None if self.mask is None else self.mask[None, :]
        return columns if rows is None else rows if columns is None else rows & columns


def _channels(chunks: tuple[int, ...], head_dim: int) -> list[_Channels]:
    found: list[_Channels] = []
    for start, size in zip(itertools.accumulate(chunks, initial=0), chunks, strict=False):
        columns = start + jnp.arange(size, dtype=jnp.int32)
        found.append(_Channels(columns, columns < head_dim if start + size > head_dim else None))
    return found


class _Work(NamedTuple):
    """What every piece needs to know of a program: its sizes, its queries and how scores become weights."""

    tile: Tiling
    softmax: _Softmax
    channels: Sequence[_Channels]
    queries: _Queries
    q: Sequence[Array]

    def load(self, ref: jax.Ref, rows: Array, real: Array | None) -> list[Array]:
        """Rows of a matrix by chunks of channels, in the dtype of the operands."""
        return [part.load(ref, rows, real).astype(self.q[0].dtype) for part in self.channels]

    def turn(
        self, state: State, keys: Sequence[Array], seen: Array | None, values: Callable[[], Sequence[Array]]
    ) -> State:
        """The state after a turn with plain keys [keys channels]; ``values`` loads theirs."""

        def sums(weights: Array) -> list[Array]:
            return [_product(weights.astype(part.dtype), part) for part in values()]

        return self.softmax.turn(state, _products(self.q, keys), seen, sums)


def _history(work: _Work, pages_ref: jax.Ref, table_ref: jax.Ref, layer_ref: jax.Ref, pool: tuple[int, ...]) -> _Piece:
    """What the row has in pages, by position."""
    _, num_pages, kv_heads, _, page_size, _ = pool
    queries, size = work.queries, work.tile.keys
    in_pool = DIRECT.load(layer_ref, ()) * num_pages

    key = jnp.arange(size, dtype=jnp.int32)

    def page_of(index: Array) -> State:
        position = index * size + key if page_size % size else index * size
        return (DIRECT.load(table_ref, (queries.row, position // page_size), position < queries.start),)

    def turn(index: Array, known: State, state: State, masked: bool) -> State:
        (page,) = known
        position = index * size + key
        stored = position < queries.start if masked else None
        place = ((in_pool + page) * kv_heads + queries.head) * 2 * page_size + position % page_size
        keys = work.load(pages_ref, place, stored)
        seen = None if stored is None else stored[None, :] & queries.seen(position)
        return work.turn(state, keys, seen, lambda: work.load(pages_ref, place + page_size, stored))

    begin = jnp.minimum(queries.floor(queries.oldest), queries.start)
    return _Piece(_Reach(begin, queries.floor(queries.newest), queries.start, queries.start), page_of, turn)


def _chunk(work: _Work, k_ref: jax.Ref, v_ref: jax.Ref, kv_heads: int) -> _Piece:
    """The row's own tokens."""
    queries, size = work.queries, work.tile.keys
    key = jnp.arange(size, dtype=jnp.int32)

    def turn(index: Array, _: State, state: State, masked: bool) -> State:
        token = index * size + key
        own = token < queries.length if masked else None
        place = (queries.offset + token) * kv_heads + queries.head
        seen = queries.seen(queries.start + token) if masked else None
        return work.turn(state, work.load(k_ref, place, own), seen, lambda: work.load(v_ref, place, own))

    begin, whole_begin = (
        jnp.maximum(queries.floor(token) - queries.start, 0) for token in (queries.oldest, queries.newest)
    )
    whole_end = jnp.minimum(queries.oldest, queries.newest) + 1
    return _Piece(_Reach(begin, whole_begin, whole_end, queries.newest + 1), lambda _: (), turn)


def _kernel(
    plan_ref: jax.Ref,  # [5 tiles] int32
    layer_ref: jax.Ref,  # [] int32
    window_ref: jax.Ref,  # [] int32
    table_ref: jax.Ref,  # [rows width] int32
    q_ref: jax.Ref,  # [tokens*q_heads head_dim] of the operands' dtype
    k_ref: jax.Ref,  # [tokens*kv_heads head_dim] of the operands' dtype
    v_ref: jax.Ref,  # [tokens*kv_heads head_dim] of the operands' dtype
    pages_ref: jax.Ref,  # [layers*num_pages*kv_heads*2*page_size head_dim], all in global memory
    out_ref: jax.Ref,  # [tokens*q_heads head_dim]
    *,
    pool: tuple[int, ...],
    tile: Tiling,
    softmax: _Softmax,
) -> None:
    # FLOPs: 4 * queries * keys * head_dim a turn. Bytes: 4 * keys * head_dim in bf16, which the tiles of a head find in
    # L2 after the first. Bound by the tensor cores: 128 queries are 128 FLOPs a byte even where they find none there.
    kv_heads, group = pool[2], q_ref.shape[0] // k_ref.shape[0]
    find = functools.partial(_queries, plan_ref, window_ref, table_ref.shape[0], kv_heads, group, tile.queries)
    queries, channels = find(), _channels(tile.chunks, pool[5])
    q = [part.load(q_ref, queries.matrix_row, queries.real) for part in channels]
    work = _Work(tile, softmax, channels, queries, q)
    state = (
        jnp.full((tile.queries,), MASKED, jnp.float32),
        jnp.zeros((tile.queries,), jnp.float32),
        *(jnp.zeros((tile.queries, size), jnp.float32) for size in tile.chunks),
    )
    state = _through(_history(work, pages_ref, table_ref, layer_ref, pool), tile.keys, state)
    _, total, *weighted = _through(_chunk(work, k_ref, v_ref, kv_heads), tile.keys, state)
    inverse, queries = 1 / jnp.maximum(total, 1e-30), find()
    for part, found in zip(channels, weighted, strict=True):
        part.store(out_ref, queries.matrix_row, queries.real, (found * inverse[:, None]).astype(out_ref.dtype))


def _products(a: Sequence[Array], b: Sequence[Array]) -> Array:
    """The products of all rows of ``a`` with all rows of ``b``, both by chunks."""
    return functools.reduce(jnp.add, (_product(left, right.T) for left, right in zip(a, b, strict=True)))


def _product(a: Array, b: Array) -> Array:
    """The matrix product with float32 sums; float32 operands are not cut to TF32."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot(a, b, precision=precision, preferred_element_type=jnp.float32)


def paged_prefill(
    q: Float[Array, "tokens q_heads head_dim"],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    pages: Pages,
    layer: Int32[Array, ""],
    page_table: Int32[Array, "rows width"],
    slots: Int32[Array, " rows"],
    starts: Int32[Array, " rows"],
    lengths: Int32[Array, " rows"],
    offsets: Int32[Array, " rows"],
    window: Int32[Array, ""],
    *,
    scale: float,
    softcap: float = 0.0,
    products: str = "float32",
    interpret: bool = False,
    tile: Tiling | None = None,
) -> Float[Array, "tokens q_heads head_dim"]:
    """See ``op.paged_prefill``; tokens that belong to no row get zeros.

    ``interpret`` runs the kernel on any backend, slowly; ``tile`` replaces the sizes that the shapes would give.

    Raises:
        ContractError: no tile fits this head dim, the scale is not positive, or the pages are of a dtype that the
            kernel does not take.
    """
    del slots
    tokens, q_heads, head_dim = q.shape
    require(
        isinstance(pages, jax.Array) and pages.dtype in (jnp.bfloat16, jnp.float32),
        f"pages are {kind(pages)}; this kernel takes bf16 and float32",
    )
    kv_heads = pages.shape[2]
    require(scale > 0, f"scale {scale} is not positive, which this kernel needs to find the largest score")
    tile = tile or tiling(tokens, q_heads, kv_heads, head_dim)
    plan = _plan(starts, lengths, offsets, tokens, q_heads // kv_heads, tile.queries)
    operands = jnp.bfloat16 if products == "bf16" else q.dtype
    out = pl.pallas_call(
        functools.partial(_kernel, pool=pages.shape, tile=tile, softmax=_Softmax(scale, softcap)),
        out_shape=jax.ShapeDtypeStruct((tokens * q_heads, head_dim), q.dtype),
        grid=(plan.row.shape[0], kv_heads),
        compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
        name="paged_prefill",
    )(
        jnp.stack(plan),
        layer,
        window,
        page_table,
        *(part.reshape(-1, head_dim).astype(operands) for part in (q, k, v)),
        pages.reshape(-1, head_dim),
    )
    return out.reshape(q.shape)
