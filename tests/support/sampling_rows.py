"""Rows for the sampling op: everything off unless a test turns it on."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.sample.op import SampleRows

NUM_SUPPRESSED = 8
_INTS = {"top_k": 0, "seed_low": 0, "seed_high": 0, "penalised": 0, "biased": 0, "top_logprobs": -1}
_FLOATS = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "repetition": 1.0, "presence": 0.0, "frequency": 0.0}


def sample_rows(num_rows: int, **fields: Any) -> SampleRows:
    """Rows that draw at temperature 1 from the whole vocabulary; a field is one value for all or one a row."""
    suppressed = np.full((num_rows, NUM_SUPPRESSED), -1, np.int32)
    for row, ids in enumerate(fields.pop("suppressed", ())):
        suppressed[row, : len(ids)] = ids
    columns = {"slot": np.arange(num_rows), "position": np.full(num_rows, 7), **_INTS, **_FLOATS, **fields}
    arrays = {
        name: jnp.asarray(np.broadcast_to(value, num_rows), jnp.float32 if name in _FLOATS else jnp.int32)
        for name, value in columns.items()
    }
    return SampleRows(**arrays, suppressed=jnp.asarray(suppressed))


def take(rows: SampleRows, which: list[int]) -> SampleRows:
    """Some of the rows, their slots unchanged."""
    return SampleRows(*(field[jnp.array(which)] for field in rows))
