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
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.access import DIRECT
from pallas_kernels.bits import unpair
from pallas_kernels.errors import require
from pallas_kernels.kv_layout import int8_page_size
from pallas_kernels.operands import CONSTANTS, Unpack, chunks, product, rounded, sum_of, unpacker
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
    plan_of,
    store,
    through,
)
from pallas_kernels.pages import Int8Pages

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
        stored = position < queries.start
        offset = position % page_size
        at = position if page_size % size else index * size
        page = DIRECT.load(table_ref, (queries.row, at // page_size), at < queries.start)
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
        seen = [(position < queries.start)[None, :] & queries.seen(position)] if masked else None

        def sums(weights: list[Array], weighted: list[Array]) -> list[Array]:
            folded, _ = rounded(weights[0] * value_scale[None, :], unpack.dtype)
            found = list(weighted)
            for place, tile in enumerate(codes[len(words) :]):
                for group in range(_GROUPS):
                    found[group * len(words) + place] += product(folded, unpack.signed_byte(tile, group))
            return found

        return work.softmax.turn(state, [sum_of(scores) * key_scale[None, :]], seen, sums)

    begin = jnp.minimum(queries.floor(queries.oldest), queries.start)
    return Piece(Reach(begin, queries.floor(queries.newest), queries.start, queries.start), ahead, turn)


def _kernel(
    plan_ref: jax.Ref,  # [5 tiles] int32
    layer_ref: jax.Ref,  # [] int32
    window_ref: jax.Ref,  # [] int32
    table_ref: jax.Ref,  # [rows width] int32
    q_ref: jax.Ref,  # [tokens*q_heads head_dim] of the operands' dtype
    k_ref: jax.Ref,  # [tokens*kv_heads head_dim] of the operands' dtype
    v_ref: jax.Ref,  # [tokens*kv_heads head_dim] of the operands' dtype
    words_ref: jax.Ref,  # [layers*num_pages*kv_heads page_words] int32, all in global memory
    constants_ref: jax.Ref,  # [2] int32, ``operands.CONSTANTS``
    out_ref: jax.Ref,  # [tokens*q_heads head_dim]
    *,
    pool: tuple[int, ...],
    tile: Int8Tiling,
    softmax: Softmax,
) -> None:
    # FLOPs: 4 * queries * keys * head_dim a turn. Bytes: keys * (2 * head_dim + 4), which the tiles of a head find in
    # L2 after the first. Bound by the tensor cores, and by unpacking codes for few queries.
    _, num_pages, kv_heads, page_words = pool
    (tokens_heads, head_dim), quarter = q_ref.shape, q_ref.shape[1] // _GROUPS
    group = tokens_heads // k_ref.shape[0]
    find = functools.partial(find_queries, plan_ref, window_ref, table_ref.shape[0], kv_heads, group, tile.queries)
    queries = find()
    channels = [part for index in range(_GROUPS) for part in channels_of(tile.chunks, quarter, index * quarter)]
    q = [part.load(q_ref, queries.matrix_row, queries.real) for part in channels]
    work = Work(tile.keys, softmax, queries, channels, channels, q)
    in_pool = DIRECT.load(layer_ref, ()) * num_pages
    words = _Pool(words_ref, in_pool, kv_heads, int8_page_size(page_words, head_dim), quarter)
    unpack = unpacker(constants_ref, q_ref.dtype, DIRECT)
    state = nothing(tile.queries, channels)
    state = through(_history(work, words, table_ref, unpack, tile.chunks), tile.keys, state)
    state = through(chunk_piece(work, k_ref, v_ref, kv_heads), tile.keys, state)
    store(out_ref, find(), state, channels)


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
    *,
    scale: float,
    softcap: float = 0.0,
    products: str = "float32",
    interpret: bool = False,
    tile: Int8Tiling | None = None,
) -> Float[Array, "tokens q_heads head_dim"]:
    """See ``op.paged_prefill``; tokens that belong to no row get zeros.

    ``interpret`` runs the kernel on any backend, slowly; ``tile`` replaces the sizes that the head dim would give.

    Raises:
        ContractError: no tile fits this head dim, the query is of a dtype that the kernel does not take, or the scale
            is not positive.
    """
    del slots
    tokens, q_heads, head_dim = q.shape
    _, _, kv_heads, page_words = pages.words.shape
    require(q.dtype in (jnp.bfloat16, jnp.float32), f"q is {q.dtype}; this kernel takes bf16 and float32")
    require(scale > 0, f"scale {scale} is not positive, which this kernel needs to find the largest score")
    tile = tile or tiling(head_dim)
    plan = plan_of(starts, lengths, offsets, tokens, q_heads // kv_heads, tile.queries)
    operands = jnp.bfloat16 if products == "bf16" else q.dtype
    out = pl.pallas_call(
        functools.partial(_kernel, pool=pages.words.shape, tile=tile, softmax=Softmax(scale, softcap)),
        out_shape=jax.ShapeDtypeStruct((tokens * q_heads, head_dim), q.dtype),
        grid=(plan.row.shape[0], kv_heads),
        compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
        name="paged_prefill_int8",
    )(
        jnp.stack(plan),
        layer,
        window,
        page_table,
        *(part.reshape(-1, head_dim).astype(operands) for part in (q, k, v)),
        pages.words.reshape(-1, page_words),
        jnp.array(CONSTANTS, jnp.int32),
    )
    return out.reshape(q.shape)
