"""Query energy: how strongly queries meet each key channel, measured once on calibration text.

Owns the measurement. The bitmask formats give their spare bits to the channels whose rounding disturbs the scores most,
and a rounding error reaches a score times the query: its mean square is what counts. A static figure does: measured on
one text it chooses as well for another.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.rows import Rows
from planner.decoder import QUERIES, Decoder, Numerics, PrefillContext, Weights, parameters
from planner.plan import Plan

Progress = Callable[[int, int], None]
"""Called with (done, total) windows."""


def query_energy(plan: Plan, weights: Weights, ids: np.ndarray, progress: Progress) -> np.ndarray:
    """Mean square of the queries, after rotary embedding, that meet each channel of each key/value head.

    Args:
        plan: gives the model and its weight form; its format of keys and values and its code path do not matter.
        weights: the tree in the plan's form.
        ids: int32 [windows, length], calibration text; each window is read as a text of its own.
        progress: called after every window.

    Returns:
        float32 [layers, kv_heads, head_dim].
    """
    arch = plan.architecture
    module: Any = Decoder(arch, Numerics(plan.weight_form, "xla", "xla"))
    no_pages = jnp.zeros((arch.layers, 1, arch.kv_heads, 2, 16, arch.head_dim))

    @jax.jit
    def measure(weights: Weights, window: jax.Array) -> jax.Array:
        def one(value: int) -> jax.Array:
            return jnp.full((1,), value, jnp.int32)

        rows = Rows(jnp.zeros((1, 1), jnp.int32), one(0), one(0), one(window.shape[0]), one(0))
        positions = jnp.arange(window.shape[0], dtype=jnp.int32)
        context = PrefillContext(no_pages, rows)
        _, sown = module.apply(parameters(weights), window, positions, context, mutable=[QUERIES])
        queries = sown[QUERIES]["layers"]["q"].astype(jnp.float32)
        grouped = queries.reshape(*queries.shape[:2], arch.kv_heads, arch.group, arch.head_dim)
        return jnp.mean(grouped**2, axis=(1, 3))

    total = np.zeros((arch.layers, arch.kv_heads, arch.head_dim))
    for done, window in enumerate(ids, start=1):
        total += np.asarray(measure(weights, jnp.asarray(window, jnp.int32)))
        progress(done, len(ids))
    return (total / len(ids)).astype(np.float32)
