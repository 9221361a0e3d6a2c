"""Query energies of a tiny model against queries computed by hand."""

import jax
import numpy as np

from planner.architecture import ModelArchitecture
from planner.energy import query_energy
from planner.formats import KvFormat, WeightForm
from planner.plan import make_plan
from planner.weights import random_weights

ARCHITECTURE = ModelArchitecture(
    family="llama", layers=2, embed=32, ffw=48, q_heads=6, kv_heads=2, head_dim=16, vocab=80, context=128,
    norm_eps=1e-6, rope_theta=10_000.0, query_scale=0.25, tied_embeddings=True,
)  # fmt: skip


def first_layer(weights: dict[str, np.ndarray], ids: np.ndarray) -> np.ndarray:
    """Mean squares [kv_heads, head_dim] of the first layer's queries over one window, in float64."""
    x = weights["embed"][ids].astype(np.float64)
    x = x / np.sqrt(np.mean(x * x, -1, keepdims=True) + 1e-6) * weights["attn_norm"][0]
    mixed = (x @ weights["qkv"][0].astype(np.float64)).reshape(len(ids), 2, 5, 16)
    q = mixed[:, :, :3]
    angle = np.arange(len(ids))[:, None] * 10_000.0 ** (-np.arange(8) / 8)
    cos, sin = (turn(angle)[:, None, None] for turn in (np.cos, np.sin))
    low, high = q[..., :8], q[..., 8:]
    turned = np.concatenate([low * cos - high * sin, high * cos + low * sin], -1)
    return np.mean(turned**2, axis=(0, 2))


def test_energies_are_mean_squares_of_rotated_queries_over_all_windows():
    plan = make_plan(
        ARCHITECTURE, target="cpu_native", weight_form=WeightForm.FLOAT32, kv_format=KvFormat.BMQ4, context=0, slots=1,
        prefill_chunk=32, prefill_slots=1, page_size=128, kv_bytes=0, implementation="xla",
    )  # fmt: skip
    weights, calls = random_weights(ARCHITECTURE, 3), []
    ids = np.random.default_rng(0).integers(0, 80, (3, 40)).astype(np.int32)
    found = query_energy(plan, jax.device_put(weights), ids, lambda *call: calls.append(call))
    assert (found.shape, found.dtype) == ((2, 2, 16), np.float32)
    wanted = np.mean([first_layer(weights, window) for window in ids], axis=0)
    np.testing.assert_allclose(found[0], wanted, rtol=1e-4)
    assert np.all(found[1] > 0)
    assert calls == [(1, 3), (2, 3), (3, 3)]
