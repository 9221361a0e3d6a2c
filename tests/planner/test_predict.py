"""The LSTM over made-up traces: it equals its plain form, and the gate lets it in only where there is a signal."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from planner.history import QUANTILE, Column, History, features, pinball
from planner.length_model import MIN_HISTORY, LengthModel, Trained, correction, predict
from planner.predict import NUM_BLOCKS, LengthLstm, passes_gate, to_model, train
from tests.support.traces import noise, regimes


@pytest.fixture(scope="module")
def learned() -> Trained:
    return train(regimes(0))


def asked_next(history: History, count: int = 5) -> np.ndarray:
    """Requests that come when all of the history has finished."""
    asked = history.records[-count:].copy()
    asked[:, Column.KNOWN], asked[:, Column.COMPLETION] = history.total, 0
    return asked


def random_model(seed: int) -> tuple[object, LengthModel]:
    """Parameters whose head is not zero, in both forms."""
    parameters = LengthLstm().init(jax.random.key(seed), jnp.zeros((1, 17, 16)))
    keys = iter(jax.random.split(jax.random.key(seed + 1), 64))
    parameters = jax.tree.map(lambda leaf: jax.random.normal(next(keys), leaf.shape), parameters)
    return parameters, to_model(parameters)


@pytest.mark.parametrize("seed", range(3))
def test_the_plain_form_computes_what_the_flax_module_computes(seed: int) -> None:
    parameters, model = random_model(seed)
    inputs = np.random.default_rng(seed).normal(size=(7, 17, 16)).astype(np.float32)
    np.testing.assert_allclose(
        correction(model, inputs), np.asarray(LengthLstm().apply(parameters, jnp.asarray(inputs))), rtol=2e-5, atol=2e-5
    )


@pytest.mark.parametrize("seed", range(3))
def test_the_gate_lets_the_lstm_in_where_the_recent_past_tells(seed: int, learned: Trained) -> None:
    trained = learned if seed == 0 else train(regimes(seed))
    assert trained.scores.use_lstm
    assert trained.scores.lstm < 0.7 * trained.scores.baseline
    assert trained.scores.held_out == 250


@pytest.mark.parametrize("seed", range(3))
def test_the_gate_keeps_the_baseline_where_nothing_tells(seed: int) -> None:
    scores = train(noise(seed)).scores
    assert not scores.use_lstm
    assert scores.lstm == pytest.approx(scores.baseline, rel=0.1)


def test_predictions_follow_the_beat(learned: Trained) -> None:
    """In the trace long answers are some 480 ids and short ones 60; the quantile of all is a long one's."""
    history = regimes(0)
    held_out = history.records[-250:]
    predicted = predict(learned.model, history.records, history.first, held_out)
    long = held_out[:, Column.COMPLETION] > 200
    assert np.median(predicted[long]) > 380
    assert np.median(predicted[~long]) < 120


def test_training_is_repeatable(learned: Trained) -> None:
    again = train(regimes(0))
    assert again.scores == learned.scores
    np.testing.assert_array_equal(again.model.recurrent, learned.model.recurrent)


def test_scores_look_at_nothing_that_was_trained_on(learned: Trained) -> None:
    """Changing the outcome of held-out requests changes the scores and not the model."""
    history = regimes(0)
    changed = history.records.copy()
    changed[-250:, Column.COMPLETION] = 1
    other = train(History(changed, history.total))
    np.testing.assert_array_equal(other.model.inputs, learned.model.inputs)
    assert other.scores != learned.scores


def test_predictions_are_within_what_a_request_may_have() -> None:
    history = noise(1)
    asked = asked_next(history, 50)
    asked[:, Column.MAX_TOKENS] = np.arange(1, 51)
    for seed in range(2):
        _, model = random_model(seed)
        predicted = predict(model, history.records, history.first, asked)
        assert (predicted >= 1).all()
        assert (predicted <= asked[:, Column.MAX_TOKENS]).all()


def test_too_few_requests_are_refused() -> None:
    history = noise(0, count=MIN_HISTORY - 1)
    with pytest.raises(ValueError, match=f"{MIN_HISTORY - 1} finished requests; at least {MIN_HISTORY} are needed"):
        train(history)


def test_a_history_that_nothing_had_finished_for_is_refused() -> None:
    records = noise(0, count=MIN_HISTORY).records.copy()
    records[:, Column.KNOWN] = 0
    with pytest.raises(ValueError, match="0 finished requests with a baseline"):
        train(History(records, MIN_HISTORY))


def test_a_model_of_other_shapes_is_refused(learned: Trained) -> None:
    arrays = {name: getattr(learned.model, name) for name in LengthModel.__dataclass_fields__}
    with pytest.raises(ValueError, match=r"head is float32 \(3,\); finite float32 \(16,\) needed"):
        LengthModel(**{**arrays, "head": np.zeros(3, np.float32)})
    with pytest.raises(ValueError, match=r"bias is float32 \(64,\); finite"):
        LengthModel(**{**arrays, "bias": np.full(64, np.nan, np.float32)})


def test_the_gate_wants_more_than_luck_and_more_than_little() -> None:
    rng = np.random.default_rng(0)
    base = rng.exponential(100.0, 250)
    assert passes_gate(0.5 * base, base)
    assert not passes_gate(0.97 * base, base), "a gain that matters to nobody"
    assert not passes_gate(base, base)
    assert not passes_gate(1.1 * base, base)
    one_lucky = base.copy()
    one_lucky[100] = 0.0
    base[100] = 5000.0
    assert not passes_gate(one_lucky, base), "a single request"
    assert not passes_gate(np.zeros(NUM_BLOCKS - 1), np.ones(NUM_BLOCKS - 1)), "too few to judge"


def test_the_gate_does_not_take_neighbours_for_independent() -> None:
    """One good stretch of 30 requests in 250 is one observation, not 30."""
    base = np.full(250, 10.0)
    lstm = base + 0.1
    lstm[60:90] = 0.0
    assert not passes_gate(lstm, base)


def test_pinball_is_least_at_the_quantile() -> None:
    actual = np.random.default_rng(0).exponential(100.0, 10_000)
    guesses = np.quantile(actual, [0.5, 0.7, QUANTILE, 0.9])
    losses = [pinball(np.full_like(actual, guess), actual).mean() for guess in guesses]
    assert int(np.argmin(losses)) == 2
    assert pinball(np.array([10.0]), np.array([15.0])) == pytest.approx(5 * QUANTILE)
    assert pinball(np.array([15.0]), np.array([10.0])) == pytest.approx(5 * (1 - QUANTILE))


def test_features_of_one_request_hold_what_they_say() -> None:
    history = regimes(3, count=40)
    asked = asked_next(history, 1)
    (steps,) = features(history.records, history.first, asked, np.array([255.0]))
    assert steps.shape == (17, 16)
    assert steps[-1, 7] == 0.0, "256 is the middle of the scale"
    assert steps[-1, 4] == 0.0, "its own completion is not known"
    assert list(steps[:, 6]) == [0.0] * 16 + [1.0]
    np.testing.assert_allclose(
        steps[:-1, 4], (np.log2(1 + history.records[-16:, Column.COMPLETION]) - 8) / 3, rtol=1e-6
    )
