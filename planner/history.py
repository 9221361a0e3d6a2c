"""History: the last finished requests, and what they say of the next one's completion without any learning.

Owns the records, the rolling quantile that is the baseline of every prediction, and the features that the LSTM reads.
NumPy only: no jax, no clock, no file. One record stands for one choice of a request.

A record keeps how many requests had finished when it was admitted (``KNOWN``). Baseline and features of a record look
at those alone, so what is said of a finished request is what could have been said at its admission, however many others
were running at that time.
"""

import hashlib
import math
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

import numpy as np
from jaxtyping import Float32, Float64

CAPACITY = 1000
"""Finished requests that are remembered."""

WINDOW = 16
"""Finished requests that the LSTM reads before the request it is asked about."""

TENANT_BUCKETS = 8
"""Tenants are told apart by a hash of so many values."""

QUANTILE = 0.8
"""A prediction is the length that this share of completions does not pass."""

MIN_KNOWN = 30
"""Finished requests below which nothing is predicted."""

MIN_CLASS = 50
"""Finished requests of one class of ``max_tokens`` below which the quantile is that of all classes."""

_LOG_MIDDLE, _LOG_SPREAD = 8.0, 3.0
"""Lengths enter as logarithms to base 2, so that 32 to 2,048 tokens are -1 to 1."""


class Column(IntEnum):
    """Columns of the records, all known at admission but the last."""

    PROMPT = 0
    MAX_TOKENS = 1
    BUCKET = 2
    GAP_S = 3
    KNOWN = 4
    COMPLETION = 5


_STEP_FEATURES = 8
NUM_FEATURES = _STEP_FEATURES + TENANT_BUCKETS
"""Prompt, max_tokens, gap, same tenant, completion, is a request at all, is the one asked about, baseline; tenant."""

Records = Float64[np.ndarray, "records columns"]
"""Finished requests, oldest first."""

Requests = Float64[np.ndarray, "requests columns"]
"""Requests that are asked about, each with what it knew."""

Features = Float32[np.ndarray, "requests steps features"]


@dataclass(frozen=True, slots=True)
class Asked:
    """What is known of a request at admission; see ``Column``."""

    prompt_len: int
    max_tokens: int
    bucket: int
    gap_s: float
    known: int

    def record(self, completion_len: int = 0) -> Requests:
        """The request as one record."""
        return np.array(
            [[self.prompt_len, self.max_tokens, self.bucket, self.gap_s, self.known, completion_len]], np.float64
        )


@dataclass(frozen=True, slots=True)
class History:
    """Records in the order of finishing; ``total`` counts all that ever finished, remembered or not."""

    records: Records
    total: int

    @property
    def first(self) -> int:
        """How many finished before the oldest record."""
        return self.total - len(self.records)

    def __post_init__(self) -> None:
        """Check what may come from a file.

        Raises:
            ValueError: a record says what no request can.
        """
        rows, total = self.records, self.total
        if rows.ndim != 2 or rows.shape[1] != len(Column) or not len(rows) <= min(CAPACITY, total):
            raise ValueError(f"records of shape {rows.shape} of {total} finished requests; at most {CAPACITY} are kept")
        if not np.isfinite(rows).all() or (rows < 0).any():
            raise ValueError("a record holds a number that is negative or not finite")
        whole = np.delete(rows, Column.GAP_S, axis=1)
        if (whole != np.floor(whole)).any() or (rows[:, Column.BUCKET] >= TENANT_BUCKETS).any():
            raise ValueError(f"a record holds a fraction of a token, or a tenant outside {TENANT_BUCKETS} buckets")
        if (rows[:, Column.KNOWN] > self.first + np.arange(len(rows))).any():
            raise ValueError("a record knew of requests that finished after it")


class HistoryKeeper:
    """The history as it grows. Adding costs O(1) on average; ``history`` is a view of the newest records.

    Args:
        history: what to go on from; None = nothing has finished yet.
    """

    __slots__ = ("_buffer", "_end", "_start", "total")

    def __init__(self, history: History | None = None) -> None:
        self._buffer = np.zeros((4 * CAPACITY, len(Column)), np.float64)
        kept = 0 if history is None else len(history.records)
        if history is not None:
            self._buffer[:kept] = history.records
        self._start, self._end = 0, kept
        self.total = 0 if history is None else history.total

    def add(self, asked: Asked, completion_len: int) -> None:
        """A request has finished."""
        if self._end == len(self._buffer):
            kept = self._buffer[self._start : self._end].copy()
            self._start, self._end = 0, len(kept)
            self._buffer[: self._end] = kept
        self._buffer[self._end] = asked.record(completion_len)
        self._end += 1
        self._start = max(self._start, self._end - CAPACITY)
        self.total += 1

    @property
    def records(self) -> Records:
        """The newest records; valid until the next ``add``."""
        return self._buffer[self._start : self._end]

    def history(self) -> History:
        """A copy that stays as it is."""
        return History(self.records.copy(), self.total)


