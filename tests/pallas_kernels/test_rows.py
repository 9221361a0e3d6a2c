"""Which row, position and page each token of a launch has."""

import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.rows import Places, Rows, pages_of, places

NOBODY = (-1, -1)


def rows(lengths, offsets, starts=None, table=None) -> Rows:
    count = len(lengths)
    starts = [0] * count if starts is None else starts
    table = np.zeros((count, 1)) if table is None else table
    return Rows(*(jnp.asarray(part, jnp.int32) for part in (table, range(count), starts, lengths, offsets)))


def found(lengths, offsets, tokens, starts=None) -> list[tuple[int, int]]:
    """Row and position of each token; NOBODY for one of no row."""
    at: Places = places(rows(lengths, offsets, starts), tokens)
    assert (at.row >= 0).all()
    assert (at.row < len(lengths)).all()
    return [
        (row, position) if valid else NOBODY
        for row, position, valid in zip(at.row.tolist(), at.position.tolist(), at.valid.tolist(), strict=True)
    ]


def test_rows_back_to_back():
    assert found([2, 3, 0], [0, 2, 5], 7, [4, 0, 9]) == [(0, 4), (0, 5), (1, 0), (1, 1), (1, 2), NOBODY, NOBODY]
    assert found([2, 0, 1], [0, 2, 2], 4) == [(0, 0), (0, 1), (2, 0), NOBODY]
    assert found([0, 0], [0, 0], 2) == [NOBODY, NOBODY]
    assert found([4], [0], 4) == [(0, 0), (0, 1), (0, 2), (0, 3)]


def test_rows_of_a_decode_step_have_a_place_each():
    assert found([0, 1, 0, 1], [0, 1, 2, 3], 4, [0, 7, 0, 2]) == [NOBODY, (1, 7), NOBODY, (3, 2)]


@given(lengths=st.lists(st.integers(0, 4), min_size=1, max_size=5), spare=st.integers(0, 3), start=st.integers(0, 50))
def test_every_token_of_a_row_is_found_once(lengths, spare, start):
    offsets = np.cumsum([0, *lengths])[:-1]
    starts = [start + row for row in range(len(lengths))]
    wanted = [(row, starts[row] + index) for row, length in enumerate(lengths) for index in range(length)]
    assert found(lengths, offsets, sum(lengths) + spare, starts) == wanted + [NOBODY] * spare


def test_pages_and_what_has_none():
    table = [[3, -1, 9], [2**31 - 1, 0, 1]]
    taken = rows([6, 4], [0, 6], [0, 3], table)
    ids, offsets = pages_of(taken, places(taken, 12), page_size=2, num_pages=5)
    # row 0 has pages 3, none, 9; row 1 starts at the last place of its second page; tokens 10 and 11 are nobody's
    assert ids.tolist()[:10] == [3, 3, 5, 5, 9, 9, 0, 1, 1, 5]
    assert ids.tolist()[10:] == [5, 5]
    assert offsets.tolist()[:10] == [0, 1, 0, 1, 0, 1, 1, 0, 1, 0]
