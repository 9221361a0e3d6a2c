"""Predict: the LSTM over the last finished requests, its training, and whether it may be used.

Owns the flax module, the loss, the split and the gate. The only module of prediction that reaches jax: it runs in a
process of its own (``appliance.prediction_training``), on the CPU, and hands back plain arrays.

1. Records are in the order of finishing. The newest quarter is held out; of the rest, the newest fifth only chooses
   which epoch's parameters are kept, and what is older is trained on.
2. The module corrects the baseline: prediction = baseline + what the LSTM reads out of the window, both as logarithms.
   Its head starts at zero, so it starts as the baseline, and keeping the first epoch is always possible.
3. Scores are mean pinball losses on the held-out requests, in ids a request, with what was known at their admission.
4. The gate wants a margin: the paired difference of the losses must pass MIN_GAIN of the baseline's loss and MIN_SIGMAS
   of its own standard error, taken over blocks of neighbours, since neighbours resemble each other.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from planner.history import (
    NUM_FEATURES,
    QUANTILE,
    WINDOW,
    Column,
    History,
    baseline,
    features,
    log_length,
    pinball,
)
from planner.length_model import HIDDEN, MIN_HISTORY, LengthModel, Scores, Trained, predict

HELD_OUT_SHARE = 0.25
CHOOSING_SHARE = 0.2
"""Shares of the records that are held out, and of the others that choose the epoch."""

EPOCHS, MINI_BATCH, LEARNING_RATE = 60, 64, 0.01

MIN_GAIN = 0.05
MIN_SIGMAS = 2.5
NUM_BLOCKS = 20
"""The gate's margin; see the module."""

_GATES = ("i", "f", "g", "o")

Parameters = Mapping[str, Any]
"""What flax makes of a module's arrays."""


class LengthLstm(nn.Module):
    """An LSTM over the window and the request, and a linear head on its last state."""

    @nn.compact
    def __call__(self, inputs: Float[Array, "requests steps features"]) -> Float[Array, " requests"]:
        """What is added to the baseline, in ``log_length``."""
        states = cast("Array", nn.RNN(nn.OptimizedLSTMCell(HIDDEN), name="lstm")(inputs))
        return nn.Dense(1, kernel_init=nn.initializers.zeros_init(), name="head")(states[:, -1])[:, 0]


class _Examples(NamedTuple):
    inputs: Float[Array, "requests steps features"]
    base: Float[Array, " requests"]
    wanted: Float[Array, " requests"]


class _Training(NamedTuple):
    """Parameters, the two moments of Adam, the number of steps; the best parameters so far and their loss."""

    parameters: Parameters
    first: Parameters
    second: Parameters
    step: Float[Array, ""]
    best: Parameters
    best_loss: Float[Array, ""]


def train(history: History, seed: int = 0) -> Trained:
    """Train on the older records of a history and score on the newest.

    Args:
        history: at least MIN_HISTORY records.
        seed: of the initial parameters and the order of examples.

    Raises:
        ValueError: there are too few records.
    """
    records, first = history.records, history.first
    if len(records) < MIN_HISTORY:
        raise ValueError(f"{len(records)} finished requests; at least {MIN_HISTORY} are needed to train")
    base = baseline(records, first, records)
    split = len(records) - int(HELD_OUT_SHARE * len(records))
    usable = np.flatnonzero(~np.isnan(base[:split]))
    if len(usable) < 2 * MINI_BATCH:
        raise ValueError(f"{len(usable)} finished requests with a baseline; at least {2 * MINI_BATCH} are needed")
    chosen = len(usable) - int(CHOOSING_SHARE * len(usable))
    rng = np.random.default_rng(seed)
    rounds = chosen // MINI_BATCH
    orders = np.stack([rng.permutation(chosen)[: rounds * MINI_BATCH] for _ in range(EPOCHS)])
    with jax.default_device(jax.devices("cpu")[0]):
        learn, choose = (_examples(history, base, part) for part in (usable[:chosen], usable[chosen:]))
        start = LengthLstm().init(jax.random.key(seed), jnp.zeros((1, WINDOW + 1, NUM_FEATURES)))
        best = jax.jit(_fit)(start, learn, choose, orders.reshape(EPOCHS, rounds, MINI_BATCH).astype(np.int32))
    model = to_model(best)
    held_out = np.flatnonzero(~np.isnan(base[split:])) + split
    return Trained(model, _score(history, model, base, held_out))


