"""Leftovers: what is still held after a load, and figures that must be 0; shared by the benches soak and chaos."""

import time
from collections import Counter
from collections.abc import Callable, Collection

from appliance.bench.report import Result
from appliance.bench.served import Served

QUIET_S = 20.0
"""How long what is held may take to come back after the load."""


def held_after(served: Served, names: Collection[str], clock: Callable[[], float]) -> dict[str, float]:
    """The gauges of these names once all are 0 or had their time to come back."""
    deadline_s = clock() + QUIET_S
    while True:
        counts = served.metrics()
        held = {name: counts[name] for name in names}
        if not any(held.values()) or clock() > deadline_s:
            return held
        time.sleep(0.25)


def zero(name: str, value: float, unit: str) -> Result:
    """A figure whose target is 0."""
    return Result(name, value, unit, 1, (value, value), 0, "==")


def by_kind(counts: Counter[str]) -> str:
    """Counts in words, the most frequent first."""
    return ", ".join(f"{kind} {count}" for kind, count in counts.most_common())
