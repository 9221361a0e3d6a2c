"""What is remembered of finished requests, and the quantile that follows from it."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.history import (
    CAPACITY,
    MIN_CLASS,
    MIN_KNOWN,
    QUANTILE,
    TENANT_BUCKETS,
    Asked,
    Column,
    History,
    HistoryKeeper,
    baseline,
    features,
    from_log_length,
    log_length,
    tenant_bucket,
)


def filled(lengths: list[int], max_tokens: int = 1000) -> HistoryKeeper:
    keeper = HistoryKeeper()
    for length in lengths:
        keeper.add(Asked(10, max_tokens, 0, 0.5, keeper.total), length)
    return keeper


def the_baseline(keeper: HistoryKeeper, max_tokens: int = 1000, known: int | None = None) -> float:
    asked = Asked(10, max_tokens, 0, 0.5, keeper.total if known is None else known)
    (found,) = baseline(keeper.records, keeper.total - len(keeper.records), asked.record())
    return float(found)


def test_nothing_is_said_before_enough_has_finished() -> None:
    assert math.isnan(the_baseline(filled([7] * (MIN_KNOWN - 1))))
    assert the_baseline(filled([7] * MIN_KNOWN)) == 7.0


def test_the_quantile_is_that_of_a_sorted_list() -> None:
    lengths = [int(n) for n in np.random.default_rng(0).permutation(100)]
    assert the_baseline(filled(lengths)) == sorted(lengths)[math.ceil(QUANTILE * 100) - 1]


def test_a_request_never_needs_more_than_it_may_have() -> None:
    assert the_baseline(filled([900] * 100), max_tokens=600) == 600.0
    assert the_baseline(filled([0] * 100)) == 1.0


def test_classes_of_max_tokens_are_told_apart_once_they_are_large() -> None:
    keeper = filled([800] * 200)
    for _ in range(MIN_CLASS - 1):
        keeper.add(Asked(10, 60, 0, 0.5, keeper.total), 20)
    assert the_baseline(keeper, max_tokens=50) == 50.0, "800, cut"
    keeper.add(Asked(10, 60, 0, 0.5, keeper.total), 20)
    assert the_baseline(keeper, max_tokens=50) == 20.0
    assert the_baseline(keeper, max_tokens=1000) == 800.0


def test_a_request_looks_only_at_what_had_finished_when_it_came() -> None:
    keeper = filled([10] * 40 + [500] * 40)
    assert the_baseline(keeper, known=40) == 10.0
    assert the_baseline(keeper) == 500.0
    assert math.isnan(the_baseline(keeper, known=20))
    asked = Asked(10, 1000, 0, 0.5, 40).record()
    (steps,) = features(keeper.records, 0, asked, np.array([10.0]))
    assert from_log_length(steps[:-1, 4]).round() == pytest.approx(10.0)


@settings(max_examples=20)
@given(st.integers(0, 5 * CAPACITY))
def test_the_newest_requests_are_kept(count: int) -> None:
    keeper = HistoryKeeper()
    records = np.zeros((count, len(Column)))
    for index in range(0, count, 97):  # a sample of places, so that the test stays quick
        records[index, Column.COMPLETION] = index
    for index in range(count):
        keeper.add(Asked(0, 0, 0, 0.0, index), int(records[index, Column.COMPLETION]))
    history = keeper.history()
    assert (history.total, len(history.records)) == (count, min(count, CAPACITY))
    np.testing.assert_array_equal(
        history.records[:, Column.COMPLETION], records[max(0, count - CAPACITY) :, Column.COMPLETION]
    )
    assert history.first == max(0, count - CAPACITY)


def test_a_restored_history_goes_on() -> None:
    keeper, lengths = filled(list(range(1, 1300))), list(range(1300, 1400))
    restored = HistoryKeeper(keeper.history())
    for length in lengths:
        for one in (keeper, restored):
            one.add(Asked(10, 1000, 0, 0.5, one.total), length)
    np.testing.assert_array_equal(restored.records, keeper.records)
    assert restored.total == keeper.total


def test_a_copy_does_not_change() -> None:
    keeper = filled([5] * 10)
    history = keeper.history()
    keeper.add(Asked(1, 2, 3, 4.0, 5), 6)
    assert (len(history.records), history.total) == (10, 10)


@pytest.mark.parametrize(
    ("column", "value", "why"),
    [
        (Column.PROMPT, -1.0, "negative or not finite"),
        (Column.GAP_S, math.nan, "negative or not finite"),
        (Column.COMPLETION, math.inf, "negative or not finite"),
        (Column.MAX_TOKENS, 0.5, "a fraction of a token"),
        (Column.BUCKET, TENANT_BUCKETS, "a tenant outside 8 buckets"),
        (Column.KNOWN, 4.0, "finished after it"),
    ],
)
def test_records_that_cannot_be_are_refused(column: Column, value: float, why: str) -> None:
    records = filled([5] * 10).history().records
    records[3, column] = value
    with pytest.raises(ValueError, match=why):
        History(records, 10)


def test_a_history_has_at_most_as_many_records_as_requests() -> None:
    with pytest.raises(ValueError, match=r"records of shape \(10, 6\) of 9 finished requests"):
        History(filled([5] * 10).history().records, 9)


@given(st.floats(0, 200_000))
def test_logarithms_come_back(length: float) -> None:
    assert from_log_length(log_length(np.array(length))) == pytest.approx(length, abs=1e-6, rel=1e-9)


def test_tenants_keep_their_buckets() -> None:
    assert [tenant_bucket(name) for name in ("a", "b", "default", "")] == [2, 6, 7, 3]
    assert len({tenant_bucket(f"tenant-{i}") for i in range(200)}) == TENANT_BUCKETS


def test_windows_reach_back_no_further_than_what_is_kept() -> None:
    keeper = filled([5] * 20)
    (steps,) = features(keeper.records, 0, Asked(10, 1000, 0, 0.5, 3).record(), np.array([5.0]))
    assert list(steps[:, 5]) == [0.0] * 13 + [1.0] * 4
    assert not steps[:13].any()
    (alone,) = features(keeper.records[:0], 0, Asked(10, 1000, 0, 0.5, 0).record(), np.array([5.0]))
    assert list(alone[:, 5]) == [0.0] * 16 + [1.0]
