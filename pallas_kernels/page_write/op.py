"""page_write: contract and choice of implementation."""

from typing import Literal

import jax
from jaxtyping import Array, Float, Int32

from pallas_kernels.errors import require
from pallas_kernels.page_write import native, pallas, xla
from pallas_kernels.pages import BitmaskPages, Pages, pool_shape
from pallas_kernels.rows import Rows

Implementation = Literal["reference", "xla", "native", "pallas"]


def page_write(
    pages: Pages,
    k: Float[Array, "layers tokens kv_heads head_dim"],
    v: Float[Array, "layers tokens kv_heads head_dim"],
    page_table: Int32[Array, "rows width"],
    slots: Int32[Array, " rows"],
    starts: Int32[Array, " rows"],
    lengths: Int32[Array, " rows"],
    offsets: Int32[Array, " rows"],
    *,
    energy: Float[Array, "layers kv_heads head_dim"] | None = None,
    implementation: Implementation,
) -> Pages:
    """Store the keys and values of new tokens, all layers at once, in the pool's format.

    int8 pools round each token; bitmask pools keep tokens in bf16 until their block of 128 positions is full, and then
    round the block. A row of a bitmask pool must start where the row's slot ended, or at 0.

    Args:
        pages: the pool; donate it, and the result takes its place without a copy.
        k: new keys of every layer, the rows' tokens as in ``paged_prefill``.
        v: new values of every layer.
        page_table: page ids of each row's sequence, in order of position; what has no page in the pool is dropped (but
            for the bf16 rows of a bitmask pool, which hang on the slot alone).
        slots: whose bf16 rows of a bitmask pool belong to each row; without meaning in other formats.
        starts: position of each row's first token.
        lengths: tokens of the row; 0 = an empty row.
        offsets: index of the row's first token; rows lie in ascending order.
        energy: mean square of the queries that meet each key channel; bitmask pools need it.
        implementation: which code runs (the scatter of ``reference`` is also the fast XLA path).

    Raises:
        ContractError: shapes disagree, or the implementation does not take this pool.
    """
    layers, tokens, _, head_dim = k.shape
    shape = pool_shape(pages, head_dim)
    wanted = (shape.layers, tokens, shape.kv_heads, head_dim)
    require(k.shape == v.shape == wanted, f"k {k.shape} and v {v.shape} must be {wanted}")
    rows = (page_table.shape[0],)
    require(
        slots.shape == starts.shape == lengths.shape == offsets.shape == rows,
        f"slots {slots.shape}, starts {starts.shape}, lengths {lengths.shape} and offsets {offsets.shape} need one "
        f"entry a row, {rows[0]}",
    )
    if isinstance(pages, BitmaskPages):
        needed = (layers, shape.kv_heads, head_dim)
        given = None if energy is None else energy.shape
        require(given == needed, f"energy of shape {given} must be {needed} for a bitmask pool")
    run = {
        "reference": xla.page_write,
        "xla": xla.page_write,
        "native": native.page_write,
        "pallas": pallas.page_write,
    }[implementation]
    with jax.named_scope("page_write"):
        return run(pages, k, v, Rows(page_table, slots, starts, lengths, offsets), energy)
