"""Pages: the pool of keys and values in each of its formats, and what attention reads of it.

Owns the kinds of pool, and the one place where the implementations without kernels of their own turn a page back into
keys and values. float32 and bf16 pools are plain arrays ``[layers, num_pages, kv_heads, 2, page_size, head_dim]``.

Wherever a pool holds bf16 numbers it may hold their bits instead, as uint16: XLA for CPUs takes and puts bf16 numbers
only in float32 and converts the whole array for it, at every step. Kernels for GPUs take bf16 numbers.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Bool, Float, Int32, UInt16

from pallas_kernels import kv_int8
from pallas_kernels.bits import bf16_numbers
from pallas_kernels.errors import ContractError, require
from pallas_kernels.kv_bitmask import op as kv_bitmask
from pallas_kernels.kv_bitmask.rotation import rotation
from pallas_kernels.kv_layout import BLOCK, SINKS, BitmaskLayout, int8_page_size, int8_page_words
from pallas_kernels.softmax import Partial

FloatPages = (
    Float[Array, "layers num_pages kv_heads key_value page_size head_dim"]
    | UInt16[Array, "layers num_pages kv_heads key_value page_size head_dim"]
)


class Int8Pages(NamedTuple):
    """A pool of codes of eight bits, one scale a position and head; ``kv_layout`` has the words."""

    words: Int32[Array, "layers num_pages kv_heads page_words"]


class BitmaskPages(NamedTuple):
    """A pool of blocks of 128 positions, bmq4 or bmq2, and what each slot keeps in bf16; ``kv_layout`` has the words.

    Of a sequence of n positions the blocks hold those from 16 up to the last full block's end. ``recent`` holds the
    first 16 in rows 0..15, and any other position p behind the last full block in row ``16 + p % 128``.
    """

    words: Int32[Array, "layers num_pages kv_heads blocks block_words"]
    recent: (
        BFloat16[Array, "layers slots kv_heads 2 144 head_dim"] | UInt16[Array, "layers slots kv_heads 2 144 head_dim"]
    )


Pages = FloatPages | Int8Pages | BitmaskPages


class PoolShape(NamedTuple):
    """Sizes of a pool, whatever its format."""

    layers: int
    num_pages: int
    kv_heads: int
    page_size: int
    head_dim: int


class Positions(NamedTuple):
    """Keys and values that lie outside of pages, unrotated, and where they belong."""

    k: Float[Array, "rows kv_heads n head_dim"]
    v: Float[Array, "rows kv_heads n head_dim"]
    position: Int32[Array, "rows n"]
    valid: Bool[Array, "rows n"]


def pool_shape(pages: Pages, head_dim: int) -> PoolShape:
    """The sizes of a pool of keys and values of ``head_dim`` channels.

    Raises:
        ContractError: the pool holds no such keys and values.
    """
    if isinstance(pages, Int8Pages):
        layers, num_pages, kv_heads, words = pages.words.shape
        page_size = int8_page_size(words, head_dim)
        require(
            int8_page_words(page_size, head_dim) == words and head_dim % 4 == 0,
            f"pages of {words} words do not hold keys and values of head_dim {head_dim}",
        )
        return PoolShape(layers, num_pages, kv_heads, page_size, head_dim)
    if isinstance(pages, BitmaskPages):
        layers, num_pages, kv_heads, blocks, _ = pages.words.shape
        layout_of(pages, head_dim)
        return PoolShape(layers, num_pages, kv_heads, blocks * BLOCK, head_dim)
    layers, num_pages, kv_heads, two, page_size, page_dim = pages.shape
    require(
        two == 2 and page_dim == head_dim, f"pages {pages.shape} do not hold keys and values of head_dim {head_dim}"
    )
    return PoolShape(layers, num_pages, kv_heads, page_size, head_dim)


def kind(pages: Pages) -> str:
    """The pool's format, for messages."""
    if isinstance(pages, (Int8Pages, BitmaskPages)):
        return type(pages).__name__
    return "bits of bf16" if pages.dtype == jnp.uint16 else str(pages.dtype)


def numbers(part: Array) -> Float[Array, "*n"]:
    """What a part of a pool, or of its ``recent``, holds: bits of bf16 as numbers, numbers as they are."""
    return bf16_numbers(part) if part.dtype == jnp.uint16 else part


def layout_of(pages: BitmaskPages, head_dim: int) -> BitmaskLayout:
    """The layout of a pool's blocks, which their size tells.

    Raises:
        ContractError: blocks of no format of this head dim have that size.
    """
    words, kept = pages.words.shape[-1], pages.recent.shape[-1]
    for base_bits in (4, 2):
        if (layout := kv_bitmask.layout_of(head_dim, base_bits)).words == words and kept == head_dim:
            return layout
    raise ContractError(
        f"blocks of {words} words beside rows of {kept} do not hold keys and values of head_dim {head_dim}"
    )


