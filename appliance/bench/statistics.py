"""Numbers from repeated measurements: medians, spreads, ratios and slopes.

Owns a handful of pure functions that the benches share. Reads nothing; never imports numpy, so that it costs nothing.
"""

import math
import statistics
from collections.abc import Sequence


class StatisticsError(ValueError):
    """Too few measurements for the number that was asked for; the message gives both counts."""


def median(values: Sequence[float]) -> float:
    """The median.

    Raises:
        StatisticsError: there is no value.
    """
    if not values:
        raise StatisticsError("the median of 0 measurements was asked for; at least 1 is needed")
    return statistics.median(values)


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Least and largest value.

    Raises:
        StatisticsError: there is no value.
    """
    if not values:
        raise StatisticsError("the spread of 0 measurements was asked for; at least 1 is needed")
    return min(values), max(values)


def quantile(values: Sequence[float], share: float) -> float:
    """The least value that at least ``share`` of all values do not pass; 0.5 gives a median that was measured.

    Raises:
        StatisticsError: there is no value, or the share is outside 0..1.
    """
    if not values or not 0 <= share <= 1:
        raise StatisticsError(f"the quantile {share} of {len(values)} measurements; it needs 0..1 and at least 1 value")
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def paired_ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """``over[i] / under[i]`` for every round i.

    Raises:
        StatisticsError: the rounds do not agree.
    """
    if len(over) != len(under):
        raise StatisticsError(f"{len(over)} measurements over {len(under)}; both need one a round")
    return [a / b for a, b in zip(over, under, strict=True)]


def slope(at: Sequence[float], values: Sequence[float]) -> float:
    """Slope of the least-squares line through ``values`` at the places ``at``, in units of value a unit of place.

    Raises:
        StatisticsError: fewer than two distinct places, or lengths that differ.
    """
    if len(at) != len(values) or len(set(at)) < 2:
        raise StatisticsError(f"a slope needs 2 distinct places; there are {len(set(at))} and {len(values)} values")
    mean_at, mean_value = statistics.fmean(at), statistics.fmean(values)
    above = sum((x - mean_at) * (y - mean_value) for x, y in zip(at, values, strict=True))
    return above / sum((x - mean_at) ** 2 for x in at)
