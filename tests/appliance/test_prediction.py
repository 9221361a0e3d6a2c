"""The predictor around its model: what it counts, when it trains, what it survives; and the real training process."""

import threading
from dataclasses import dataclass, field
from pathlib import Path

import jax
import numpy as np
import pytest
from structlog.testing import capture_logs

from appliance.config import training_environment
from appliance.prediction import TRAIN_EVERY, LengthForecast, TrainingError, TrainingProcess, state_file
from appliance.prediction_state import PredictionState, load
from planner.history import MIN_KNOWN, Column, History
from planner.length_model import MIN_HISTORY, SHAPES, LengthModel, Scores, Trained
from planner.sequence import FinishReason, Sampling, Sequence
from tests.support.engine_rig import EngineRig
from tests.support.traces import noise, regimes

WAIT_S = 300.0  # the training process yields to everything else that runs


def a_model(seed: int = 0) -> LengthModel:
    rng = np.random.default_rng(seed)
    return LengthModel(**{name: np.asarray(rng.normal(size=shape), np.float32) for name, shape in SHAPES.items()})


def trained(*, use_lstm: bool, seed: int = 0) -> Trained:
    return Trained(a_model(seed), Scores(lstm=10.0, baseline=20.0, held_out=100, use_lstm=use_lstm))


@dataclass
class Counts:
    """What was counted, in order."""

    predictions: list[str] = field(default_factory=list)
    scores: list[tuple[float, float, bool]] = field(default_factory=list)
    trainings: list[str] = field(default_factory=list)

    def predicted(self, source: str) -> None:
        self.predictions.append(source)

    def scored(self, lstm_loss: float, baseline_loss: float, *, use_lstm: bool) -> None:
        self.scores.append((lstm_loss, baseline_loss, use_lstm))

    def trained(self, outcome: str) -> None:
        self.trainings.append(outcome)


@dataclass
class ScriptedTrainer:
    """Gives what the test says, when the test lets it."""

    outcome: Trained | Exception = field(default_factory=lambda: trained(use_lstm=True))
    asked: list[PredictionState] = field(default_factory=list)
    go: threading.Event = field(default_factory=threading.Event)
    began: threading.Event = field(default_factory=threading.Event)
    stopped: bool = False

    def __post_init__(self) -> None:
        self.go.set()

    def train(self, state: PredictionState) -> Trained:
        self.asked.append(state)
        self.began.set()
        assert self.go.wait(WAIT_S)
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome

    def stop(self) -> None:
        self.stopped = True
        self.go.set()


class Desk:
    """A predictor over requests that the test makes up."""

    def __init__(self, folder: Path, trainer: ScriptedTrainer | TrainingProcess | None = None) -> None:
        self.trainer = trainer or ScriptedTrainer()
        self.counts = Counts()
        self.path = state_file(folder, "small")
        self.forecast = LengthForecast(self.path, "small", self.trainer, self.counts)
        self.forecast.start()
        self.made = 0

    def ask(
        self, max_tokens: int = 4096, choices: int = 1, prompt_len: int = 20
    ) -> tuple[float | None, list[Sequence]]:
        made = [
            Sequence(
                self.made + i, "r", "t", [1] * prompt_len, prompt_len, Sampling(max_tokens), arrival_s=0.1 * self.made
            )
            for i in range(choices)
        ]
        self.made += choices
        return self.forecast.expect(made), made

    def end(self, sequence: Sequence, length: int, reason: FinishReason = FinishReason.STOP) -> None:
        for _ in range(length):
            sequence.ids.append(1)
        sequence.finish_reason = reason
        self.forecast.ended(sequence)

    def finish(self, lengths: list[int]) -> None:
        for length in lengths:
            self.end(self.ask()[1][0], length)

    def settle(self) -> None:
        """Wait until the thread has nothing left to do."""
        done = threading.Event()
        threading.Thread(target=lambda: (self._wait(), done.set()), daemon=True).start()
        assert done.wait(WAIT_S)

    def _wait(self) -> None:
        pause = threading.Event()
        while self.forecast._training:
            pause.wait(0.002)


@pytest.fixture
def desk(tmp_path: Path):
    made = Desk(tmp_path)
    yield made
    made.forecast.close()


# ---------------------------------------------------------------------- predicting


def test_nothing_is_expected_before_enough_has_finished_then_the_quantile_is(desk: Desk) -> None:
    desk.finish([100] * (MIN_KNOWN - 1))
    assert desk.ask()[0] is None
    desk.finish([100])
    assert desk.ask()[0] == 100.0
    assert desk.ask(max_tokens=30)[0] == 30.0
    assert desk.counts.predictions == ["baseline", "baseline"]