@lru_cache(maxsize=4096)
def tenant_bucket(tenant: str) -> int:
    """The bucket of a tenant; the same in every process."""
    return hashlib.sha256(tenant.encode()).digest()[0] % TENANT_BUCKETS


def baseline(records: Records, first: int, asked: Requests) -> Float64[np.ndarray, " requests"]:
    """The rolling quantile for each request asked about, in ids; NaN where too little had finished.

    It is the quantile over the remembered requests whose ``max_tokens`` lie between the same powers of two, of all if
    those are few, and never more than ``max_tokens``.

    Args:
        records: the remembered requests, oldest first.
        first: how many finished before the oldest of them.
        asked: requests, each with what it knew.
    """
    classes = _classes(records)
    lengths = records[:, Column.COMPLETION]
    found = np.full(len(asked), math.nan)
    for index, (request, own) in enumerate(zip(asked, _classes(asked), strict=True)):
        known = int(request[Column.KNOWN]) - first
        if known < MIN_KNOWN:
            continue
        seen = lengths[:known]
        alike = seen[classes[:known] == own]
        sample = alike if len(alike) >= MIN_CLASS else seen
        rank = math.ceil(QUANTILE * len(sample)) - 1
        found[index] = min(max(np.partition(sample, rank)[rank], 1.0), request[Column.MAX_TOKENS])
    return found


def features(records: Records, first: int, asked: Requests, base: Float64[np.ndarray, " requests"]) -> Features:
    """What the LSTM reads for each request asked about: the window before it, then the request itself.

    Args:
        records: the remembered requests, oldest first.
        first: how many finished before the oldest of them.
        asked: requests, each with what it knew.
        base: their ``baseline``, without NaN.
    """
    places = asked[:, Column.KNOWN, None].astype(np.int64) - first - WINDOW + np.arange(WINDOW)
    present = (places >= 0) & (places < len(records))
    window = records[np.clip(places, 0, max(len(records) - 1, 0))] if len(records) else np.zeros((*places.shape, 6))
    steps = np.concatenate([window, asked[:, None]], axis=1)
    valid = np.concatenate([present, np.ones((len(asked), 1), bool)], axis=1)
    result = np.zeros((len(asked), WINDOW + 1, NUM_FEATURES), np.float64)
    result[..., 0] = log_length(steps[..., Column.PROMPT])
    result[..., 1] = log_length(steps[..., Column.MAX_TOKENS])
    result[..., 2] = log_length(1000.0 * steps[..., Column.GAP_S])
    result[..., 3] = steps[..., Column.BUCKET] == asked[:, None, Column.BUCKET]
    result[:, :-1, 4] = log_length(window[..., Column.COMPLETION])
    result[..., 5] = 1.0
    result[:, -1, 6] = 1.0
    result[:, -1, 7] = log_length(base)
    result[..., _STEP_FEATURES:] = steps[..., Column.BUCKET, None] == np.arange(TENANT_BUCKETS)
    return np.where(valid[..., None], result, 0.0).astype(np.float32)


def log_length(tokens: np.ndarray) -> np.ndarray:
    """A length as the LSTM sees it."""
    return np.asarray((np.log2(1.0 + tokens) - _LOG_MIDDLE) / _LOG_SPREAD)


def from_log_length(scaled: np.ndarray) -> np.ndarray:
    """The length that ``log_length`` gives."""
    return np.asarray(np.exp2(np.asarray(scaled, np.float64) * _LOG_SPREAD + _LOG_MIDDLE) - 1.0)


def pinball(predicted: np.ndarray, actual: np.ndarray) -> np.ndarray:
    """The loss whose least mean value is at the quantile: a token too few costs QUANTILE, one too many the rest.

    Source: Koenker and Bassett, "Regression Quantiles", Econometrica 46 (1978).
    """
    missing = np.asarray(actual, np.float64) - predicted
    return np.maximum(QUANTILE * missing, (QUANTILE - 1.0) * missing)


def _classes(records: Records) -> np.ndarray:
    return np.floor(np.log2(np.maximum(records[:, Column.MAX_TOKENS], 1.0)))
