"""The served engine in this process, asked in bursts, with the moments of first ids and the cost of finding prefixes.

Owns a gateway that is filled while the engine turns, and the watch on ``planner.prefixes``.
"""

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

from prometheus_client import CollectorRegistry

from appliance.bench.inline_engine import KeepingGateway
from appliance.bench.runner import BenchError
from appliance.engine import Engine
from appliance.engine_ports import Arrival, Cancellation, Emission
from planner.pages import PagePool
from planner.prefixes import Prefixes
from planner.sequence import Sampling
from planner.sequence import Sequence as Stream

TOP = 5
_WATCHED = ("submitted", "resident", "awaits", "entered", "next_end", "publish", "left")


class BurstGateway(KeepingGateway):
    """Keeps, of each request, ids, log-probabilities, how many ids were reused and when the first id came."""

    def __init__(self) -> None:
        super().__init__(())
        self.due: list[tuple[float, Arrival]] = []
        self.first_s: dict[int, float] = {}
        self.cached: dict[int, int] = {}
        self.top: dict[int, list[dict[int, float]]] = {}

    def receive(self, timeout_s: float) -> list[Arrival | Cancellation]:
        """What is due by now."""
        del timeout_s
        now_s = time.monotonic()
        come: list[Arrival | Cancellation] = [arrival for due_s, arrival in self.due if due_s <= now_s]
        self.due = [entry for entry in self.due if entry[0] > now_s]
        return come

    def publish(self, emissions: list[Emission]) -> None:
        """Keep all of it."""
        super().publish(emissions)
        for emission in emissions:
            if emission.ids:
                self.first_s.setdefault(emission.key, time.monotonic())
            self.top[emission.key] += [dict(record) for record in emission.logprobs]
            if emission.finish is not None:
                self.cached[emission.key] = emission.finish.cached_tokens


class Asked:
    """What came of one call of ``ask``: ids, likeliest ids, reused ids and seconds to the first id, by request."""

    def __init__(self, gateway: BurstGateway, keys: Sequence[int], due_s: Sequence[float]) -> None:
        self.ids = [gateway.ids[key] for key in keys]
        self.top = [gateway.top[key] for key in keys]
        self.cached = [gateway.cached[key] for key in keys]
        self.first_s = [gateway.first_s[key] - due for key, due in zip(keys, due_s, strict=True)]


class BurstEngine:
    """An engine and its gateway; requests of later calls may reuse what earlier ones left."""

    def __init__(self, build: Callable[[KeepingGateway], Engine], registry: CollectorRegistry) -> None:
        self._gateway = BurstGateway()
        self._registry = registry
        self._engine = build(self._gateway)
        self._made = 0
        self.steps_s = 0.0

    @property
    def loaded(self) -> int:
        """Pages that came from the host tier so far."""
        return self._engine.scheduler.reuse.tier.hits

    def tier_hits(self, tier: str) -> float:
        """Pages that a tier gave so far, as its metric counts them."""
        return self._registry.get_sample_value("zccp_tier_pages_total", {"tier": tier, "event": "hit"}) or 0.0

    def shrink(self, positions: int) -> PagePool:
        """Leave so many positions of the pool, and take the rest out of use for good."""
        pool = self._engine.scheduler.pool
        pool.take(pool.num_pages - pool.pages_for(positions))
        return pool

    def close(self) -> None:
        """Let go of what is held beside the pool."""
        self._engine.run(lambda: True)

    def ask(self, prompts: Sequence[Sequence[int]], new_tokens: int, apart_s: float = 0.0) -> Asked:
        """Greedy ids for each prompt, which come so many seconds one after the other.

        Raises:
            BenchError: a request was refused or ended early.
        """
        began_s, keys, due_s = time.monotonic(), [], []
        sampling = Sampling(max_tokens=new_tokens, temperature=0.0, top_logprobs=TOP)
        for number, prompt in enumerate(prompts):
            key, due = self._made, began_s + number * apart_s
            self._made += 1
            stream = Stream(key, f"r{key}", "bench", list(prompt), len(prompt), sampling, arrival_s=due)
            self._gateway.ids[key], self._gateway.top[key] = [], []
            self._gateway.due.append((due, Arrival((stream,))))
            keys.append(key)
            due_s.append(due)
        while self._gateway.due or not self._engine.idle:
            self._engine.step()
        self.steps_s += time.monotonic() - began_s
        if self._gateway.problems:
            raise BenchError("; ".join(self._gateway.problems[:3]))
        return Asked(self._gateway, keys, due_s)


@contextmanager
def watched_prefixes() -> Generator[list[float]]:
    """A list that grows by the CPU seconds of every call into ``Prefixes`` while the context is open."""
    spent: list[float] = []
    inside = [False]
    plain = {name: getattr(Prefixes, name) for name in _WATCHED}

    def watched(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if inside[0]:
                return method(*arguments)
            inside[0], began_s = True, time.thread_time()
            try:
                return method(*arguments)
            finally:
                spent.append(time.thread_time() - began_s)
                inside[0] = False

        return call

    for name, method in plain.items():
        setattr(Prefixes, name, watched(method))
    try:
        yield spent
    finally:
        for name, method in plain.items():
            setattr(Prefixes, name, method)
