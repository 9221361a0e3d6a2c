"""Rows for the sampling op: everything off unless a test turns it on; and random batches of them."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

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


ROWS, VOCAB = 6, 400  # more ids than the likeliest 256 that XLA looks at first

row_fields = st.fixed_dictionaries({
    "temperature": st.sampled_from([0.0, 1e-10, 0.3, 1.0, 1.7]),
    "top_k": st.sampled_from([0, 1, 2, 40, 255, 256, 257, 300, 399, 400, 10**6]),
    "top_p": st.sampled_from([0.0, 1e-12, 0.1, 0.5, 0.9, 0.99, 0.9999, 1.0]),
    "min_p": st.sampled_from([0.0, 1e-6, 0.05, 0.5, 1.0]),
    "penalised": st.integers(0, 1),
    "repetition": st.sampled_from([1.0, 1.3, 0.7]),
    "presence": st.sampled_from([0.0, 1.5, -0.5]),
    "frequency": st.sampled_from([0.0, 0.4, -0.2]),
    "biased": st.integers(0, 1),
})  # fmt: skip
OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "penalised": 0, "repetition": 1.0, "presence": 0.0,
       "frequency": 0.0, "biased": 0}  # fmt: skip


def sample_batch(seed: int, spread: float, ties: int, fields: list[dict[str, Any]]) -> tuple[Any, ...]:
    """Logits, counts, bias and rows; ``ties`` > 0 rounds the logits, so that many are equal."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((ROWS, VOCAB)) * spread
    logits = (np.round(logits * ties) / ties if ties else logits).astype(np.float32)
    counts = rng.choice(np.array([0, 0, 0, 1, 3, 65536, 65539], np.int32), (ROWS, VOCAB))
    bias = rng.choice(np.array([0, 0, 0, 0, 5, -5, 100, -100], np.float32), (ROWS, VOCAB))
    columns = {name: [row[name] for row in fields] for name in OFF}
    suppressed = [rng.choice(VOCAB, rng.integers(0, 9), replace=False) for _ in range(ROWS)]
    seeds = rng.integers(-(2**31), 2**31, (2, ROWS))
    slots = rng.permutation(ROWS)
    rows = sample_rows(ROWS, **columns, suppressed=suppressed, seed_low=seeds[0], seed_high=seeds[1], slot=slots)
    return logits, rows, counts, bias
