"""Made-up traces of requests for the predictor: one with a signal that only the recent past holds, one with none."""

import numpy as np

from planner.history import CAPACITY, Asked, History, HistoryKeeper, tenant_bucket


def regimes(seed: int, count: int = CAPACITY) -> History:
    """Three short answers, then three long ones, and so on, with a slip of the beat now and then.

    Nothing in a request tells which it will be; the requests before it do. One request is under way at a time.
    """
    rng = np.random.default_rng(seed)
    beat, lengths = 0, np.empty(count)
    for place in range(count):
        beat += 1 + (rng.random() < 0.02)
        lengths[place] = rng.lognormal(np.log(480 if beat % 6 >= 3 else 60), 0.25)
    return _history(rng, lengths.astype(int).tolist(), running=1)


def noise(seed: int, count: int = CAPACITY) -> History:
    """Lengths of a wide distribution that nothing tells anything about; eight requests are under way at a time."""
    rng = np.random.default_rng(seed)
    return _history(rng, rng.lognormal(np.log(160), 1.0, count).astype(int).tolist(), running=8)


def _history(rng: np.random.Generator, lengths: list[int], running: int) -> History:
    keeper = HistoryKeeper()
    for place, length in enumerate(lengths):
        asked = Asked(
            prompt_len=int(rng.integers(10, 2000)),
            max_tokens=4096,
            bucket=tenant_bucket(f"tenant-{rng.integers(3)}"),
            gap_s=float(rng.exponential(0.2)),
            known=max(0, place - running + 1),
        )
        keeper.add(asked, max(1, min(length, asked.max_tokens)))
    return keeper.history()
