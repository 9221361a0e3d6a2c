"""A predictor of lengths that has learned as much as it can keep, for benches: full history, LSTM in use, no training.

Owns nothing that runs beside the engine. The LSTM's arrays are zeros, so that it answers what the baseline answers, at
the price of both.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from appliance.prediction import LengthForecast, PredictionMetrics
from appliance.prediction_state import PredictionState, save
from planner.history import CAPACITY, Asked, HistoryKeeper
from planner.length_model import SHAPES, LengthModel, Scores, Trained

MODEL = "bench"


class _NeverTrains:
    """A trainer that is never asked, since the forecast's thread is not started."""

    def train(self, state: PredictionState) -> Trained:
        """Not called.

        Raises:
            AssertionError: it was.
        """
        raise AssertionError(f"nothing is trained here: {len(state.history.records)} records")

    def stop(self) -> None:
        """Nothing runs."""


def learned_forecast(path: Path, lengths: Sequence[tuple[int, int]], metrics: PredictionMetrics) -> LengthForecast:
    """A forecast that remembers CAPACITY requests.

    Args:
        path: its state file, written here.
        lengths: prompt and output ids of the requests, again from the beginning where they are fewer.
        metrics: what is counted.
    """
    keeper = HistoryKeeper()
    for number in range(CAPACITY):
        prompt, output = lengths[number % len(lengths)]
        keeper.add(Asked(prompt, output, bucket=0, gap_s=0.01, known=keeper.total), output)
    model = LengthModel(**{name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()})
    trained = Trained(model, Scores(lstm=1.0, baseline=2.0, held_out=CAPACITY // 4, use_lstm=True))
    save(path, PredictionState(MODEL, keeper.history(), trained))
    return LengthForecast(path, MODEL, _NeverTrains(), metrics)
