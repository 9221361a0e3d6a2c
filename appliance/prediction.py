"""LengthForecast: what lengths the engine should expect, learned from the requests that finished before.

Implements ``appliance.engine_ports.Forecast``. Owns the history, the model in use, the thread that has models trained,
and the state file. Never raises into the engine: what fails here is logged, and admission goes on without predictions.
Never imports jax.

1. ``expect``, on the engine's thread: the rolling quantile of the history, or the LSTM where the last training let it
   in (``planner.predict``). A few tenths of a millisecond, NumPy alone.
2. ``ended``, on the engine's thread: a request that ended by itself becomes a record. Every TRAIN_EVERY records, the
   thread is given a copy of the history, unless it is still busy with the last one.
3. The thread starts a process that trains (``appliance.prediction_training``), waits for it, and puts its model in use
   with one assignment. Then it saves the state. There is at most one training at a time. After one that failed, the
   baseline predicts.

A process, because in the engine's own the training would be compiled there or add its compilation to every start,
would run on XLA's threads at the priority of the steps, and could take the engine down with it.
"""

import math
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Literal, Protocol

import structlog

from appliance.host.process import ending
from appliance.prediction_state import PredictionState, StateError, load, remove_leftovers, save
from planner.history import Asked, HistoryKeeper, baseline, tenant_bucket
from planner.length_model import MIN_HISTORY, LengthModel, Trained, predict
from planner.sequence import FinishReason, Sequence

TRAIN_EVERY = 250
"""Finished requests from one training to the next."""

TRAINING_LIMIT_S = 1800.0
"""Time after which a training is given up; on a busy host it may wait long for a CPU."""

_CLOSE_S = 2.0
_COUNTED = frozenset({FinishReason.STOP, FinishReason.LENGTH})

_log = structlog.get_logger("zccp.prediction")


class PredictionMetrics(Protocol):
    """What is counted."""

    def predicted(self, source: Literal["lstm", "baseline"]) -> None:
        """The length of a request was predicted."""
        ...

    def scored(self, lstm_loss: float, baseline_loss: float, *, use_lstm: bool) -> None:
        """Both scores, in ids a request, and which of the two predicts from now on."""
        ...

    def trained(self, outcome: Literal["done", "failed"]) -> None:
        """A training is over."""
        ...


class TrainingError(RuntimeError):
    """A training gave no model; the message says why."""


class Trainer(Protocol):
    """Trains a model on a history; blocks until it is there."""

    def train(self, state: PredictionState) -> Trained:
        """Train.

        Raises:
            TrainingError: there is no model.
        """
        ...

    def stop(self) -> None:
        """End a training that runs; from any thread."""
        ...


