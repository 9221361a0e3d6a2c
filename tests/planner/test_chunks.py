"""The shares of a step's prefill budget."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.chunks import share_budget


@pytest.mark.parametrize(
    ("remaining", "budget", "rows", "shares"),
    [
        ([], 64, 4, []),
        ([10], 64, 4, [(0, 10)]),
        ([100], 64, 4, [(0, 64)]),
        ([100], 70, 4, [(0, 64)]),  # an inner piece is a multiple of 16
        ([1000, 20], 64, 4, [(0, 32), (1, 20)]),  # the short one starts at once
        ([1000, 40], 64, 4, [(0, 32), (1, 32)]),
        ([1000, 20, 8], 64, 4, [(0, 32), (1, 20), (2, 8)]),  # 4 are left: no multiple of 16
        ([64, 64, 64], 64, 4, [(0, 32), (1, 32)]),
        ([5, 100, 100], 64, 4, [(0, 5), (1, 48)]),
        ([1000, 8, 9, 10], 64, 2, [(0, 48), (1, 8)]),  # two rows: the oldest and the shortest
        ([1000, 8], 64, 1, [(0, 64)]),
        ([1000, 8], 16, 4, [(0, 16)]),
    ],
)
def test_shares(remaining: list[int], budget: int, rows: int, shares: list[tuple[int, int]]):
    assert share_budget(remaining, budget, rows, 16) == shares


@given(
    st.lists(st.integers(1, 300), max_size=12),
    st.integers(1, 12),
    st.integers(1, 5),
    st.integers(0, 60),
)
def test_bounds(remaining: list[int], align: int, rows: int, above: int):
    budget = align + above
    shares = share_budget(remaining, budget, rows, align)
    assert sum(count for _, count in shares) <= budget
    assert len(shares) <= rows
    assert [index for index, _ in shares] == sorted({index for index, _ in shares})
    for index, count in shares:
        assert 0 < count <= remaining[index]
        assert count == remaining[index] or count % align == 0
    if remaining:
        index, oldest = shares[0]
        assert index == 0
        assert oldest >= min(remaining[0], budget // 2 // align * align, budget)


@given(st.lists(st.integers(1, 200), min_size=1, max_size=10), st.integers(16, 64), st.integers(1, 4))
def test_every_prompt_ends_within_its_bound(remaining: list[int], budget: int, rows: int):
    """Nobody starves: prompt i ends after the steps that it and all older ones need at half of the budget."""
    left = dict(enumerate(remaining))
    least = max(budget // 2 // 16 * 16, 16)
    step = 0
    while left:
        step += 1
        order = list(left)
        for index, count in share_budget([left[key] for key in order], budget, rows, 16):
            left[order[index]] -= count
        done = [key for key, value in left.items() if value == 0]
        for key in done:
            assert step <= sum(-(-length // least) for length in remaining[: key + 1])
            del left[key]
