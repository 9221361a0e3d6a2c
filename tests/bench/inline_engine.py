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
from appliance.bench.inline_engine import greedy_gateway, run_to_end
from appliance.config import ApplianceConfig
from appliance.engine_metrics import EngineObserver
from appliance.telemetry import Metrics
from appliance.wiring import build_engine
from planner.formats import WeightForm


def with_form(config: ApplianceConfig, form: WeightForm) -> ApplianceConfig:
    """The configuration with another weight form."""
    return msgspec.structs.replace(config, engine=msgspec.structs.replace(config.engine, weight_form=str(form)))


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
        gateway = greedy_gateway(prompts, new_tokens)
        observer = EngineObserver(Metrics(CollectorRegistry()))
        engine, _ = build_engine(self.assignment(), gateway, observer, announce)
        return run_to_end(engine, gateway)

    def assignment(self) -> Assignment:
        """What an engine process would be told."""
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
