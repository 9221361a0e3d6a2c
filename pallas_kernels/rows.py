"""Rows: which tokens of a launch belong to which sequence, and at which position.

Owns the ragged arithmetic: rows lie back to back in a launch, row by row, with gaps only where a row is empty.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32


class Rows(NamedTuple):
    """The rows of a launch.

    ``page_table`` has each row's page ids in order of position; ``slots`` say whose bf16 rows belong to it; ``starts``
    is the position of its first token, ``lengths`` how many tokens it has (0: none), ``offsets`` the index of the first
    of them, ascending.
    """

    page_table: Int32[Array, "rows width"]
    slots: Int32[Array, " rows"]
    starts: Int32[Array, " rows"]
    lengths: Int32[Array, " rows"]
    offsets: Int32[Array, " rows"]


class Places(NamedTuple):
    """Each token's row, its position in the sequence, and whether it belongs to a row at all."""

    row: Int32[Array, " tokens"]
    position: Int32[Array, " tokens"]
    valid: Bool[Array, " tokens"]


def places(rows: Rows, tokens: int) -> Places:
    """Where the tokens of a launch belong; tokens of no row have some row and no meaning."""
    index = jnp.arange(tokens, dtype=jnp.int32)
    ends = rows.offsets + rows.lengths
    row = jnp.minimum(jnp.sum(index[:, None] >= ends, axis=1, dtype=jnp.int32), ends.shape[0] - 1)
    inside = (index >= rows.offsets[row]) & (index < ends[row])
    return Places(row, rows.starts[row] + index - rows.offsets[row], inside)


def pages_of(
    rows: Rows, at: Places, page_size: int, num_pages: int
) -> tuple[Int32[Array, " tokens"], Int32[Array, " tokens"]]:
    """Page id and offset of each token; ``num_pages`` for one that has no page in the pool."""
    # a position past the table has no page: clamped, it would overwrite the last one
    ids = rows.page_table.at[at.row, at.position // page_size].get(mode="fill", fill_value=num_pages)
    # a negative id would wrap around before the drop is decided
    return jnp.where(at.valid & (ids >= 0), ids, num_pages), at.position % page_size
