"""What the running sequences are going to need, against a walk through every step."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.outlook import Need, Outlook, candidate_need, expected_end, need, outlook_of
from planner.pages import PagePool
from planner.sequence import Sampling, Sequence

PAGE_SIZE = 16
ABSURD = [math.nan, math.inf, -math.inf, -1e308, 1e308, -5.0, 0.0, 1e-9]


def a_sequence(prompt: int = 20, made: int = 0, max_tokens: int = 100, expected: float | None = None) -> Sequence:
    ids = [1] * (prompt + made)
    return Sequence(0, "r", "t", ids, prompt, Sampling(max_tokens), 0.0, expected_len=expected)


def walked(needs: list[Need], candidate: Need) -> int:
    """The peak, step by step: everybody who has not ended holds what it held, a position a step, and half a page."""
    rest = PAGE_SIZE // 2
    return max(
        candidate.held + step + rest + sum(one.held + step + rest for one in needs if one.left >= step)
        for step in {candidate.left, *(one.left for one in needs if one.left <= candidate.left)}
    )


needs = st.builds(Need, st.integers(0, 300), st.integers(0, 60))


@given(st.lists(needs, max_size=12), needs)
def test_the_peak_is_that_of_a_walk_through_time(running: list[Need], candidate: Need) -> None:
    outlook = Outlook(running, PAGE_SIZE, 1000)
    assert outlook.peak(candidate) == walked(running, candidate)
    assert outlook.fits(candidate) == (walked(running, candidate) <= 1000)


@given(st.lists(needs, max_size=8), needs, needs)
def test_adding_is_the_same_as_having_had(running: list[Need], entered: Need, candidate: Need) -> None:
    grown = Outlook(running, PAGE_SIZE, 600)
    grown.fits(candidate)
    grown.add(entered)
    whole = Outlook([*running, entered], PAGE_SIZE, 600)
    assert (grown.peak(candidate), grown.fits(candidate)) == (whole.peak(candidate), whole.fits(candidate))


def test_needs_that_never_meet_are_not_added_up() -> None:
    """One ends after 10 steps with 110 positions, the candidate after 90 with 100: never 210 at a time."""
    outlook = Outlook([Need(100, 10)], PAGE_SIZE, 1000)
    assert outlook.peak(Need(10, 90)) == (100 + 10 + 8) + (10 + 10 + 8)


@pytest.mark.parametrize(
    ("expected", "made", "end"),
    [
        (50.0, 0, 20 + 50),
        (49.2, 0, 20 + 50),
        (50.0, 49, 20 + 50),
        (50.0, 50, 20 + 50 + PAGE_SIZE),  # it has passed its prediction: one page more
        (None, 7, 20 + 7 + PAGE_SIZE),
        (None, 95, 20 + 100),
        (1e308, 0, 20 + 100),
        (-3.0, 0, 20 + 1),
    ],
)
def test_expected_end(expected: float | None, made: int, end: int) -> None:
    assert expected_end(a_sequence(made=made, expected=expected), PAGE_SIZE) == end


@given(st.none() | st.floats() | st.sampled_from(ABSURD), st.integers(0, 100), st.integers(1, 100), st.integers(0, 2))
def test_an_expected_end_can_be_had_whatever_is_predicted(
    expected: float | None, made: int, max_tokens: int, in_flight: int
) -> None:
    sequence = a_sequence(made=min(made, max_tokens), max_tokens=max_tokens, expected=expected)
    sequence.in_flight = min(in_flight, sequence.max_len - len(sequence.ids))
    end = expected_end(sequence, PAGE_SIZE)
    assert sequence.scheduled_len <= end <= sequence.max_len
    assert 0 <= need(sequence, PAGE_SIZE).left <= max_tokens


def test_a_candidate_is_looked_at_as_far_ahead_as_it_is_long() -> None:
    assert candidate_need(a_sequence(prompt=20, expected=90.0), PAGE_SIZE, 0) == Need(20, 20)
    assert candidate_need(a_sequence(prompt=40, expected=30.0), PAGE_SIZE, 1) == Need(24, 30)


def test_pages_that_choices_share_count_once_and_with_the_last_to_end() -> None:
    pool = PagePool(64, PAGE_SIZE)
    leader, follower, other = (a_sequence(prompt=40, expected=expected) for expected in (10.0, 30.0, 20.0))
    leader.pages = pool.take(3)
    pool.share(leader.pages[:2])
    follower.pages = [*leader.pages[:2], *pool.take(1)]
    other.pages = pool.take(3)
    ending = a_sequence(prompt=40)  # its pages are gone
    outlook = outlook_of([leader, follower, other, ending], pool)
    assert outlook.peak(Need(0, 0)) == 8 + (40 + 8) + (40 + 8) + (8 + 8)
    assert outlook.peak(Need(0, 30)) == max(
        (8 + 10 + 8) + (40 + 10 + 8) + (40 + 10 + 8) + (10 + 8),  # the leader ends, and what is left of it
        (40 + 20 + 8) + (40 + 20 + 8) + (20 + 8),
        (40 + 30 + 8) + (30 + 8),
    )
