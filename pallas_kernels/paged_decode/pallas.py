"""paged_decode by a Triton kernel: each program attends to a stretch of one slot's history, XLA merges the stretches.

Owns the kernel and the sizes of its tiles. Reads float pages (bf16 on a GPU; float32 pages are for interpreted tests).
Source: split-K decoding and its merge by log-sum-exp as in FlashDecoding; grouped heads share a tile as in arXiv
2305.13245; online softmax, arXiv 1805.02867.
"""

import functools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.access import DIRECT, Access
from pallas_kernels.card import MULTIPROCESSORS
from pallas_kernels.errors import require
from pallas_kernels.operands import product
from pallas_kernels.paged_decode.beside import finished, in_window
from pallas_kernels.paged_decode.stretches import columns, over_stretches
from pallas_kernels.softmax import MASKED, Partial, capped

HEAD_DIMS = (8, 16, 32, 64, 80, 96, 128, 256)
"""Head dims whose tiles are known to fit."""
MAX_QUERIES = 8192
"""Most that the query heads of a key/value head, rounded up to a power of two, may have in channels all together."""
_LEAST_ROWS = 16  # of an operand of the tensor cores
_NARROWEST_CHUNK = 32  # four warps share its columns, eight each; in a narrower one they repeat each other's work
_WIDEST_CHUNK = 128
_STAGES = 5  # the page id takes two of them, so that two tiles of keys and values are in flight
_PROGRAMS_PER_MULTIPROCESSOR = 4  # two that run at once, in two waves
_POSITIONS_PER_ROW = 40  # in a stretch: its partial sums are then 5 % of the keys and values that it reads


@dataclass(frozen=True, slots=True)
class Tiling:
    """Sizes of one launch.

    ``rows`` query heads (padded) meet ``positions`` keys a turn; channels go through in ``chunks``, powers of two, of
    which the last may reach past the head dim; ``splits`` programs share the history of a slot, ``least_tiles`` or more
    turns each; ``warps`` and ``stages`` are Triton's.
    """

    rows: int
    positions: int
    chunks: tuple[int, ...]
    splits: int
    least_tiles: int
    warps: int
    stages: int


def tiling(slots: int, q_heads: int, kv_heads: int, head_dim: int, context: int) -> Tiling:
    """The sizes for a launch over at most ``context`` positions a slot.

    Raises:
        ContractError: the head dim or the number of heads that share a key/value head is none that the kernel takes.
    """
    group = q_heads // kv_heads
    require(head_dim in HEAD_DIMS, f"head_dim {head_dim} has no tile; this kernel takes {HEAD_DIMS}")
    rows = max(_LEAST_ROWS, pl.next_power_of_2(group))
    most_rows = MAX_QUERIES // max(head_dim, 64)
    require(
        rows <= most_rows, f"{group} query heads of {head_dim} channels share a key/value head; at most {most_rows} may"
    )
    positions = 64 if head_dim <= 64 and rows <= 32 else 32
    least = max(1, pl.cdiv(_POSITIONS_PER_ROW * group, positions))
    wanted = pl.cdiv(_PROGRAMS_PER_MULTIPROCESSOR * MULTIPROCESSORS, slots * kv_heads)
    most = max(1, pl.cdiv(context, least * positions))
    return Tiling(
        rows=rows,
        positions=positions,
        chunks=channel_chunks(head_dim, rows),
        splits=min(wanted, most),
        least_tiles=least,
        warps=8 if rows >= 64 or rows * head_dim >= MAX_QUERIES else 4,
        stages=_STAGES if rows * head_dim < MAX_QUERIES or head_dim < 256 else _STAGES - 2,
    )


def channel_chunks(head_dim: int, rows: int) -> tuple[int, ...]:
    """``head_dim`` as powers of two, largest first; with many rows as few as there can be, for they cost registers."""
    chunks: list[int] = []
    while (left := head_dim - sum(chunks)) > 0:
        power = 1 << (left.bit_length() - 1) if rows == _LEAST_ROWS else pl.next_power_of_2(left)
        chunks.append(max(_NARROWEST_CHUNK, min(_WIDEST_CHUNK, power)))
    return tuple(chunks)


