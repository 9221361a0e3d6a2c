"""int8 weights: rotate the residual stream, then round each weight with error feedback on calibration text.

Owns the transformation of a float32 weight tree into the int8 form. Two steps make eight bits a weight enough:

1. *Rotation.* The norm weights are folded into the products that follow, and the residual stream is turned by one
   random orthogonal matrix, folded into everything that reads or writes it. The function of the model is unchanged, but
   no channel stands out any more, so that one scale an output channel fits every weight of its column. A model whose
   layers normalise again before they add to the residual stream (``post_norms``) has no such freedom and stays
   unrotated.
2. *Error feedback.* The rows of a weight are rounded in turn, and what rounding one row did to the layer's output is
   taken back by the rows not yet rounded, as far as the correlation of the layer's inputs allows.

Nothing of this costs anything at run time. Reads weights and token ids; never reads files.

Source: computational invariance and rotation, SliceGPT, arXiv 2401.15024, and QuaRot, arXiv 2404.00456; error feedback,
GPTQ, arXiv 2210.17323.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.rows import Rows
from planner.architecture import ModelArchitecture
from planner.decoder import Layer, LayerData, Numerics, PrefillContext, rms_norm, rope_of
from planner.formats import WeightForm

LINEAR = ("qkv", "o", "gate_up", "down")
ROTATION_SEED = 20_260
DAMPING = 0.01
"""Share of the mean diagonal added to each input correlation, so that it can be inverted."""

FEEDBACK_BLOCK = 128
MAX_CODE = 127

Progress = Callable[[int, int], None]
"""Called with (done, total) layers."""


class CalibrationError(ValueError):
    """The calibration ids cannot be used; the message says why and what would do."""


def quantize(
    architecture: ModelArchitecture, weights: dict[str, np.ndarray], ids: np.ndarray, progress: Progress
) -> dict[str, np.ndarray]:
    """Turn a float32 weight tree into the int8 form.

    Args:
        architecture: the model.
        weights: the float32 tree by name; it is not changed.
        ids: int32 [windows, length], calibration text; 8 windows of 1,024 do, more is finer.
        progress: called after every layer.

    Returns:
        The int8 tree: ``<name>.codes`` and ``<name>.scale`` for every linear weight and the head.

    Raises:
        CalibrationError: too few ids, or ids outside the vocabulary.
    """
    if ids.ndim != 2 or ids.size < 512:
        raise CalibrationError(
            f"calibration ids of shape {ids.shape}; at least 512 ids in [windows, length] are needed"
        )
    if ids.min() < 0 or ids.max() >= architecture.vocab:
        raise CalibrationError(
            f"calibration ids lie in {ids.min()}..{ids.max()}; the vocabulary has the ids 0..{architecture.vocab - 1}"
        )
    if not architecture.post_norms:
        weights = rotated(architecture, weights)
    result = {name: array for name, array in weights.items() if name not in (*LINEAR, "head")}
    hidden = jnp.asarray(weights["embed"])[ids] * architecture.embed_scale
    run = _layer_runner(architecture, ids.shape[1])
    parts: dict[str, list[np.ndarray]] = {f"{name}.{kind}": [] for name in LINEAR for kind in ("codes", "scale")}
    names = [name for name in weights if name not in ("embed", "final_norm", "head")]
    for index in range(architecture.layers):
        layer = {name: weights[name][index] for name in names}
        grams = _grams(run, layer, hidden, index)
        for name in LINEAR:
            codes, scale = round_with_feedback(layer[name], grams[name])
            parts[f"{name}.codes"].append(codes)
            parts[f"{name}.scale"].append(scale)
            layer[name] = codes.astype(np.float32) * scale
        # the next layer is calibrated on what the rounded layers before it really give
        hidden = jnp.stack([run(layer, window, index)[0] for window in hidden])
        progress(index + 1, architecture.layers + 1)
    result |= {name: np.stack(arrays) for name, arrays in parts.items()}
    head = weights["head"] if "head" in weights else weights["embed"].T
    final = np.asarray(rms_norm(hidden, jnp.asarray(weights["final_norm"]), architecture.norm_eps))
    final = final.reshape(-1, architecture.embed)
    result["head.codes"], result["head.scale"] = round_with_feedback(head, final.T @ final)
    progress(architecture.layers + 1, architecture.layers + 1)
    return result


def rotated(architecture: ModelArchitecture, weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same model with unit norm weights and a rotated residual stream.

    The result has a head of its own even for a tied model, since the head takes the final norm's weight in.
    """
    rng = np.random.default_rng(ROTATION_SEED)
    turn = np.linalg.qr(rng.standard_normal((architecture.embed, architecture.embed)))[0].astype(np.float32)
    result = dict(weights)
    result["embed"] = weights["embed"] @ turn
    for norm, name in (("attn_norm", "qkv"), ("ffw_norm", "gate_up")):
        result[name] = np.einsum("ed,lef->ldf", turn, weights[norm][:, :, None] * weights[name], optimize=True)
        result[norm] = np.ones_like(weights[norm])
    for name in ("o", "down"):
        result[name] = weights[name] @ turn
    head = weights["head"] if "head" in weights else weights["embed"].T
    result["head"] = turn.T @ (weights["final_norm"][:, None] * head)
    result["final_norm"] = np.ones_like(weights["final_norm"])
    return result


