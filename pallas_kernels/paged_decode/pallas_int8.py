"""paged_decode of int8 pools by a Triton kernel: codes meet the query as they are, scales go into scores and weights.

Owns the kernel and the sizes of its tiles. The four channel groups that share words are four products each way.
Source: the sums of ``kv_int8``; split-K as in FlashDecoding.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.access import DIRECT, Access
from pallas_kernels.bits import unpair
from pallas_kernels.errors import require
from pallas_kernels.kv_layout import int8_page_size
from pallas_kernels.operands import CONSTANTS, chunks, product, rounded, unpacker
from pallas_kernels.paged_decode.beside import finished, in_window
from pallas_kernels.paged_decode.stretches import (
    FLOOR,
    Shares,
    Softmax,
    columns,
    over_stretches,
    shares,
)
from pallas_kernels.pages import Int8Pages
from pallas_kernels.softmax import Partial

HEAD_DIMS = (8, 16, 32, 64, 80, 96, 128, 256)
"""Head dims whose tiles are known to fit."""

_GROUPS = 4  # of channels that share words
_WIDEST_CHUNK = 64
_PROGRAMS_PER_MULTIPROCESSOR = 8  # four that run at once, in two waves


@dataclass(frozen=True, slots=True)
class Int8Tiling:
    """Sizes of one launch.

    The channels of a word's byte go through in ``chunks``, powers of two, of which the last may reach past the end.
    ``warps`` and ``stages`` are Triton's.
    """

    shares: Shares
    chunks: tuple[int, ...]
    warps: int
    stages: int


def tiling(slots: int, q_heads: int, kv_heads: int, head_dim: int, context: int) -> Int8Tiling:
    """The sizes for a launch over at most ``context`` positions a slot.

    Raises:
        ContractError: the head dim is none that the kernel takes.
    """
    require(head_dim in HEAD_DIMS, f"head_dim {head_dim} has no tile; this kernel takes {HEAD_DIMS}")
    positions = 64 if head_dim <= 128 else 32
    return Int8Tiling(
        shares=shares(
            slots,
            q_heads,
            kv_heads,
            head_dim,
            context=context,
            positions=positions,
            turn_bytes=positions * (2 * head_dim + 4),
            per_multiprocessor=_PROGRAMS_PER_MULTIPROCESSOR,
        ),
        chunks=chunks(head_dim // _GROUPS, _WIDEST_CHUNK),
        warps=2,
        stages=2,
    )


def _kernel(
    layer_ref: jax.Ref,  # [] int32
    window_ref: jax.Ref,  # [] int32
    lengths_ref: jax.Ref,  # [slots] int32
    table_ref: jax.Ref,  # [slots width] int32
    q_ref: jax.Ref,  # [slots*q_heads head_dim] bf16, float32 in interpreted tests
    words_ref: jax.Ref,  # [layers*num_pages*kv_heads page_words] int32, all in global memory
    constants_ref: jax.Ref,  # [2] int32, ``operands.CONSTANTS``
    weighted_ref: jax.Ref,  # [slots*kv_heads*splits*group head_dim] float32
    peak_ref: jax.Ref,  # [slots*kv_heads*splits*group] float32
    total_ref: jax.Ref,  # [slots*kv_heads*splits*group] float32
    *,
    pool: tuple[int, ...],
    head_dim: int,
    tile: Int8Tiling,
    softmax: Softmax,
    access: Access,
) -> None:
    # Bytes: every word of the stretch once, 2 * head_dim + 4 a position. FLOPs: 4 * rows * positions * head_dim, of
    # which group / rows count. Bound by memory.
    _, num_pages, kv_heads, page_words = pool
    page_size, group = int8_page_size(page_words, head_dim), q_ref.shape[0] // (table_ref.shape[0] * kv_heads)
    share, quarter = tile.shares, head_dim // _GROUPS
    at = share.program(group)
    length = access.load(lengths_ref, (at.slot,))
    first = in_window(length, access.load(window_ref, ()))
    begin, stop = share.turns(first, length, at.split)
    unpack, chunk_columns = unpacker(constants_ref, q_ref.dtype, access), columns(tile.chunks)
    q = [
        [at.query(q_ref, part * quarter + column, column < quarter, access) for column in chunk_columns]
        for part in range(_GROUPS)
    ]
    in_pool = access.load(layer_ref, ()) * num_pages
    t = jnp.arange(share.positions, dtype=jnp.int32)

    def page_of(index: Array) -> Array:
        """Of a turn, or of each of its positions where a page is smaller."""
        if page_size % share.positions == 0:
            return access.load(table_ref, (at.slot, index * share.positions // page_size), index < stop)
        position = index * share.positions + t
        return access.load(table_ref, (at.slot, position // page_size), position < length)

    def turn(index: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
        page, peak, total, *weighted = state
        position = index * share.positions + t
        seen, offset = (position >= first) & (position < length), position % page_size
        page_row = jnp.broadcast_to((in_pool + page) * kv_heads + at.head, t.shape)
        key_scale, value_scale = unpair(access.load(words_ref, (page_row, 2 * page_size * quarter + offset), seen))
        scores = jnp.zeros((share.positions, share.rows), jnp.float32)
        for place, column in enumerate(chunk_columns):
            mask = seen[:, None] & (column < quarter)[None, :]
            words = access.load(words_ref, (page_row[:, None], offset[:, None] * quarter + column[None, :]), mask)
            for part in range(_GROUPS):
                scores += product(unpack.signed_byte(words, part), q[part][place])
        scores *= (key_scale * softmax.factor)[:, None]
        peak, factor, (weights,) = softmax.weigh([scores], [seen], peak)
        total = total * factor + weights.sum(axis=0)
        folded, _ = rounded(weights * value_scale[:, None], unpack.dtype)
        weighted = [part * factor[None, :] for part in weighted]
        for place, column in enumerate(chunk_columns):
            mask = (column < quarter)[:, None] & seen[None, :]
            value_row = (page_size + offset) * quarter
            words = access.load(words_ref, (page_row[None, :], value_row[None, :] + column[:, None]), mask)
            for part in range(_GROUPS):
                weighted[_GROUPS * place + part] += product(unpack.signed_byte(words, part), folded)
        return page_of(index + 1), peak, total, *weighted

    state = (
        page_of(begin),
        jnp.full((share.rows,), FLOOR, jnp.float32),
        jnp.zeros((share.rows,), jnp.float32),
        *(jnp.zeros((size, share.rows), jnp.float32) for size in tile.chunks for _ in range(_GROUPS)),
    )
    _, peak, total, *weighted = jax.lax.fori_loop(begin, stop, turn, state)
    channels = [(part * quarter + column, column < quarter) for column in chunk_columns for part in range(_GROUPS)]
    at.store((weighted_ref, peak_ref, total_ref), (peak, total, weighted), channels, access)


def paged_decode(
    q: Float[Array, "slots q_heads head_dim"],
    k: Float[Array, "slots kv_heads head_dim"],
    v: Float[Array, "slots kv_heads head_dim"],
    pages: Int8Pages,
    layer: Int32[Array, ""],
    page_table: Int32[Array, "slots width"],
    lengths: Int32[Array, " slots"],
    window: Int32[Array, ""],
    begins: Bool[Array, " slots"] | None = None,
    *,
    scale: float,
    softcap: float = 0.0,
    interpret: bool = False,
    tile: Int8Tiling | None = None,
    access: Access = DIRECT,
) -> Float[Array, "slots q_heads head_dim"] | Partial:
    """See ``op.paged_decode``.

    ``interpret`` runs the kernel on any backend, slowly; ``tile`` replaces the sizes that the shapes would give;
    ``access`` lets a caller watch what is read and written. Sums are made of operands of q's dtype.

    Raises:
        ContractError: no tile fits this head dim, the query is of a dtype that the kernel does not take, or the scale
            is not positive.
    """
    slots, q_heads, head_dim = q.shape
    _, _, kv_heads, page_words = pages.words.shape
    require(q.dtype in (jnp.bfloat16, jnp.float32), f"q is {q.dtype}; this kernel takes bf16 and float32")
    require(scale > 0, f"scale {scale} is not positive")
    context = page_table.shape[1] * int8_page_size(page_words, head_dim)
    tile = tile or tiling(slots, q_heads, kv_heads, head_dim, context)
    group = q_heads // kv_heads
    weighted, peak, total = pl.pallas_call(
        functools.partial(
            _kernel,
            pool=pages.words.shape,
            head_dim=head_dim,
            tile=tile,
            softmax=Softmax(scale, softcap),
            access=access,
        ),
        out_shape=tile.shares.partials(slots, kv_heads, group, head_dim),
        grid=tile.shares.grid(slots, kv_heads, group),
        compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
        name="paged_decode_int8",
    )(
        layer,
        window,
        lengths,
        page_table,
        q.reshape(slots * q_heads, head_dim),
        pages.words.reshape(-1, page_words),
        jnp.array(CONSTANTS, jnp.int32),
    )
    paged = over_stretches(weighted, peak, total, (slots, kv_heads, tile.shares.splits, group))
    return finished(paged, q, k, v, pages, layer, lengths, window, begins, scale=scale, softcap=softcap)