def test_only_requests_that_ended_by_themselves_are_remembered(desk: Desk) -> None:
    for reason in FinishReason:
        _, (sequence,) = desk.ask()
        desk.end(sequence, 7, reason)
    records = desk.forecast._keeper.records
    assert records[:, Column.COMPLETION].tolist() == [7.0, 7.0]  # stop and length
    assert not desk.forecast._asked, "nothing is kept of a request that has ended"


def test_a_record_holds_what_was_known_at_admission(desk: Desk) -> None:
    _, first = desk.ask(max_tokens=50, choices=3, prompt_len=11)
    _, (other,) = desk.ask(prompt_len=5)
    for sequence in (first[1], other, first[0], first[2]):
        desk.end(sequence, 9)
    records = desk.forecast._keeper.records
    assert records[:, Column.PROMPT].tolist() == [11, 5, 11, 11]
    assert records[:, Column.MAX_TOKENS].tolist() == [50, 4096, 50, 50]
    assert records[:, Column.KNOWN].tolist() == [0, 0, 0, 0]
    assert records[:, Column.GAP_S].tolist() == pytest.approx([0.0, 0.3, 0.0, 0.0])
    _, (late,) = desk.ask()
    desk.end(late, 1)
    assert desk.forecast._keeper.records[-1, Column.KNOWN] == 4


def test_a_sequence_that_was_never_asked_about_is_ignored(desk: Desk) -> None:
    desk.end(Sequence(77, "r", "t", [1], 1, Sampling(4), 0.0), 2)
    assert desk.forecast._keeper.total == 0


# ---------------------------------------------------------------------- training


def test_a_training_every_so_many_requests_and_never_two(desk: Desk) -> None:
    trainer = desk.trainer
    trainer.go.clear()
    desk.finish([100] * (MIN_HISTORY - 1))
    assert trainer.asked == []
    desk.finish([100])
    assert trainer.began.wait(WAIT_S)
    assert desk.ask()[0] == 100.0
    desk.finish([100] * (TRAIN_EVERY + 5))  # the first training is still under way
    assert [state.history.total for state in trainer.asked] == [MIN_HISTORY]
    trainer.go.set()
    desk.settle()
    desk.finish([100])
    desk.settle()
    assert [state.history.total for state in trainer.asked] == [MIN_HISTORY, MIN_HISTORY + TRAIN_EVERY + 6]
    assert desk.counts.trainings == ["done", "done"]


@pytest.mark.parametrize("use_lstm", [True, False])
def test_the_lstm_predicts_only_if_the_gate_let_it_in(tmp_path: Path, use_lstm: bool) -> None:
    desk = Desk(tmp_path, ScriptedTrainer(trained(use_lstm=use_lstm)))
    desk.finish([100] * MIN_HISTORY)
    desk.settle()
    desk.counts.predictions.clear()
    expected, _ = desk.ask()
    assert (expected == 100.0) is not use_lstm
    assert desk.counts.predictions == ["lstm" if use_lstm else "baseline"]
    assert desk.counts.scores == [(10.0, 20.0, use_lstm)]
    desk.forecast.close()


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (TrainingError("signal SIGKILL: "), "a training of the length predictor failed; the baseline predicts"),
        (RuntimeError("odd"), "the length predictor is at fault"),
    ],
)
def test_after_a_failed_training_the_baseline_predicts_until_the_next(
    tmp_path: Path, fault: Exception, said: str
) -> None:
    desk = Desk(tmp_path)
    desk.finish([100] * MIN_HISTORY)
    desk.settle()
    assert desk.ask()[0] != 100.0
    desk.trainer.outcome = fault
    with capture_logs() as lines:
        desk.finish([100] * TRAIN_EVERY)
        desk.settle()
    assert [line["event"] for line in lines] == [said]
    assert desk.ask()[0] == 100.0
    desk.trainer.outcome = trained(use_lstm=True)
    desk.finish([100] * TRAIN_EVERY)
    desk.settle()
    assert desk.ask()[0] != 100.0
    assert [use_lstm for _, _, use_lstm in desk.counts.scores] == [True, False, True]
    desk.forecast.close()


def test_closing_ends_a_training_without_a_word(tmp_path: Path) -> None:
    desk = Desk(tmp_path, ScriptedTrainer(TrainingError("killed")))
    desk.trainer.go.clear()
    desk.finish([100] * MIN_HISTORY)
    with capture_logs() as lines:
        desk.forecast.close()
    assert desk.trainer.stopped
    assert not desk.forecast._thread.is_alive()
    assert (lines, desk.counts.trainings) == ([], [])


# ---------------------------------------------------------------------- keeping