def _kernel(
    layer_ref: jax.Ref,  # [] int32
    window_ref: jax.Ref,  # [] int32
    lengths_ref: jax.Ref,  # [slots] int32
    table_ref: jax.Ref,  # [slots width] int32
    q_ref: jax.Ref,  # [slots*q_heads head_dim] of the pages' dtype
    pages_ref: jax.Ref,  # [layers*num_pages*kv_heads*2*page_size head_dim], all in global memory
    weighted_ref: jax.Ref,  # [slots*kv_heads*splits*group head_dim] float32
    peak_ref: jax.Ref,  # [slots*kv_heads*splits*group] float32
    total_ref: jax.Ref,  # [slots*kv_heads*splits*group] float32
    *,
    pool: tuple[int, ...],
    tile: Tiling,
    scale: float,
    softcap: float,
    access: Access,
) -> None:
    # Bytes: every key and value of the stretch once, 4 * positions * head_dim in bf16. FLOPs: 4 * rows * positions *
    # head_dim, of which group / rows count. Bound by memory: 16 rows are 16 FLOPs a byte, an A100 does 153.
    _, num_pages, kv_heads, _, page_size, head_dim = pool
    group = q_ref.shape[0] // (table_ref.shape[0] * kv_heads)
    split, head, slot = (pl.program_id(axis) for axis in range(3))
    length = access.load(lengths_ref, (slot,))
    first, begin, end = _stretch(length, access.load(window_ref, ()), split, tile)
    row = jnp.arange(tile.rows, dtype=jnp.int32)
    real = row < group
    channels = columns(tile.chunks)
    mask = functools.partial(_mask, head_dim=head_dim)
    q_row = ((slot * kv_heads + head) * group + row)[:, None]
    q = [access.load(q_ref, (q_row, chunk[None, :]), mask(real, chunk)) for chunk in channels]
    in_pool = access.load(layer_ref, ()) * num_pages

    def turn(index: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
        peak, total, *weighted = state
        position = index * tile.positions + jnp.arange(tile.positions, dtype=jnp.int32)
        valid = (position >= first) & (position < length)
        if page_size % tile.positions:
            page = access.load(table_ref, (slot, position // page_size), valid)
        else:
            page = access.load(table_ref, (slot, index * tile.positions // page_size))
        key_row = (((in_pool + page) * kv_heads + head) * 2 * page_size + position % page_size)[:, None]
        scores = jnp.zeros((tile.rows, tile.positions), jnp.float32)
        for part, chunk in zip(q, channels, strict=True):
            keys = access.load(pages_ref, (key_row, chunk[None, :]), mask(valid, chunk))
            scores += product(part, keys.T)
        scores = jnp.where(valid[None, :], capped(scores * scale, softcap) * math.log2(math.e), MASKED)
        higher = jnp.maximum(peak, scores.max(axis=1))
        factor = jnp.exp2(peak - higher)
        weights = jnp.where(valid[None, :], jnp.exp2(scores - higher[:, None]), 0.0)
        total = total * factor + weights.sum(axis=1)
        for place, chunk in enumerate(channels):
            values = access.load(pages_ref, (key_row + page_size, chunk[None, :]), mask(valid, chunk))
            weighted[place] = weighted[place] * factor[:, None] + product(weights.astype(values.dtype), values)
        return higher, total, *weighted

    state = (
        jnp.full((tile.rows,), MASKED, jnp.float32),
        jnp.zeros((tile.rows,), jnp.float32),
        *(jnp.zeros((tile.rows, size), jnp.float32) for size in tile.chunks),
    )
    peak, total, *weighted = jax.lax.fori_loop(begin, end, turn, state)
    out_row = ((slot * kv_heads + head) * tile.splits + split) * group + row
    access.store(peak_ref, (out_row,), peak * math.log(2), real)
    access.store(total_ref, (out_row,), total, real)
    for part, chunk in zip(weighted, channels, strict=True):
        access.store(weighted_ref, (out_row[:, None], chunk[None, :]), part, mask(real, chunk))


def _stretch(length: Array, window: Array, split: Array, tile: Tiling) -> tuple[Array, Array, Array]:
    """The first position that counts, and the tiles, from and up to, that a program goes through."""
    first = in_window(length, window)
    first_tile, end_tile = first // tile.positions, pl.cdiv(length, tile.positions)
    share = jnp.maximum(pl.cdiv(end_tile - first_tile, tile.splits), tile.least_tiles)
    begin = first_tile + split * share
    return first, begin, jnp.minimum(begin + share, end_tile)


def _mask(rows: Array, columns: Array, head_dim: int) -> Array:
    """Which elements of a tile exist."""
    return rows[:, None] & (columns < head_dim)[None, :]


def paged_decode(
    q: Float[Array, "slots q_heads head_dim"],
    k: Float[Array, "slots kv_heads head_dim"],
    v: Float[Array, "slots kv_heads head_dim"],
    pages: Float[Array, "layers num_pages kv_heads 2 page_size head_dim"],
    layer: Int32[Array, ""],
    page_table: Int32[Array, "slots width"],
    lengths: Int32[Array, " slots"],
    window: Int32[Array, ""],
    begins: Bool[Array, " slots"] | None = None,
    *,
    scale: float,
    softcap: float = 0.0,
    interpret: bool = False,
    tile: Tiling | None = None,
    access: Access = DIRECT,
) -> Float[Array, "slots q_heads head_dim"] | Partial:
    """See ``op.paged_decode``.

    ``interpret`` runs the kernel on any backend, slowly; ``tile`` replaces the sizes that the shapes would give;
    ``access`` lets a caller watch what is read and written.

    Raises:
        ContractError: no tile fits these heads, or the pages are of a dtype that the kernel does not take.
    """
    slots, q_heads, head_dim = q.shape
    kv_heads, page_size = pages.shape[2], pages.shape[4]
    group = q_heads // kv_heads
    require(pages.dtype in (jnp.bfloat16, jnp.float32), f"pages are {pages.dtype}; this kernel takes bf16 and float32")
    tile = tile or tiling(slots, q_heads, kv_heads, head_dim, page_table.shape[1] * page_size)
    rows = slots * kv_heads * tile.splits * group
    float32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    weighted, peak, total = pl.pallas_call(
        functools.partial(_kernel, pool=pages.shape, tile=tile, scale=scale, softcap=softcap, access=access),
        out_shape=(float32((rows, head_dim)), float32((rows,)), float32((rows,))),
        grid=(tile.splits, kv_heads, slots),
        compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
        name="paged_decode",
    )(
        layer,
        window,
        lengths,
        page_table,
        q.reshape(slots * q_heads, head_dim).astype(pages.dtype),
        pages.reshape(-1, head_dim),
    )
    paged = over_stretches(weighted, peak, total, (slots, kv_heads, tile.splits, group))
    return finished(paged, q, k, v, pages, layer, lengths, window, begins, scale=scale, softcap=softcap)
