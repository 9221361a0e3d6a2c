"""paged_prefill: contract and choice of implementation.

A launch holds chunks of several sequences back to back ("ragged"). Their own keys and values are arguments and not yet
in pages, as in ``paged_decode``.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.errors import require
from pallas_kernels.paged_prefill import native, pallas, pallas_bitmask, pallas_int8, reference, xla
from pallas_kernels.pages import BitmaskPages, Int8Pages, Pages, pool_shape
from pallas_kernels.rows import Rows
from pallas_kernels.softmax import Partial

Implementation = Literal["reference", "xla", "native", "pallas"]
Products = Literal["float32", "bf16"]


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
    products: Products = "float32",
    implementation: Implementation,
) -> Float[Array, "tokens q_heads head_dim"]:
    """Attend causally from every prompt token to its sequence's pages and to the chunk before it.

    Args:
        q: queries of all chunks, after rotary embedding; query head h reads key/value head ``h // group``.
        k: the chunks' keys, after rotary embedding.
        v: the chunks' values.
        pages: the pool, in any format.
        layer: the layer of the pool to read.
        page_table: page ids of each row's sequence, in order of position.
        slots: whose bf16 rows of a bitmask pool belong to each row; without meaning in other formats.
        starts: positions already in pages, which is the position of the row's first token.
        lengths: tokens of the row in this launch; 0 = an empty row.
        offsets: index of the row's first token; rows lie back to back in ascending order, empty rows last.
        window: 0 attends to everything; w > 0 to the newest w positions, the query's own included.
        scale: factor on the scores.
        softcap: c > 0 replaces a score s by ``c * tanh(s / c)``.
        products: ``bf16`` rounds float32 queries, keys, values and softmax weights to it where they are multiplied;
            operands of another dtype are multiplied as they are.
        implementation: which code runs; there is no fall-back.

    Returns:
        The attention output in q's dtype; softmax and sums are in float32. Tokens that belong to no row get finite
        values without meaning.

    Raises:
        ContractError: shapes or dtypes disagree, or the implementation does not take this pool.
    """
    _check(q, k, v, pages, Rows(page_table, slots, starts, lengths, offsets))
    run = {
        "reference": reference.paged_prefill,
        "xla": xla.paged_prefill,
        "native": native.paged_prefill,
        "pallas": kernel_for(pages),
    }[implementation]
    with jax.named_scope("paged_prefill"):
        return run(
            q, k, v, pages, layer, page_table, slots, starts, lengths, offsets, window,
            scale=scale, softcap=softcap, products=products,
        )  # fmt: skip


def paged_prefill_part(
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
    begins: Bool[Array, " rows"],
    *,
    scale: float,
    softcap: float = 0.0,
    products: Products = "float32",
    implementation: Literal["xla", "pallas"],
) -> Partial:
    """``paged_prefill`` over a part of each history, for contexts that several devices hold; no windows.

    Args:
        q: as in ``paged_prefill``, and all that is not named here.
        k: the chunks' keys, the same for every part.
        v: the chunks' values.
        pages: the pool that holds the part.
        layer: the layer of the pool to read.
        page_table: page ids of each row's part; a part is whole blocks of 128 positions, the newest one excepted.
        slots: as in ``paged_prefill``.
        starts: positions of the part.
        lengths: as in ``paged_prefill``.
        offsets: as in ``paged_prefill``.
        begins: whether the part begins at the sequence's first position. The chunk itself, and what a slot keeps
            outside of pages, count in that part and so once.
        scale: factor on the scores.
        softcap: as in ``paged_prefill``.
        products: as in ``paged_prefill``.
        implementation: which code runs.

    Returns:
        The unfinished sum of the part, float32, rows [tokens q_heads]; those of all parts are for ``softmax.merge``.

    Raises:
        ContractError: shapes or dtypes disagree, or the implementation does not take this pool.
    """
    _check(q, k, v, pages, Rows(page_table, slots, starts, lengths, offsets))
    require(begins.shape == starts.shape, f"begins {begins.shape} and starts {starts.shape} need one entry a row")
    run: Callable[..., Any] = xla.paged_prefill if implementation == "xla" else kernel_for(pages)
    with jax.named_scope("paged_prefill"):
        return run(
            q, k, v, pages, layer, page_table, slots, starts, lengths, offsets, jnp.int32(0), begins,
            scale=scale, softcap=softcap, products=products,
        )  # fmt: skip


def _check(
    q: Array,
    k: Array,
    v: Array,
    pages: Pages,
    of: Rows,
) -> None:
    """Plain annotations, so that what is wrong is told in words."""
    tokens, q_heads, head_dim = q.shape
    kv_heads = pool_shape(pages, head_dim).kv_heads
    rows = of.page_table.shape[0]
    require(k.shape == v.shape == (tokens, kv_heads, head_dim), f"k {k.shape} and v {v.shape} must be one row a token")
    require(q.dtype == k.dtype == v.dtype, f"q {q.dtype}, k {k.dtype} and v {v.dtype} must be of one dtype")
    require(q_heads % kv_heads == 0, f"q_heads {q_heads} is no multiple of kv_heads {kv_heads}")
    require(
        all(part.shape == (rows,) for part in of[1:]),
        f"slots {of.slots.shape}, starts {of.starts.shape}, lengths {of.lengths.shape} and offsets {of.offsets.shape} "
        f"need one entry a row, {rows}",
    )


def kernel_for(pages: Pages) -> Callable[..., Any]:
    """The function that runs the Triton kernel of a pool's format."""
    if isinstance(pages, Int8Pages):
        return pallas_int8.paged_prefill
    return pallas_bitmask.paged_prefill if isinstance(pages, BitmaskPages) else pallas.paged_prefill
