"""The engine as it is served, in this process: its programs from the store, its loop, and a gateway that keeps ids.

Owns nothing of the engine but the place of its HTTP side; loading goes through the composition root that the engine
process uses.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from prometheus_client import CollectorRegistry

from appliance.assignment import Assignment
from appliance.bench.runner import BenchError
from appliance.config import ApplianceConfig
from appliance.engine_metrics import EngineObserver
from appliance.engine_ports import Arrival, Cancellation, Emission, EngineReport
from appliance.telemetry import Metrics
from appliance.wiring import build_engine
from planner.formats import WeightForm
from planner.sequence import FinishReason, Sampling
from planner.sequence import Sequence as Stream


def with_form(config: ApplianceConfig, form: WeightForm) -> ApplianceConfig:
    """The configuration with another weight form."""
    return msgspec.structs.replace(config, engine=msgspec.structs.replace(config.engine, weight_form=str(form)))


class _KeepingGateway:
    """Gives out the requests it was made with, once, and keeps what comes back."""

    def __init__(self, arrivals: Sequence[Arrival]) -> None:
        self._inbox: list[Arrival | Cancellation] = list(arrivals)
        self.ids: dict[int, list[int]] = {arrival.sequences[0].key: [] for arrival in arrivals}
        self.problems: list[str] = []

    def receive(self, timeout_s: float) -> list[Arrival | Cancellation]:
        """Everything, at the first call."""
        del timeout_s
        inbox, self._inbox = self._inbox, []
        return inbox

    def admitted(self, key: int) -> None:
        """Nothing to tell anybody."""

    def refused(self, key: int, kind: str, message: str, retry_after_s: float) -> None:
        """Keep the refusal."""
        del retry_after_s
        self.problems.append(f"request {key} was refused as {kind}: {message}")

    def publish(self, emissions: list[Emission]) -> None:
        """Keep the ids."""
        for emission in emissions:
            self.ids[emission.key] += emission.ids
            if emission.finish is not None and emission.finish.reason is not FinishReason.LENGTH:
                self.problems.append(
                    f"request {emission.key} ended by {emission.finish.reason}: {emission.finish.error}"
                )

    def report(self, report: EngineReport) -> None:
        """Nothing to tell anybody."""


class InlineEngine:
    """Loads the engine for each call and lets it go afterwards, since its pool of pages is large."""

    def __init__(self, config: ApplianceConfig, folder: Path) -> None:
        """Serve the model in ``folder`` under ``config``."""
        self._config = config
        self._folder = folder

    def greedy(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, announce: Callable[[str], None] = lambda _: None
    ) -> list[list[int]]:
        """Exactly ``new_tokens`` greedy ids for each prompt, all of them served together.

        Raises:
            BenchError: a request was refused or ended early.
        """
        sampling = Sampling(max_tokens=new_tokens, temperature=0.0)
        streams = [
            Stream(key, f"r{key}", "bench", list(prompt), len(prompt), sampling, arrival_s=0.0)
            for key, prompt in enumerate(prompts)
        ]
        gateway = _KeepingGateway([Arrival((stream,)) for stream in streams])
        observer = EngineObserver(Metrics(CollectorRegistry()))
        engine, _ = build_engine(self._assignment(), gateway, observer, announce)
        engine.step()
        while not engine.idle:
            engine.step()
        if gateway.problems:
            raise BenchError("; ".join(gateway.problems[:3]))
        return [gateway.ids[stream.key] for stream in streams]

    def _assignment(self) -> Assignment:
        return Assignment(
            role="engine",
            index=0,
            parent_pid=os.getppid(),
            notify_fd=-1,
            epoch=1,
            port=0,
            segments_file="",
            socket="",
            metrics="",
            model=str(self._folder),
            config=self._config,
        )
