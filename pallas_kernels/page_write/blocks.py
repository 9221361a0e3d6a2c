"""Blocks: which blocks of 128 positions the tokens of a launch fill, and which tokens stay in bf16.

Owns the plan that every implementation of a bitmask pool's writes follows. A block may begin among the rows that its
slot keeps in bf16 and end among the launch's tokens.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int32

from pallas_kernels.kv_layout import BLOCK, SINKS
from pallas_kernels.rows import Rows, places


class Filled(NamedTuple):
    """The blocks that become full, the rows' in order; entries from ``total`` on are none.

    ``page`` and ``place`` say where a block's words go, ``page`` being the number of pages for what is to be dropped;
    ``number`` counts blocks of the sequence. Its first ``kept`` positions lie in the slot's bf16 rows, the position
    after that many is token ``first + kept`` of the launch.
    """

    page: Int32[Array, " items"]
    place: Int32[Array, " items"]
    number: Int32[Array, " items"]
    slot: Int32[Array, " items"]
    kept: Int32[Array, " items"]
    first: Int32[Array, " items"]
    total: Int32[Array, ""]


def most_blocks(tokens: int, rows: int) -> int:
    """Blocks that a launch can fill at most: each takes a new token, and a row's first may take no more."""
    return min(tokens, (tokens + (BLOCK - 1) * rows) // BLOCK)


def filled_blocks(rows: Rows, tokens: int, slots: int, num_pages: int, blocks_of_page: int) -> Filled:
    """The plan of a launch of ``tokens`` tokens into a pool of so many slots and pages."""
    before = rows.starts // BLOCK
    filled = jnp.where(rows.lengths > 0, (rows.starts + rows.lengths) // BLOCK - before, 0)
    ends = jnp.cumsum(filled)
    item = jnp.arange(most_blocks(tokens, rows.starts.shape[0]), dtype=jnp.int32)
    row = jnp.minimum(jnp.sum(item[:, None] >= ends, axis=1, dtype=jnp.int32), ends.shape[0] - 1)
    number = before[row] + item - (ends[row] - filled[row])
    begin, slot = number * BLOCK - rows.starts[row], rows.slots[row]
    kept = jnp.maximum(-begin, 0)
    # what has no page, or whose beginning lies in no slot, is dropped: clamped, it would overwrite somebody's block
    page = rows.page_table.at[row, number // blocks_of_page].get(mode="fill", fill_value=num_pages)
    inside = (page >= 0) & (page < num_pages) & ((kept == 0) | ((slot >= 0) & (slot < slots)))
    page = jnp.where(inside & (item < ends[-1]), page, num_pages)
    return Filled(page, number % blocks_of_page, number, slot, kept, rows.offsets[row] + begin, ends[-1])


def kept_lines(rows: Rows, tokens: int, slots: int) -> tuple[Int32[Array, " tokens"], Int32[Array, " tokens"]]:
    """Slot and bf16 row of each token that is among the first of its sequence or behind its last full block.

    The slot is ``slots``, how many there are, for a token that is dropped.
    """
    at = places(rows, tokens)
    opened = ((rows.starts + rows.lengths) // BLOCK * BLOCK)[at.row]
    first = at.position < SINKS
    slot = rows.slots[at.row]
    stays = at.valid & (first | (at.position >= opened)) & (slot >= 0) & (slot < slots)
    return jnp.where(stays, slot, slots), jnp.where(first, at.position, SINKS + at.position % BLOCK)
