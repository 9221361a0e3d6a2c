"""Page pools for tests: histories in pages of random order, with NaN wherever nothing may be read."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LAYERS = 2


@dataclass(frozen=True, slots=True)
class PagedHistory:
    """A pool [LAYERS, pages, kv_heads, 2, page_size, d] and a page table [rows, width] into it."""

    pages: np.ndarray
    table: np.ndarray
    lengths: np.ndarray


def paged_history(
    rng: np.random.Generator,
    lengths: Sequence[int],
    *,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    width: int,
    spare: int = 2,
    garbage: float = np.nan,
) -> PagedHistory:
    """Rows of the given lengths whose pages lie in random order among ``spare`` pages of nobody.

    Positions behind a row's length and pages of nobody hold ``garbage``; places of the table behind the row's pages
    hold ids inside and outside the pool.
    """
    needed = [-(-length // page_size) for length in lengths]
    num_pages = sum(needed) + spare
    pages = np.full((LAYERS, num_pages, kv_heads, 2, page_size, head_dim), garbage, np.float32)
    table = rng.choice(np.array([-1, 0, num_pages - 1, num_pages, 2**31 - 1], np.int32), (len(lengths), width))
    ids = rng.permutation(num_pages).astype(np.int32)
    for row, (length, count) in enumerate(zip(lengths, needed, strict=True)):
        own, ids = ids[:count], ids[count:]
        table[row, :count] = own
        for position in range(length):
            page, offset = own[position // page_size], position % page_size
            pages[:, page, :, :, offset] = rng.standard_normal((LAYERS, kv_heads, 2, head_dim), dtype=np.float32)
    return PagedHistory(pages, table.astype(np.int32), np.asarray(lengths, np.int32))
