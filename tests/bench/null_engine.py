"""The appliance around a null model: everything is real but the programs, which compute nothing and sample one id.

Run as ``python -m tests.bench.null_engine serve --config FILE`` for ``zccp serve``; as a child it is the engine.
"""

import sys
from collections.abc import Callable
from pathlib import Path

from appliance import engine_main
from appliance.assignment import Assignment
from appliance.bench.step_programs import SAMPLED_ID, null_device
from appliance.config import load
from appliance.engine import Engine
from appliance.engine_metrics import EngineObserver
from appliance.engine_ports import Gateway
from appliance.lifecycle import Commands, serve
from appliance.model.library import ModelLibrary
from appliance.model.record import read_record
from appliance.planning import plan_for
from appliance.submission import ModelLimits
from appliance.telemetry import configure_logging
from appliance.wiring import schedule_settings
from planner.pages import PagePool
from planner.schedule import Scheduler


def build_engine(
    assignment: Assignment, gateway: Gateway, observer: EngineObserver, announce: Callable[[str], None]
) -> tuple[Engine, ModelLimits]:
    """An engine over null programs of the plan that the configuration gives for its model."""
    config = assignment.config
    plan = plan_for(config, read_record(Path(assignment.model)))
    announce("compiling null programs")
    device = null_device(plan, lambda _done, _total: None)
    scheduler = Scheduler(plan.lattice, PagePool(plan.num_pages, plan.page_size), schedule_settings(plan, config))
    vocab = plan.architecture.vocab
    engine = Engine(
        device.weights, device.state, device.programs, scheduler, gateway, vocab=vocab, metrics=observer
    )  # fmt: skip
    return engine, ModelLimits(vocab=vocab, context=plan.context, eos_ids=frozenset({SAMPLED_ID + 1}))


def main() -> int:
    """Serve, or be the engine."""
    if sys.argv[1] != "serve":
        return engine_main.main(sys.argv, build_engine)
    config = load(Path(sys.argv[sys.argv.index("--config") + 1]))
    configure_logging(config.log.level, "main")
    folder = ModelLibrary(config.home).ensure(config.model.reference)
    return serve(config, folder, Commands(engine=(sys.executable, "-m", "tests.bench.null_engine")))


if __name__ == "__main__":
    sys.exit(main())
