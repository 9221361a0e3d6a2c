"""paged_prefill by a Triton kernel: each program takes a tile of one row's queries through its pages and its chunk.

Owns the kernel and the sizes of its tiles. Reads float pages (bf16 on a GPU; float32 pages are for interpreted tests).
A tile packs (token, query head) pairs of one key/value head, so that every head that shares keys shares their loads.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.access import DIRECT
from pallas_kernels.card import MULTIPROCESSORS
from pallas_kernels.errors import require
from pallas_kernels.paged_prefill.launch import Common, Results, launch
from pallas_kernels.paged_prefill.pieces import (
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
from pallas_kernels.pages import Pages, kind
from pallas_kernels.rows import Rows
from pallas_kernels.softmax import Partial

LEAST_HEAD_DIM, MOST_HEAD_DIM = 8, 256

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


def _history(work: Work, pages_ref: jax.Ref, table_ref: jax.Ref, layer_ref: jax.Ref, pool: tuple[int, ...]) -> Piece:
    """What the row has in pages, by position."""
    _, num_pages, kv_heads, _, page_size, _ = pool
    queries, size = work.queries, work.keys
    in_pool = DIRECT.load(layer_ref, ()) * num_pages

    key = jnp.arange(size, dtype=jnp.int32)

    def page_of(index: Array) -> State:
        position = index * size + key if page_size % size else index * size
        return (DIRECT.load(table_ref, (queries.row, position // page_size), position < queries.held),)

    def turn(index: Array, known: State, state: State, masked: bool) -> State:
        (page,) = known
        position = index * size + key
        stored = position < queries.held if masked else None
        place = ((in_pool + page) * kv_heads + queries.head) * 2 * page_size + position % page_size
        seen = None if stored is None else stored[None, :] & queries.seen(position)
        return work.turn(state, (pages_ref, place), (pages_ref, place + page_size), stored, seen)

    begin = jnp.minimum(queries.floor(queries.oldest), queries.held)
    return Piece(Reach(begin, queries.floor(queries.newest), queries.held, queries.held), page_of, turn)


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
    begins: Bool[Array, " rows"] | None = None,
    *,
    scale: float,
    softcap: float = 0.0,
    products: str = "float32",
    interpret: bool = False,
    tile: Tiling | None = None,
) -> Float[Array, "tokens q_heads head_dim"] | Partial:
    """See ``op.paged_prefill``; tokens that belong to no row get zeros.

    ``interpret`` runs the kernel on any backend, slowly; ``tile`` replaces the sizes that the shapes would give.

    Raises:
        ContractError: no tile fits this head dim, the scale is not positive, or the pages are of a dtype that the
            kernel does not take.
    """
    require(
        isinstance(pages, jax.Array) and pages.dtype in (jnp.bfloat16, jnp.float32),
        f"pages are {kind(pages)}; this kernel takes bf16 and float32",
    )
    require(scale > 0, f"scale {scale} is not positive, which this kernel needs to find the largest score")
    rows = Rows(page_table, slots, starts, lengths, offsets)
    return attend(
        q, k, v, pages, layer, rows, starts, window, begins,
        softmax=Softmax(scale, softcap), products=products, interpret=interpret, tile=tile,
    )  # fmt: skip


def attend(
    q: Float[Array, "tokens q_heads head_dim"],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    pages: Float[Array, "layers num_pages kv_heads 2 page_size head_dim"],
    layer: Int32[Array, ""],
    rows: Rows,
    held: Int32[Array, " rows"],
    window: Int32[Array, ""],
    begins: Bool[Array, " rows"] | None,
    *,
    softmax: Softmax,
    products: str,
    interpret: bool,
    tile: Tiling | None = None,
) -> Float[Array, "tokens q_heads head_dim"] | Partial:
    """The launch over float pages that hold ``held`` positions of each row's table, whatever the rows' starts are."""
    tokens, q_heads, head_dim = q.shape
    kv_heads = pages.shape[2]
    tile = tile or tiling(tokens, q_heads, kv_heads, head_dim)
    pool = pages.shape

    def kernel(common: Common, pages_ref: tuple[jax.Ref, ...], results: Results) -> None:
        # FLOPs: 4 * queries * keys * head_dim a turn. Bytes: 4 * keys * head_dim in bf16, which the tiles of a head
        # find in L2 after the first. Bound by the tensor cores: 128 queries are 128 FLOPs a byte even where none is.
        group = common.q.shape[0] // common.k.shape[0]
        num_rows = common.table.shape[0]
        find = functools.partial(find_queries, common.plan, common.window, num_rows, kv_heads, group, tile.queries)
        queries, channels = find(), channels_of(tile.chunks, head_dim)
        q_parts = [part.load(common.q, queries.matrix_row, queries.real) for part in channels]
        work = Work(tile.keys, softmax, queries, channels, channels, q_parts)
        state = nothing(tile.queries, channels)
        state = through(_history(work, *pages_ref, common.table, common.layer, pool), tile.keys, state)
        counts = DIRECT.load(common.begins, (queries.row,), queries.row < num_rows)
        state = through(chunk_piece(work, common.k, common.v, kv_heads, counts), tile.keys, state)
        store(*results, find(), state, channels)

    return launch(
        kernel, "paged_prefill", q, k, v, (pages.reshape(-1, head_dim),), layer, rows, held, window, begins,
        tile=tile, products=products, interpret=interpret,
    )  # fmt: skip
