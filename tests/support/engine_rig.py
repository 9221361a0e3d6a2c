"""An engine over the arithmetic model, stepped by hand, that checks every invariant after every step."""

from collections.abc import Sequence as Many
from dataclasses import dataclass, field

from appliance.engine import Engine
from appliance.engine_ports import Arrival, Cancellation, Emission, EngineReport, Finished, Forecast, PageMover
from planner.buckets import Bucket, Lattice
from planner.host_tier import HostTier
from planner.pages import PagePool
from planner.prefixes import PrefixSettings
from planner.schedule import Scheduler
from planner.schedule_values import SchedulerSettings
from planner.sequence import Sampling, Sequence
from tests.support.arithmetic_model import MOVED_PAGES, VOCAB, ArithmeticModel, continuation

LATTICE = Lattice(decode_slots=(2, 4), prefill_chunks=(16, 32), prefill_slots=4, widths=(2, 4, 8))


def prompt(length: int, salt: int = 0) -> list[int]:
    """Made-up prompt ids; different salts begin differently."""
    return [(7 * i + 13 * salt + i * i) % VOCAB for i in range(length)]


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class ListGateway:
    """Gives out what the test puts into ``inbox`` and notes everything that comes back."""

    inbox: list[Arrival | Cancellation] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    taken: list[int] = field(default_factory=list)
    refusals: dict[int, tuple[str, str, float]] = field(default_factory=dict)
    ids: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[tuple[tuple[int, float], ...]]] = field(default_factory=dict)
    finishes: dict[int, Finished] = field(default_factory=dict)
    reports: list[EngineReport] = field(default_factory=list)

    def receive(self, timeout_s: float) -> list[Arrival | Cancellation]:
        self.waits.append(timeout_s)
        inbox, self.inbox = self.inbox, []
        return inbox

    def admitted(self, key: int) -> None:
        self.taken.append(key)

    def refused(self, key: int, kind: str, message: str, retry_after_s: float) -> None:
        self.refusals[key] = kind, message, retry_after_s

    def publish(self, emissions: list[Emission]) -> None:
        assert emissions
        assert len({e.key for e in emissions}) == len(emissions), "one emission a sequence"
        for emission in emissions:
            assert emission.key not in self.finishes, "nothing comes after the finish"
            assert emission.ids or emission.finish
            ids = self.ids.setdefault(emission.key, [])
            ids += emission.ids
            self.logprobs.setdefault(emission.key, []).extend(emission.logprobs)
            assert emission.completion_len == len(ids), "no id is lost or told twice"
            if emission.finish is not None:
                self.finishes[emission.key] = emission.finish

    def report(self, report: EngineReport) -> None:
        self.reports.append(report)


@dataclass
class Tally:
    """Sums up what the engine counts."""

    launches: list[tuple[Bucket, int, int]] = field(default_factory=list)
    prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    steps: int = 0

    def launched(self, bucket: Bucket, rows: int, tokens: int) -> None:
        self.launches.append((bucket, rows, tokens))

    def stepped(self, host_s: float, prompt_tokens: int, generated_tokens: int, preemptions: int) -> None:
        assert host_s >= 0
        self.steps += 1
        self.prompt_tokens += prompt_tokens
        self.generated_tokens += generated_tokens
        self.preemptions += preemptions

    def reported(self, report: EngineReport) -> None:
        assert report.total_pages


class EngineRig:
    """See the module. Keys are given in the order of submission."""

    def __init__(
        self,
        num_pages: int = 64,
        page_size: int = 16,
        lattice: Lattice = LATTICE,
        align: int = 16,
        prefill_budget: int = 32,
        forecast: Forecast | None = None,
        prefixes: PrefixSettings = PrefixSettings(),  # noqa: B008 - a frozen value
        mover: PageMover | None = None,
        host_pages: int = 0,
        **bounds: int,
    ) -> None:
        self.clock = Clock()
        self.gateway = ListGateway()
        self.tally = Tally()
        settings = SchedulerSettings(prefill_budget=prefill_budget, chunk_align=align, prefixes=prefixes, **bounds)
        tier = HostTier(host_pages, MOVED_PAGES)
        self.scheduler = Scheduler(lattice, PagePool(num_pages, page_size), settings, tier)
        self.model = ArithmeticModel(lattice, num_pages, page_size, align, on_write=self._on_write)
        self.engine = Engine(
            "weights",
            self.model.state(),
            self.model.programs(),
            self.scheduler,
            self.gateway,
            vocab=VOCAB,
            metrics=self.tally,
            forecast=forecast,
            mover=mover,
            clock=self.clock,
        )
        self.requests: dict[int, Sequence] = {}

    def submit(
        self,
        prompt: Many[int],
        max_tokens: int = 8,
        *,
        n: int = 1,
        tenant: str = "t",
        deadline_s: float | None = None,
        **sampling: object,
    ) -> list[int]:
        """Put a request into the gateway's inbox; returns its keys."""
        seed = int(sampling.pop("seed", 5))  # type: ignore[call-overload]
        first = len(self.requests)
        choices = [
            Sequence(
                key=first + choice,
                request_id=f"r{first}",
                tenant=tenant,
                ids=list(prompt),
                prompt_len=len(prompt),
                sampling=Sampling(max_tokens=max_tokens, seed=seed + choice, **sampling),  # type: ignore[arg-type]
                arrival_s=self.clock.now_s,
                deadline_s=deadline_s,
            )
            for choice in range(n)
        ]
        self.requests.update({choice.key: choice for choice in choices})
        self.gateway.inbox.append(Arrival(tuple(choices)))
        return [choice.key for choice in choices]

    def cancel(self, *keys: int) -> None:
        self.gateway.inbox.append(Cancellation(keys))

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.engine.step()
            self.clock.now_s += 0.01
            self.scheduler.check()

    def settle(self, most: int = 2000) -> None:
        """Step until there is nothing left to do, then see that nothing is held."""
        for _ in range(most):
            self.step()
            if self.engine.idle and not self.gateway.inbox:
                self.assert_empty()
                return
        raise AssertionError(f"not idle after {most} steps: {self.gateway.reports[-1]}")

    def assert_empty(self) -> None:
        assert self.scheduler.pool.num_free == self.scheduler.pool.num_pages
        assert (self.scheduler.num_running, self.scheduler.num_waiting) == (0, 0)
        assert self.scheduler.num_waiting_tokens == 0
        assert set(self.gateway.finishes) | set(self.gateway.refusals) >= set(self.gateway.taken)

    def expected(self, key: int) -> list[int]:
        request = self.requests[key]
        return continuation(request.ids[: request.prompt_len], request.sampling, self.scheduler.capacity)

    def assert_exact(self, *keys: int) -> None:
        """The published ids are those of a sequence that runs alone."""
        for key in keys or self.gateway.taken:
            assert self.gateway.ids.get(key, []) == self.expected(key), f"sequence {key}"

    def _on_write(self, slot: int, page: int) -> None:
        """At dispatch, a row writes only into pages of the sequence that is in its slot, and of nobody else."""
        owners = [s for s in self.requests.values() if page in s.pages]
        assert [s.slot for s in owners] == [slot]
        assert self.scheduler.pool.references(page) == 1