def fetch(
    pages: Pages, head_dim: int, layer: Int32[Array, ""], ids: Int32[Array, "*ids"]
) -> Float[Array, "*ids kv_heads 2 page_size head_dim"]:
    """Whole pages, in the pool's own dtype or float32; values of a bitmask pool as ``rotation`` turned them.

    Ids outside the pool give some other page.
    """
    if isinstance(pages, Int8Pages):
        return kv_int8.dequantize(pages.words.at[layer, ids].get(mode="clip"), head_dim)
    if isinstance(pages, BitmaskPages):
        layout, words = layout_of(pages, head_dim), pages.words.at[layer, ids].get(mode="clip")
        both = kv_bitmask.dequantize(words, head_dim=head_dim, base_bits=layout.base_bits, implementation="xla")
        return jnp.stack([part.reshape(*part.shape[:-3], -1, head_dim) for part in both], axis=-3)
    return numbers(pages.at[layer, ids].get(mode="clip"))


def in_pages(
    pages: Pages, lengths: Int32[Array, " rows"], begins: Bool[Array, " rows"] | None = None
) -> tuple[Int32[Array, " rows"], Int32[Array, " rows"]]:
    """The first position that a row has in pages, and the first behind; all of its ``lengths`` but what is recent.

    Of a part of a context that does not begin at the sequence's first position, ``begins`` says so.
    """
    if isinstance(pages, BitmaskPages):
        return kept_first(lengths, begins), lengths // BLOCK * BLOCK
    return jnp.zeros_like(lengths), lengths


def kept_first(lengths: Int32[Array, " rows"], begins: Bool[Array, " rows"] | None) -> Int32[Array, " rows"]:
    """How many of each row's first positions a bitmask pool keeps in bf16."""
    sinks = jnp.full_like(lengths, SINKS)
    return sinks if begins is None else jnp.where(begins, sinks, 0)


def recent(
    pages: Pages,
    layer: Int32[Array, ""],
    slots: Int32[Array, " rows"],
    lengths: Int32[Array, " rows"],
    begins: Bool[Array, " rows"] | None = None,
) -> Positions | None:
    """What rows keep outside of pages; None in formats that keep nothing there. ``begins`` as in ``in_pages``."""
    if not isinstance(pages, BitmaskPages):
        return None
    both = numbers(pages.recent.at[layer, slots].get(mode="clip")).astype(jnp.float32)  # rows kv_heads 2 144 head_dim
    row = jnp.arange(both.shape[3], dtype=jnp.int32)
    opened = (lengths // BLOCK * BLOCK)[:, None]
    position = jnp.where(row < SINKS, row, opened + row - SINKS)
    # while the first block is not full, nothing lies in rows 16..31
    first = kept_first(lengths, begins)[:, None]
    valid = (position < lengths[:, None]) & (((row < SINKS) & (first > 0)) | ((row >= SINKS) & (position >= first)))
    values = jnp.where(valid[:, None, :, None], both[:, :, 1], 0.0)
    return Positions(both[:, :, 0], values, position, valid)


def turned_back(pages: Pages, partial: Partial) -> Partial:
    """A weighted sum of the values that ``fetch`` gave, as one of the values themselves."""
    if not isinstance(pages, BitmaskPages):
        return partial
    turn = jnp.asarray(rotation(partial.weighted.shape[-1]))
    return partial._replace(weighted=jnp.einsum("...d,ed->...e", partial.weighted, turn, precision="highest"))


def history(
    pages: Pages,
    head_dim: int,
    layer: Int32[Array, ""],
    page_table: Int32[Array, "rows width"],
    slots: Int32[Array, " rows"],
    lengths: Int32[Array, " rows"],
) -> Positions:
    """Everything that rows have in pages and beside them, for implementations that spare nothing; values unrotated."""
    tiles = jnp.moveaxis(fetch(pages, head_dim, layer, page_table), 1, 3).astype(jnp.float32)
    rows, kv_heads, _, width, page_size, _ = tiles.shape
    tiles = tiles.reshape(rows, kv_heads, 2, width * page_size, head_dim)
    position = jnp.broadcast_to(jnp.arange(width * page_size, dtype=jnp.int32), (rows, width * page_size))
    first, end = in_pages(pages, lengths)
    valid = (position >= first[:, None]) & (position < end[:, None])
    values = tiles[:, :, 1]
    if isinstance(pages, BitmaskPages):
        values = jnp.einsum("...d,ed->...e", values, jnp.asarray(rotation(head_dim)), precision="highest")
    paged = Positions(tiles[:, :, 0], jnp.where(valid[:, None, :, None], values, 0.0), position, valid)
    beside = recent(pages, layer, slots, lengths)
    if beside is None:
        return paged
    axes = (2, 2, 1, 1)
    return Positions(*(jnp.concatenate(parts, axis) for *parts, axis in zip(paged, beside, axes, strict=True)))
