"""paged_prefill: contract and choice of implementation.

A launch holds chunks of several sequences back to back ("ragged"). Their own keys and values are arguments and not yet
in pages, as in ``paged_decode``.
"""

from collections.abc import Callable
from typing import Literal

import jax
from jaxtyping import Array, Float, Int32

from pallas_kernels.errors import require
from pallas_kernels.paged_prefill import native, pallas, pallas_bitmask, pallas_int8, reference, xla
from pallas_kernels.pages import BitmaskPages, Int8Pages, Pages, pool_shape

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
    tokens, q_heads, head_dim = q.shape
    kv_heads = pool_shape(pages, head_dim).kv_heads
    rows = page_table.shape[0]
    require(k.shape == v.shape == (tokens, kv_heads, head_dim), f"k {k.shape} and v {v.shape} must be one row a token")
    require(q.dtype == k.dtype == v.dtype, f"q {q.dtype}, k {k.dtype} and v {v.dtype} must be of one dtype")
    require(q_heads % kv_heads == 0, f"q_heads {q_heads} is no multiple of kv_heads {kv_heads}")
    require(
        slots.shape == starts.shape == lengths.shape == offsets.shape == (rows,),
        f"slots {slots.shape}, starts {starts.shape}, lengths {lengths.shape} and offsets {offsets.shape} need one "
        f"entry a row, {rows}",
    )
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


def kernel_for(pages: Pages) -> Callable[..., Float[Array, "tokens q_heads head_dim"]]:
    """The function that runs the Triton kernel of a pool's format."""
    if isinstance(pages, Int8Pages):
        return pallas_int8.paged_prefill
    return pallas_bitmask.paged_prefill if isinstance(pages, BitmaskPages) else pallas.paged_prefill
