"""paged_decode: contract and choice of implementation.

The new token's own key and value are an argument and not yet in a page: a step writes all layers' keys and values once,
at its end, so that the pool is read-only while layers run and is never copied.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.errors import require
from pallas_kernels.paged_decode import native, pallas, pallas_bitmask, pallas_int8, reference, xla
from pallas_kernels.pages import BitmaskPages, Int8Pages, Pages, pool_shape
from pallas_kernels.softmax import Partial

Implementation = Literal["reference", "xla", "native", "pallas"]


def paged_decode(
    q: Float[Array, "slots q_heads head_dim"],
    k: Float[Array, "slots kv_heads head_dim"],
    v: Float[Array, "slots kv_heads head_dim"],
    pages: Pages,
    layer: Int32[Array, ""],
    page_table: Int32[Array, "slots width"],
    lengths: Int32[Array, " slots"],
    window: Int32[Array, ""],
    *,
    scale: float,
    softcap: float = 0.0,
    implementation: Implementation,
) -> Float[Array, "slots q_heads head_dim"]:
    """Attend from one new token a slot to its history in pages and to itself.

    Args:
        q: queries after rotary embedding; query head h reads key/value head ``h // (q_heads // kv_heads)``.
        k: the new token's keys, after rotary embedding.
        v: the new token's values.
        pages: the pool, in any format; row i is slot i of what a bitmask pool keeps in bf16.
        layer: the layer of the pool to read.
        page_table: page ids of each slot, in order of position; entries past the history are never read as meaning.
        lengths: positions already in pages, 0 for an empty slot (whose result is then its own ``v``).
        window: 0 attends to the whole history; w > 0 to the newest w positions, the new one included.
        scale: factor on the scores.
        softcap: c > 0 replaces a score s by ``c * tanh(s / c)``.
        implementation: which code runs; there is no fall-back.

    Returns:
        The attention output in q's dtype; softmax and sums are in float32.

    Raises:
        ContractError: shapes or dtypes disagree, or the implementation does not take this pool.
    """
    _check(q, k, v, pages, page_table, lengths)
    run = {
        "reference": reference.paged_decode,
        "xla": xla.paged_decode,
        "native": native.paged_decode,
        "pallas": kernel_for(pages),
    }[implementation]
    with jax.named_scope("paged_decode"):
        return run(q, k, v, pages, layer, page_table, lengths, window, scale=scale, softcap=softcap)


def paged_decode_part(
    q: Float[Array, "slots q_heads head_dim"],
    k: Float[Array, "slots kv_heads head_dim"],
    v: Float[Array, "slots kv_heads head_dim"],
    pages: Pages,
    layer: Int32[Array, ""],
    page_table: Int32[Array, "slots width"],
    lengths: Int32[Array, " slots"],
    begins: Bool[Array, " slots"],
    *,
    scale: float,
    softcap: float = 0.0,
    implementation: Literal["xla", "pallas"],
) -> Partial:
    """``paged_decode`` over a part of each history, for contexts that several devices hold; no windows.

    Args:
        q: as in ``paged_decode``, and all that is not named here.
        k: the new token's keys, the same for every part.
        v: the new token's values.
        pages: the pool that holds the part.
        layer: the layer of the pool to read.
        page_table: page ids of each slot's part; a part is whole blocks of 128 positions, the newest one excepted.
        lengths: positions of the part.
        begins: whether the part begins at the sequence's first position. What a slot attends to outside of pages,
            the new token among it, counts in that part and so once.
        scale: factor on the scores.
        softcap: as in ``paged_decode``.
        implementation: which code runs.

    Returns:
        The unfinished sum of the part, float32, rows [slots q_heads]; those of all parts are for ``softmax.merge``.

    Raises:
        ContractError: shapes or dtypes disagree, or the implementation does not take this pool.
    """
    _check(q, k, v, pages, page_table, lengths)
    require(begins.shape == lengths.shape, f"begins {begins.shape} and lengths {lengths.shape} need one entry a slot")
    run: Callable[..., Any] = xla.paged_decode if implementation == "xla" else kernel_for(pages)
    with jax.named_scope("paged_decode"):
        window = jnp.int32(0)
        return run(q, k, v, pages, layer, page_table, lengths, window, begins, scale=scale, softcap=softcap)


def _check(
    q: Array,
    k: Array,
    v: Array,
    pages: Pages,
    page_table: Array,
    lengths: Array,
) -> None:
    """Plain annotations, so that what is wrong is told in words."""
    slots, q_heads, head_dim = q.shape
    kv_heads = pool_shape(pages, head_dim).kv_heads
    require(k.shape == v.shape == (slots, kv_heads, head_dim), f"k {k.shape} and v {v.shape} must be one row a slot")
    require(q.dtype == k.dtype == v.dtype, f"q {q.dtype}, k {k.dtype} and v {v.dtype} must be of one dtype")
    require(q_heads % kv_heads == 0, f"q_heads {q_heads} is no multiple of kv_heads {kv_heads}")
    require(
        page_table.shape[0] == slots and lengths.shape == (slots,),
        f"page_table {page_table.shape} and lengths {lengths.shape} need one row for each of {slots} slots",
    )


def kernel_for(pages: Pages) -> Callable[..., Any]:
    """The function that runs the Triton kernel of a pool's format."""
    if isinstance(pages, Int8Pages):
        return pallas_int8.paged_decode
    return pallas_bitmask.paged_decode if isinstance(pages, BitmaskPages) else pallas.paged_decode