def round_with_feedback(weight: np.ndarray, gram: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Round a weight [in, out] to int8 codes and a scale [out], given the Gram matrix [in, in] of its inputs.

    Rows are visited in order; each row's rounding error is spread over the later rows by the upper Cholesky factor of
    the inverse Gram matrix (GPTQ, section 3.3).
    """
    size = weight.shape[0]
    scale = np.maximum(np.abs(weight).max(0), 1e-12) / MAX_CODE
    damped = gram.astype(np.float64) + np.eye(size) * max(DAMPING * float(np.mean(np.diag(gram))), 1e-8)
    upper = np.linalg.cholesky(np.linalg.inv(damped)).T.astype(np.float32)
    rest = weight.astype(np.float32) / scale
    codes = np.empty(weight.shape, np.int8)
    for start in range(0, size, FEEDBACK_BLOCK):
        end = min(start + FEEDBACK_BLOCK, size)
        block = rest[start:end]
        errors = np.empty_like(block)
        for row in range(end - start):
            rounded = np.clip(np.rint(block[row]), -MAX_CODE, MAX_CODE)
            codes[start + row] = rounded
            errors[row] = (block[row] - rounded) / upper[start + row, start + row]
            block[row + 1 :] -= np.outer(upper[start + row, start + row + 1 : end], errors[row])
        rest[end:] -= upper[start:end, end:].T @ errors
    return codes, scale.astype(np.float32)


def _layer_runner(
    architecture: ModelArchitecture, length: int
) -> Callable[..., tuple[jax.Array, dict[str, jax.Array]]]:
    """One jitted layer over one window of fresh text: (weights, hidden, index) -> (hidden, Gram matrices)."""
    module: Any = Layer(architecture, Numerics(WeightForm.FLOAT32, "xla", "xla"))
    rope = rope_of(architecture, jnp.arange(length))
    no_pages = jnp.zeros((architecture.layers, 1, architecture.kv_heads, 2, 16, architecture.head_dim))
    one = partial(jnp.full, (1,), dtype=jnp.int32)
    context = PrefillContext(no_pages, Rows(jnp.zeros((1, 1), jnp.int32), one(0), one(0), one(length), one(0)))

    @jax.jit
    def run(layer: dict[str, jax.Array], hidden: jax.Array, index: LayerData) -> tuple[jax.Array, dict[str, jax.Array]]:
        (out, _), sown = module.apply({"params": layer}, hidden, index, rope, context, mutable=["gram"])
        return out, sown["gram"]

    def at(layer: dict[str, np.ndarray], hidden: jax.Array, index: int) -> tuple[jax.Array, dict[str, jax.Array]]:
        data = LayerData(
            jnp.int32(index),
            jnp.int32(architecture.windows[index]),
            jnp.int32(architecture.local_rope[index]),
        )
        return run(layer, hidden, data)

    return at


def _grams(
    run: Callable[..., tuple[jax.Array, dict[str, jax.Array]]],
    layer: dict[str, np.ndarray],
    hidden: jax.Array,
    index: int,
) -> dict[str, np.ndarray]:
    total: dict[str, np.ndarray] = {}
    for window in hidden:
        for name, gram in run(layer, window, index)[1].items():
            total[name] = total.get(name, 0.0) + np.asarray(gram)
    return total