def to_model(parameters: Parameters) -> LengthModel:
    """The parameters of a ``LengthLstm`` as plain arrays."""
    tree = parameters["params"]
    (cell,) = (arrays for name, arrays in tree.items() if name != "head")

    def joined(prefix: str, kind: str) -> np.ndarray:
        return np.concatenate([np.asarray(cell[prefix + gate][kind], np.float32) for gate in _GATES], axis=-1)

    head = tree["head"]
    return LengthModel(
        inputs=joined("i", "kernel"),
        recurrent=joined("h", "kernel"),
        bias=joined("h", "bias"),
        head=np.asarray(head["kernel"], np.float32)[:, 0],
        head_bias=np.asarray(head["bias"], np.float32)[0, ...].reshape(()),
    )


def passes_gate(lstm: np.ndarray, base: np.ndarray) -> bool:
    """Whether paired losses, in the order of finishing, show that the LSTM is better by more than noise reaches."""
    size = len(lstm) // NUM_BLOCKS
    if size == 0:
        return False
    gains = (base - lstm)[-size * NUM_BLOCKS :].reshape(NUM_BLOCKS, size).mean(axis=1)
    error = float(gains.std(ddof=1)) / math.sqrt(NUM_BLOCKS)
    mean = float(gains.mean())
    return mean > MIN_GAIN * float(base.mean()) and mean > MIN_SIGMAS * error


def _score(history: History, model: LengthModel, base: np.ndarray, held_out: np.ndarray) -> Scores:
    asked = history.records[held_out]
    actual = asked[:, Column.COMPLETION]
    lstm_loss = pinball(predict(model, history.records, history.first, asked), actual)
    base_loss = pinball(base[held_out], actual)
    return Scores(
        lstm=float(lstm_loss.mean()),
        baseline=float(base_loss.mean()),
        held_out=len(held_out),
        use_lstm=passes_gate(lstm_loss, base_loss),
    )


def _examples(history: History, base: np.ndarray, places: np.ndarray) -> _Examples:
    asked = history.records[places]
    return _Examples(
        jnp.asarray(features(history.records, history.first, asked, base[places])),
        jnp.asarray(log_length(base[places]), jnp.float32),
        jnp.asarray(log_length(asked[:, Column.COMPLETION]), jnp.float32),
    )


def _loss(parameters: Parameters, examples: _Examples) -> Float[Array, ""]:
    correction = cast("Array", LengthLstm().apply(parameters, examples.inputs))
    missing = examples.wanted - examples.base - correction
    return jnp.mean(jnp.maximum(QUANTILE * missing, (QUANTILE - 1.0) * missing))


def _fit(
    start: Parameters, learn: _Examples, choose: _Examples, orders: Int32[Array, "epochs rounds mini_batch"]
) -> Parameters:
    """The parameters of the epoch with the least loss on ``choose``; epoch 0, the baseline, takes part."""

    def epoch(training: _Training, order: Int32[Array, "rounds mini_batch"]) -> tuple[_Training, None]:
        training, _ = jax.lax.scan(lambda t, chosen: (_adam(t, learn, chosen), None), training, order)
        loss = _loss(training.parameters, choose)
        better = loss < training.best_loss
        best = jax.tree.map(lambda new, old: jnp.where(better, new, old), training.parameters, training.best)
        return training._replace(best=best, best_loss=jnp.minimum(loss, training.best_loss)), None

    zeros = jax.tree.map(jnp.zeros_like, start)
    training = _Training(start, zeros, zeros, jnp.float32(0.0), start, _loss(start, choose))
    return jax.lax.scan(epoch, training, orders)[0].best


def _adam(training: _Training, learn: _Examples, chosen: Int32[Array, " mini_batch"]) -> _Training:
    """One step. Source: Kingma and Ba, "Adam", arXiv 1412.6980, with its usual decay rates."""
    batch = jax.tree.map(lambda array: array[chosen], learn)
    slope = jax.grad(_loss)(training.parameters, batch)
    step = training.step + 1.0
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, training.first, slope)
    second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, training.second, slope)
    rate = LEARNING_RATE * jnp.sqrt(1.0 - 0.999**step) / (1.0 - 0.9**step)
    parameters = jax.tree.map(lambda p, m, v: p - rate * m / (jnp.sqrt(v) + 1e-8), training.parameters, first, second)
    return training._replace(parameters=parameters, first=first, second=second, step=step)