def test_predictions_are_the_same_after_a_restart(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.finish([int(n) for n in noise(0).records[:700, Column.COMPLETION]])
    desk.settle()
    desk.finish([3, 4, 5])
    desk.forecast.close()
    again = Desk(tmp_path)
    assert again.counts.scores == [(10.0, 20.0, True)]
    desk.forecast._last_arrival_s = again.forecast._last_arrival_s = 0.0
    for max_tokens in (10, 100, 1000, 4000):
        sequence = Sequence(123_456, "r", "t", [1] * 33, 33, Sampling(max_tokens), arrival_s=0.25)
        one, other = desk.forecast.expect([sequence]), again.forecast.expect([sequence])
        assert one == other
        assert one is not None
        desk.forecast._last_arrival_s = again.forecast._last_arrival_s = 0.0
    again.forecast.close()


def test_a_state_of_another_model_is_refused_and_replaced(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.finish([100] * MIN_HISTORY)
    desk.settle()
    desk.forecast.close()
    with capture_logs() as lines:
        other = LengthForecast(desk.path, "large", ScriptedTrainer(), Counts())
    assert [line["event"] for line in lines] == ["the state of the length predictor is refused; it starts anew"]
    assert "of model small; zccp-prediction-1 of large is needed" in lines[0]["cause"]
    assert other._keeper.total == 0
    other.start()
    other.close()
    state = load(desk.path, "large")
    assert state is not None
    assert state.history.total == 0


def test_a_place_that_cannot_be_written_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "prediction").write_text("a file where the folder should be")
    with capture_logs() as lines:
        desk = Desk(tmp_path)
        desk.finish([100] * MIN_HISTORY)
        desk.settle()
        assert desk.ask()[0] is not None
        desk.forecast.close()
    assert {line["log_level"] for line in lines} <= {"warning", "info"}
    assert "the state of the length predictor was not saved" in [line["event"] for line in lines]


# ---------------------------------------------------------------------- in the engine


def test_the_engine_asks_for_every_request_and_tells_every_end(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    rig = EngineRig(forecast=desk.forecast)
    for salt in range(MIN_KNOWN):
        rig.submit([salt % 7, 1, 2], 5)
    rig.submit([1] * 5000, 5)  # too long: refused, so nobody asks
    (cancelled,) = rig.submit([9, 9], 50)
    rig.step()
    rig.cancel(cancelled)
    rig.settle()
    assert desk.forecast._keeper.total == MIN_KNOWN
    assert not desk.forecast._asked
    keys = rig.submit([5, 5], 30, n=2)
    rig.step()
    assert [rig.requests[key].expected_len for key in keys] == [5.0, 5.0]
    rig.settle()
    desk.forecast.close()


def test_a_predictor_that_breaks_is_left_out(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    rig = EngineRig(forecast=desk.forecast)
    rig.submit([1, 2], 5)
    rig.step()
    desk.forecast._keeper = None  # type: ignore[assignment]
    with capture_logs() as lines:
        for salt in range(5):
            rig.submit([1, salt], 5)
        rig.settle()
    rig.assert_exact()
    assert [line["event"] for line in lines] == ["lengths are not predicted any more"]


# ---------------------------------------------------------------------- the real process


def test_training_happens_elsewhere_and_nothing_compiles_here(tmp_path: Path) -> None:
    """A whole cycle: requests, a training in its process, predictions by the LSTM; no event of any compilation."""
    events: list[str] = []

    def listen(event: str, _seconds: float, **_: str | int) -> None:
        events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        desk = Desk(tmp_path / "home", TrainingProcess(tmp_path, training_environment()))
        desk.finish([int(n) for n in regimes(0).records[:MIN_HISTORY, Column.COMPLETION]])
        desk.settle()
        assert desk.counts.trainings == ["done"]
        ((lstm, baseline, use_lstm),) = desk.counts.scores
        assert use_lstm
        assert lstm < 0.8 * baseline
        desk.finish([500, 500, 60])
        assert desk.counts.predictions[-1] == "lstm"
        desk.forecast.close()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert [event for event in events if "compile" in event or "trace" in event] == []
    assert [path.name for path in tmp_path.iterdir()] == ["home"], "the processes leave no files behind"


def test_a_training_process_that_fails_says_why(tmp_path: Path) -> None:
    process = TrainingProcess(tmp_path, training_environment())
    few = History(noise(0, count=30).records, 30)
    with pytest.raises(TrainingError, match=f"exit code 1: 30 finished requests; at least {MIN_HISTORY} are needed"):
        process.train(PredictionState("small", few, None))


def test_a_training_process_can_be_stopped(tmp_path: Path) -> None:
    process = TrainingProcess(tmp_path, training_environment())
    process.stop()
    with pytest.raises(TrainingError, match="the engine closes"):
        process.train(PredictionState("small", noise(0), None))


def test_the_training_process_sees_no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    environment = training_environment()
    assert (environment["JAX_PLATFORMS"], environment["CUDA_VISIBLE_DEVICES"]) == ("cpu", "")