class TrainingProcess:
    """Trains in a process of its own.

    Args:
        folder: where the two processes leave each other files; emptied by whoever made it.
        environment: of the training process.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._source, self._destination = folder / "history.state", folder / "trained.state"
        self._remove_files()  # those of an engine that was killed
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None
        self._parent = str(os.getpid())
        self._stopped = False

    def train(self, state: PredictionState) -> Trained:
        """Train in a new process and read its model.

        Raises:
            TrainingError: the process failed, took too long, was stopped, or left no usable model.
        """
        try:
            save(self._source, state)
            self._run(str(self._source), str(self._destination), state.model)
            found = load(self._destination, state.model)
        except (OSError, StateError) as error:
            raise TrainingError(str(error)) from error
        finally:
            self._remove_files()
        if found is None or found.trained is None:
            raise TrainingError("the training process left no model")
        return found.trained

    def stop(self) -> None:
        """Kill the process, now or as soon as there is one."""
        self._stopped = True
        process = self._process
        if process is not None:
            process.kill()

    def _remove_files(self) -> None:
        for file in (self._source, self._destination):
            file.unlink(missing_ok=True)
            remove_leftovers(file)

    def _run(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "appliance.prediction_training", *arguments, self._parent]
        with subprocess.Popen(  # noqa: S603 - our own program
            command,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            process_group=0,
        ) as process:
            self._process = process
            try:
                if self._stopped:
                    raise TrainingError("the engine closes")
                _, said = process.communicate(timeout=TRAINING_LIMIT_S)
            except subprocess.TimeoutExpired as error:
                raise TrainingError(f"it was not done after {TRAINING_LIMIT_S:.0f} s") from error
            finally:
                self._process = None
                process.kill()
        if process.returncode != 0:
            last = said.decode(errors="replace").strip().rpartition("\n")[2][:300]
            raise TrainingError(f"{ending(process.returncode)}: {last}")


class LengthForecast:
    """See the module.

    Args:
        path: the state file; what it holds for ``model`` is gone on from.
        model: name of the served model.
        trainer: trains models.
        metrics: what is counted.
    """

    def __init__(self, path: Path, model: str, trainer: Trainer, metrics: PredictionMetrics) -> None:
        self._path = path
        self._model = model
        self._trainer = trainer
        self._metrics = metrics
        remove_leftovers(path)
        state = _restored(path, model)
        self._keeper = HistoryKeeper(state.history if state else None)
        self._trained = state.trained if state else None
        self._asked: dict[int, Asked] = {}
        self._last_arrival_s: float | None = None
        self._since_training = 0
        self._training = False
        self._broken = False
        self._closing = False
        self._jobs: SimpleQueue[PredictionState | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="prediction", daemon=True)
        self._report()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def expect(self, choices: Many[Sequence]) -> float | None:
        """Completion ids that each choice of a request is expected to get; None: nothing is known."""
        if self._broken:
            return None
        try:
            return self._expect(choices)
        except Exception as error:  # noqa: BLE001 - a prediction is advice: without it everything works
            self._give_up(error)
            return None

    def ended(self, sequence: Sequence) -> None:
        """Remember how a request ended, and have a model trained when it is time."""
        if self._broken:
            return
        try:
            self._ended(sequence)
        except Exception as error:  # noqa: BLE001 - see expect
            self._give_up(error)

    def close(self) -> None:
        """End a training that runs, wait a moment for the thread, and save what is known."""
        self._closing = True
        self._trainer.stop()
        self._jobs.put(None)
        if self._thread.is_alive():
            self._thread.join(_CLOSE_S)
        self._save(PredictionState(self._model, self._keeper.history(), self._trained))

    # ------------------------------------------------------------------ on the engine's thread

    def _give_up(self, error: Exception) -> None:
        self._broken = True
        self._asked.clear()
        _log.error("lengths are not predicted any more", cause=type(error).__name__, exc_info=error)

    def _expect(self, choices: Many[Sequence]) -> float | None:
        first, keeper = choices[0], self._keeper
        gap_s = 0.0 if self._last_arrival_s is None else max(first.arrival_s - self._last_arrival_s, 0.0)
        self._last_arrival_s = first.arrival_s
        asked = Asked(
            prompt_len=first.prompt_len,
            max_tokens=first.sampling.max_tokens,
            bucket=tenant_bucket(first.tenant),
            gap_s=gap_s,
            known=keeper.total,
        )
        for choice in choices:
            self._asked[choice.key] = asked
        records, before, trained = keeper.records, keeper.total - len(keeper.records), self._trained
        model: LengthModel | None = trained.model if trained is not None and trained.scores.use_lstm else None
        if model is None:
            (found,) = baseline(records, before, asked.record())
        else:
            (found,) = predict(model, records, before, asked.record())
        if math.isnan(found):
            return None  # too little has finished
        self._metrics.predicted("baseline" if model is None else "lstm")
        return float(found)

    def _ended(self, sequence: Sequence) -> None:
        asked = self._asked.pop(sequence.key, None)
        if asked is None or sequence.finish_reason not in _COUNTED:
            return
        self._keeper.add(asked, sequence.completion_len)
        self._since_training += 1
        enough = self._since_training >= TRAIN_EVERY and len(self._keeper.records) >= MIN_HISTORY
        if enough and not self._training:
            self._since_training = 0
            self._training = True
            self._jobs.put(PredictionState(self._model, self._keeper.history(), self._trained))

    # ------------------------------------------------------------------ on the thread

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._train(job)
            except Exception as error:  # noqa: BLE001 - the next training may go better
                _log.error("the length predictor is at fault", cause=type(error).__name__, exc_info=error)
                self._distrust()
            finally:
                self._training = False

    def _train(self, job: PredictionState) -> None:
        try:
            trained = self._trainer.train(job)
        except TrainingError as error:
            if self._closing:
                return
            self._metrics.trained("failed")
            _log.warning("a training of the length predictor failed; the baseline predicts", cause=str(error))
            self._distrust()
            return
        self._trained = trained
        self._metrics.trained("done")
        self._report()
        scores = trained.scores
        _log.info(
            "the length predictor was trained",
            lstm_loss=round(scores.lstm, 2),
            baseline_loss=round(scores.baseline, 2),
            held_out=scores.held_out,
            use_lstm=scores.use_lstm,
        )
        self._save(PredictionState(self._model, job.history, trained))

    def _distrust(self) -> None:
        """Let the baseline predict until a training succeeds: scores of long ago say nothing of today's requests."""
        trained = self._trained
        if trained is not None:
            self._trained = Trained(trained.model, replace(trained.scores, use_lstm=False))
            self._report()

    # ------------------------------------------------------------------ on either

    def _report(self) -> None:
        trained = self._trained
        if trained is not None:
            scores = trained.scores
            self._metrics.scored(scores.lstm, scores.baseline, use_lstm=scores.use_lstm)

    def _save(self, state: PredictionState) -> None:
        try:
            save(self._path, state)
        except OSError as error:
            _log.warning("the state of the length predictor was not saved", path=str(self._path), cause=str(error))


def state_file(home: Path, model: str) -> Path:
    """Where the state of a model's predictor lies."""
    return home / "prediction" / f"{model}.state"


def _restored(path: Path, model: str) -> PredictionState | None:
    try:
        return load(path, model)
    except StateError as error:
        _log.warning("the state of the length predictor is refused; it starts anew", cause=str(error))
        return None
