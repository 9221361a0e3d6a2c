"""paged_prefill through XLA: triangular tiles inside the chunk, a loop over (row, query tile, key block) for history.

The tiles inside the chunk are static and skip what lies above the diagonal. The history loop runs only as often as
there is history: a launch of fresh prompts pays nothing for it.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.pages import Pages, fetch, in_pages, pool_shape, recent, turned_back
from pallas_kernels.rows import Places, Rows, places
from pallas_kernels.softmax import Partial, capped, empty, finish, merge, weigh, where

QUERY_TILE = 128
KEY_BLOCK = 512


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
    products: str,
) -> Float[Array, "tokens q_heads head_dim"] | Partial:
    """See ``op.paged_prefill``."""
    tokens, q_heads, head_dim = q.shape
    wanted = q.dtype
    if products == "bf16" and wanted == jnp.float32:
        q, k, v = (part.astype(jnp.bfloat16) for part in (q, k, v))
    kv_heads = k.shape[1]
    group = q_heads // kv_heads
    # kv_heads leads, so that each product is one batch of large matrices
    grouped = (q.astype(jnp.float32) * scale).astype(q.dtype).reshape(tokens, kv_heads, group, head_dim)
    grouped = jnp.moveaxis(grouped, 0, 2)  # kv_heads group tokens head_dim
    rows = Rows(page_table, slots, starts, lengths, offsets)
    at = places(rows, tokens)
    own = _inside_chunk(grouped, k, v, at, window, softcap)
    if begins is not None:
        own = where(begins[at.row] & at.valid, own, empty(own.peak.shape, head_dim))
    merged = _history(own, grouped, pages, layer, rows, window, begins, softcap)
    if begins is not None:
        return Partial(*(jnp.moveaxis(part, 2, 0).reshape(tokens, q_heads, *part.shape[3:]) for part in merged))
    out = finish(merged)  # kv_heads group tokens head_dim
    return jnp.moveaxis(out, 2, 0).reshape(tokens, q_heads, head_dim).astype(wanted)


def _attend(
    queries: Float[Array, "kv_heads group queries head_dim"],
    keys: Float[Array, "kv_heads keys head_dim"],
    values: Float[Array, "kv_heads keys head_dim"],
    valid: Bool[Array, "queries keys"],
    softcap: float,
) -> Partial:
    kv_heads, group, num_queries, head_dim = queries.shape
    flat = queries.reshape(kv_heads, group * num_queries, head_dim)
    scores = jnp.einsum("knd,ktd->knt", flat, keys, preferred_element_type=jnp.float32)
    scores = capped(scores.reshape(kv_heads, group, num_queries, -1), softcap)
    peak, total, weights = weigh(scores, valid)
    flat_weights = weights.reshape(kv_heads, group * num_queries, -1).astype(values.dtype)
    weighted = jnp.einsum("knt,ktd->knd", flat_weights, values, preferred_element_type=jnp.float32)
    return Partial(peak, total, weighted.reshape(kv_heads, group, num_queries, head_dim))


def _inside_chunk(
    grouped: Float[Array, "kv_heads group tokens head_dim"],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    at: Places,
    window: Int32[Array, ""],
    softcap: float,
) -> Partial:
    tokens = k.shape[0]
    keys, values = jnp.moveaxis(k, 1, 0), jnp.moveaxis(v, 1, 0)
    row, position = jnp.where(at.valid, at.row, -1), at.position
    tiles = []
    for first in range(0, tokens, QUERY_TILE):
        last = min(first + QUERY_TILE, tokens)
        valid = (row[first:last, None] == row[None, :last]) & (position[None, :last] <= position[first:last, None])
        valid &= (window <= 0) | (position[None, :last] > position[first:last, None] - window)
        tiles.append(_attend(grouped[:, :, first:last], keys[:, :last], values[:, :last], valid, softcap))
    return Partial(*(jnp.concatenate(parts, axis=2) for parts in zip(*tiles, strict=True)))


def _history(
    own: Partial,
    grouped: Float[Array, "kv_heads group tokens head_dim"],
    pages: Pages,
    layer: Int32[Array, ""],
    rows: Rows,
    window: Int32[Array, ""],
    begins: Bool[Array, " rows"] | None,
    softcap: float,
) -> Partial:
    tokens = grouped.shape[2]
    tile = min(QUERY_TILE, tokens)
    # a row's last tile may reach past the end: pad, so that a dynamic slice never slides back
    padded = jnp.pad(grouped, ((0, 0), (0, 0), (0, tile), (0, 0)))
    wide = Partial(*(jnp.pad(part, ((0, 0), (0, 0), (0, tile)) + ((0, 0),) * (part.ndim - 3)) for part in own))
    tiles_of_row = jnp.where(rows.starts > 0, (rows.lengths + tile - 1) // tile, 0)
    last_tile = jnp.cumsum(tiles_of_row)

    def one_tile(item: Int32[Array, ""], state: Partial) -> Partial:
        row = jnp.sum(item >= last_tile, dtype=jnp.int32)
        local = (item - (last_tile[row] - tiles_of_row[row])) * tile
        first = rows.offsets[row] + local
        queries = jax.lax.dynamic_slice_in_dim(padded, first, tile, axis=2)
        position = rows.starts[row] + local + jnp.arange(tile)
        in_row = local + jnp.arange(tile) < rows.lengths[row]
        found = _over_pages(queries, position, in_row, pages, layer, rows, row, window, begins, softcap)
        if (near := _recent(queries, position, in_row, pages, layer, rows, row, window, begins, softcap)) is not None:
            found = merge(found, near)
        before = Partial(*(jax.lax.dynamic_slice_in_dim(part, first, tile, axis=2) for part in state))
        after = merge(before, found)
        return Partial(
            *(
                jax.lax.dynamic_update_slice_in_dim(whole, part, first, axis=2)
                for whole, part in zip(state, after, strict=True)
            )
        )

    wide = jax.lax.fori_loop(0, last_tile[-1], one_tile, wide)
    return Partial(*(part[:, :, :tokens] for part in wide))


def _over_pages(
    queries: Float[Array, "kv_heads group tile head_dim"],
    position: Int32[Array, " tile"],
    in_row: Bool[Array, " tile"],
    pages: Pages,
    layer: Int32[Array, ""],
    rows: Rows,
    row: Int32[Array, ""],
    window: Int32[Array, ""],
    begins: Bool[Array, " rows"] | None,
    softcap: float,
) -> Partial:
    shape = pool_shape(pages, queries.shape[3])
    kv_heads, page_size, head_dim = shape.kv_heads, shape.page_size, shape.head_dim
    table = rows.page_table[row]
    first_stored, end_stored = (bound[0] for bound in in_pages(pages, rows.starts[row][None], _of_row(begins, row)))
    block_pages = min(max(1, KEY_BLOCK // page_size), table.shape[0])
    block = block_pages * page_size
    table = jnp.pad(table, (0, -table.shape[0] % block_pages))

    def one_block(index: Int32[Array, ""], partial: Partial) -> Partial:
        ids = jax.lax.dynamic_slice_in_dim(table, index * block_pages, block_pages)
        both = fetch(pages, head_dim, layer, ids)  # block_pages kv_heads 2 page_size head_dim
        both = jnp.moveaxis(both, 0, 2).reshape(kv_heads, 2, block, -1)
        key_position = index * block + jnp.arange(block)
        stored = (key_position >= first_stored) & (key_position < end_stored)
        valid = in_row[:, None] & stored[None]
        valid &= (window <= 0) | (key_position[None] > position[:, None] - window)
        keys = both[:, 0].astype(queries.dtype)
        # garbage in a page that is not ours may be NaN: zero times NaN would reach the sum
        values = jnp.where(stored[None, :, None], both[:, 1], 0).astype(queries.dtype)
        return merge(partial, _attend(queries, keys, values, valid, softcap))

    oldest = jnp.where(window > 0, jnp.maximum(position[0] - window + 1, 0), 0) // block
    blocks = (end_stored + block - 1) // block
    nothing = empty(queries.shape[:3], head_dim)
    return turned_back(pages, jax.lax.fori_loop(jnp.minimum(oldest, blocks), blocks, one_block, nothing))


def _recent(
    queries: Float[Array, "kv_heads group tile head_dim"],
    position: Int32[Array, " tile"],
    in_row: Bool[Array, " tile"],
    pages: Pages,
    layer: Int32[Array, ""],
    rows: Rows,
    row: Int32[Array, ""],
    window: Int32[Array, ""],
    begins: Bool[Array, " rows"] | None,
    softcap: float,
) -> Partial | None:
    """What the row keeps outside of pages, if the format keeps anything there."""
    beside = recent(pages, layer, rows.slots[row][None], rows.starts[row][None], _of_row(begins, row))
    if beside is None:
        return None
    valid = in_row[:, None] & beside.valid
    valid &= (window <= 0) | (beside.position > position[:, None] - window)
    return _attend(queries, beside.k[0].astype(queries.dtype), beside.v[0].astype(queries.dtype), valid, softcap)


def _of_row(begins: Bool[Array, " rows"] | None, row: Int32[Array, ""]) -> Bool[Array, " 1"] | None:
    return None if begins is None else begins[row][None]
