"""The budget of a start: read from the log of the processes, told as results, the largest part in words."""

import json
from types import SimpleNamespace
from typing import Self

import pytest

from appliance.bench import start
from appliance.bench.runner import BenchError
from appliance.bench.served import Served
from appliance.engine_main import _Phases

LINES = [
    {"event": "starting", "doing": "loading programs"},
    {"event": "processes started", "after_s": 0.5, "workers": 1},
    {"event": "engine ready", "after_s": 3.0, "phases": {"starting the process": 1.0, "restoring weights": 2.0}},
]


def test_every_second_of_a_start_belongs_to_one_part() -> None:
    parts = start.budget(LINES, 3.75)
    assert parts == {
        "main process": 0.5,
        "engine: starting the process": 1.0,
        "engine: restoring weights": 2.0,
        "workers ready": 0.25,
    }
    assert list(parts) == ["main process", "engine: starting the process", "engine: restoring weights", "workers ready"]
    assert sum(parts.values()) == 3.75


@pytest.mark.parametrize("lines", [[], LINES[:2], [*LINES[:2], {"event": "engine ready", "after_s": 3.0}]])
def test_a_log_that_does_not_tell_them_is_an_error(lines) -> None:
    with pytest.raises(BenchError, match="the log does not tell the parts of a start"):
        start.budget(lines, 3.75)


def test_parts_are_results_and_the_largest_is_named() -> None:
    budgets = [start.budget(LINES, total) for total in (3.75, 4.0, 5.0)]
    results = start.phase_results(budgets)
    assert [result.name for result in results] == [
        "main_process_s", "engine_starting_the_process_s", "engine_restoring_weights_s", "workers_ready_s",
    ]  # fmt: skip
    assert [(result.value, result.spread, result.met) for result in results][3] == (0.5, (0.25, 1.5), None)
    assert start.largest_phase(budgets) == (
        "the largest part of a start is engine: restoring weights: 2.00 s, 50% of all"
    )


def test_the_log_is_read_as_far_as_it_is_whole(tmp_path) -> None:
    log = tmp_path / "log"
    log.write_text("zccp is ready at http://x\n" + json.dumps(LINES[0]) + "\n" + json.dumps(LINES[1])[:20])
    assert Served("http://x", "m", 1, 1.0, log).log_lines() == LINES[:1]


def test_an_engine_tells_how_long_each_part_took() -> None:
    ages = iter([1.5, 1.75, 4.0, 4.5])
    phases = _Phases(lambda: next(ages))
    phases.enter("loading programs")
    phases.enter("restoring weights")
    assert phases.seconds() == {
        "starting the process": 1.5,
        "planning": 0.25,
        "loading programs": 2.25,
        "restoring weights": 0.5,
    }


def test_starts_are_repeated_and_the_last_one_serves(monkeypatch) -> None:
    class Serving:
        ready_s, model = 3.75, "m"

        def __init__(self, _config, overrides) -> None:
            assert overrides == {"log": {"level": "info"}}

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def log_lines(self) -> list[dict]:
            return LINES

        def metrics(self) -> dict[str, float]:
            return {"zccp_compilations_total": 0.0, "zccp_steps_total": 7.0}

    sent: list[int] = []
    monkeypatch.setattr(start, "serving", Serving)
    monkeypatch.setattr(start, "build_store", lambda *_: None)
    monkeypatch.setattr(start, "send_mixed", lambda _served, clients: sent.append(clients))
    found = start.run(SimpleNamespace(config=None, progress=lambda *_: None), repeats=3)
    assert sent == [8]
    assert [(result.name, result.value, result.repeats) for result in found.results[:3]] == [
        ("ready_s", 3.75, 3), ("compilations_after_ready", 0.0, 1), ("main_process_s", 0.5, 3),
    ]  # fmt: skip
    assert found.notes[0].startswith("the largest part of a start is engine: restoring weights: 2.00 s, 53%")
