"""paged_prefill of int8 pools by a Triton kernel: codes meet queries as they are, scales go into scores and weights.

Owns the kernel and the sizes of its tiles. The four channel groups that share words are four products each way; the
chunk's own keys and values go through by the same groups, so that one set of sums serves both.
Source: the sums of ``kv_int8``; the rest is that of ``pieces``.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.access import DIRECT
from pallas_kernels.bits import unpair
from pallas_kernels.errors import require
from pallas_kernels.kv_layout import int8_page_size
from pallas_kernels.operands import CONSTANTS, Unpack, chunks, product, rounded, sum_of, unpacker
from pallas_kernels.paged_prefill.launch import Common, Results, launch
from pallas_kernels.paged_prefill.pieces import (
    Channels,
    Piece,
    Reach,
    Softmax,
    State,
    Work,
    channels_of,
    chunk_piece,
    find_queries,
    nothing,
    store,
    through,
)
from pallas_kernels.pages import Int8Pages
from pallas_kernels.rows import Rows
from pallas_kernels.softmax import Partial

HEAD_DIMS = (8, 16, 32, 64, 80, 96, 128, 256)
"""Head dims whose tiles are known to fit."""

_GROUPS = 4  # of channels that share words
_WIDEST_CHUNK = 64


@dataclass(frozen=True, slots=True)
class Int8Tiling:
    """Sizes of one launch.

    ``queries`` (token, head) pairs meet ``keys`` positions a turn. The channels of a word's byte go through in
    ``chunks``, powers of two, of which the last may reach past the end. ``warps`` and ``stages`` are Triton's.
    """

    queries: int
    keys: int
    chunks: tuple[int, ...]
    warps: int
    stages: int


def tiling(head_dim: int) -> Int8Tiling:
    """The sizes for a head dim.

    Raises:
        ContractError: the head dim is none that the kernel takes.
    """
    require(head_dim in HEAD_DIMS, f"head_dim {head_dim} has no tile; this kernel takes {HEAD_DIMS}")
    per_group = chunks(head_dim // _GROUPS, _WIDEST_CHUNK)
    if head_dim > 128:
        return Int8Tiling(128, 16, per_group, 8, 2)
    if head_dim <= 64:
        return Int8Tiling(128, 32, per_group, 4, 2)
    return Int8Tiling(128, 64, per_group, 8, 2)


class _Pool(NamedTuple):
    """The words of all pages, and where those of the layer begin."""

    words_ref: jax.Ref
    in_pool: Array
    kv_heads: int
    page_size: int
    quarter: int

    def scales(self, row: Array, offset: Array, stored: Array | None) -> tuple[Array, Array]:
        """Of the keys and of the values at offsets of pages."""
        place = 2 * self.page_size * self.quarter + offset
        return unpair(DIRECT.load(self.words_ref, (row, place), stored))

    def codes(self, row: Array, line: Array, part: Channels, stored: Array | None) -> Array:
        """The words of a chunk of channels, [keys channels]."""
        place = line[:, None] * self.quarter + part.columns[None, :]
        return DIRECT.load(self.words_ref, (row[:, None], place), part.exists(stored))


def _history(work: Work, pool: _Pool, table_ref: jax.Ref, unpack: Unpack, per_group: tuple[int, ...]) -> Piece:
    """What the row has in pages, by position."""
    queries, size, page_size = work.queries, work.keys, pool.page_size
    key, words = jnp.arange(size, dtype=jnp.int32), channels_of(per_group, pool.quarter)

    def ahead(index: Array) -> State:
        position = index * size + key
        stored = position < queries.held
        offset = position % page_size
        at = position if page_size % size else index * size
        page = DIRECT.load(table_ref, (queries.row, at // page_size), at < queries.held)
        row = jnp.broadcast_to((pool.in_pool + page) * pool.kv_heads + queries.head, key.shape)
        scales = pool.scales(row, offset, stored)
        keys, values = (
            [pool.codes(row, line, part, stored) for part in words] for line in (offset, page_size + offset)
        )
        return *scales, *keys, *values

    def turn(index: Array, known: State, state: State, masked: bool) -> State:
        key_scale, value_scale, *codes = known
        position = index * size + key
        scores: list[Array] = []
        for place, tile in enumerate(codes[: len(words)]):
            for group in range(_GROUPS):
                operand = unpack.signed_byte(tile, group)
                scores.append(product(work.q[group * len(words) + place], operand.T))
        seen = [(position < queries.held)[None, :] & queries.seen(position)] if masked else None

        def sums(weights: list[Array], weighted: list[Array]) -> list[Array]:
            folded, _ = rounded(weights[0] * value_scale[None, :], unpack.dtype)
            found = list(weighted)
            for place, tile in enumerate(codes[len(words) :]):
                for group in range(_GROUPS):
                    found[group * len(words) + place] += product(folded, unpack.signed_byte(tile, group))
            return found

        return work.softmax.turn(state, [sum_of(scores) * key_scale[None, :]], seen, sums)

    begin = jnp.minimum(queries.floor(queries.oldest), queries.held)
    return Piece(Reach(begin, queries.floor(queries.newest), queries.held, queries.held), ahead, turn)


def paged_prefill(
    q: Float[Array, "tokens q_heads head_dim"],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    pages: Int8Pages,
    layer: Int32[Array, ""],
    page_table: Int32[Array, "rows width"],
    slots: Int32[Array, " rows"],
    starts: Int32[Array, " rows"],
    lengths: Int32[Array, " rows"],
    offsets: Int32[Array, " rows"],
    window: Int32[Array, ""],
    begins: Bool[Array, " rows"] | None = None,
    *,
    scale: float,
    softcap: float = 0.0,
    products: str = "float32",
    interpret: bool = False,
    tile: Int8Tiling | None = None,
) -> Float[Array, "tokens q_heads head_dim"] | Partial:
    """See ``op.paged_prefill``; tokens that belong to no row get zeros.

    ``interpret`` runs the kernel on any backend, slowly; ``tile`` replaces the sizes that the head dim would give.

    Raises:
        ContractError: no tile fits this head dim, the query is of a dtype that the kernel does not take, or the scale
            is not positive.
    """
    head_dim = q.shape[2]
    _, num_pages, kv_heads, page_words = pages.words.shape
    require(q.dtype in (jnp.bfloat16, jnp.float32), f"q is {q.dtype}; this kernel takes bf16 and float32")
    require(scale > 0, f"scale {scale} is not positive, which this kernel needs to find the largest score")
    tile, quarter, softmax = tile or tiling(head_dim), head_dim // _GROUPS, Softmax(scale, softcap)
    page_size = int8_page_size(page_words, head_dim)

    def kernel(common: Common, pool_refs: tuple[jax.Ref, ...], results: Results) -> None:
        # FLOPs: 4 * queries * keys * head_dim a turn. Bytes: keys * (2 * head_dim + 4), which the tiles of a head find
        # in L2 after the first. Bound by the tensor cores, and by unpacking codes for few queries.
        words_ref, constants_ref = pool_refs
        group, rows = common.q.shape[0] // common.k.shape[0], common.table.shape[0]
        find = functools.partial(find_queries, common.plan, common.window, rows, kv_heads, group, tile.queries)
        queries = find()
        channels = [part for index in range(_GROUPS) for part in channels_of(tile.chunks, quarter, index * quarter)]
        q_parts = [part.load(common.q, queries.matrix_row, queries.real) for part in channels]
        work = Work(tile.keys, softmax, queries, channels, channels, q_parts)
        in_pool = DIRECT.load(common.layer, ()) * num_pages
        words = _Pool(words_ref, in_pool, kv_heads, page_size, quarter)
        unpack = unpacker(constants_ref, common.q.dtype, DIRECT)
        state = nothing(tile.queries, channels)
        state = through(_history(work, words, common.table, unpack, tile.chunks), tile.keys, state)
        counts = DIRECT.load(common.begins, (queries.row,), queries.row < rows)
        state = through(chunk_piece(work, common.k, common.v, kv_heads, counts), tile.keys, state)
        store(*results, find(), state, channels)

    return launch(
        kernel, "paged_prefill_int8", q, k, v, (pages.words.reshape(-1, page_words), jnp.array(CONSTANTS, jnp.int32)),
        layer, Rows(page_table, slots, starts, lengths, offsets), starts, window, begins,
        tile=tile, products=products, interpret=interpret,
    )  # fmt: skip
