"""sample: contract and choice of implementation."""

from typing import Literal, NamedTuple

import jax
from jaxtyping import Array, Float, Int32

from pallas_kernels.errors import require
from pallas_kernels.sample import pallas, reference, xla

Implementation = Literal["reference", "xla", "native", "pallas"]

PROMPT_BIT = 1 << 16
"""Counts hold the occurrences in the completion, plus this for an id that occurs in the prompt."""


class SampleRows(NamedTuple):
    """How each row is sampled; off values: temperature 0 (greedy), top_k 0, top_p 1, min_p 0, penalties 1 / 0 / 0."""

    slot: Int32[Array, " rows"]
    """Row of ``counts`` and ``bias`` that belongs to this row."""
    position: Int32[Array, " rows"]
    """Position that the new id will have; with the seed it determines the random numbers."""
    seed_low: Int32[Array, " rows"]
    seed_high: Int32[Array, " rows"]
    temperature: Float[Array, " rows"]
    top_k: Int32[Array, " rows"]
    top_p: Float[Array, " rows"]
    min_p: Float[Array, " rows"]
    repetition: Float[Array, " rows"]
    presence: Float[Array, " rows"]
    frequency: Float[Array, " rows"]
    penalised: Int32[Array, " rows"]
    biased: Int32[Array, " rows"]
    suppressed: Int32[Array, "rows num_suppressed"]
    """Ids that may not be chosen now; -1 = none."""
    top_logprobs: Int32[Array, " rows"]
    """-1: the row's log-probabilities are not read."""


class Sampled(NamedTuple):
    """One id a row. Log-probabilities are of the raw logits, before bias, penalties and temperature."""

    ids: Int32[Array, " rows"]
    logprob: Float[Array, " rows"]
    top_ids: Int32[Array, "rows num_top"]
    top_logprobs: Float[Array, "rows num_top"]


def sample(
    logits: Float[Array, "rows vocab"],
    rows: SampleRows,
    counts: Int32[Array, "slots vocab"],
    bias: Float[Array, "slots vocab"],
    *,
    num_top: int,
    implementation: Implementation,
) -> Sampled:
    """Choose the next id of each row.

    The order is: bias, repetition penalty (divides positive and multiplies negative logits of ids in prompt or
    completion), presence and frequency penalties (completion only), suppression, temperature, top-k, top-p over what
    top-k left, min-p (relative to the likeliest id), then the largest of log-probability plus Gumbel noise. Ids that
    tie with the last one kept are kept. The noise of an id depends on seed, position and id alone, so a row's choice
    does not depend on its neighbours nor on the implementation.

    Args:
        logits: raw logits, float32.
        rows: see ``SampleRows``.
        counts: occurrences of each id, a slot; read only for penalised rows.
        bias: addends, a slot; read only for biased rows.
        num_top: how many alternatives come back with log-probabilities.
        implementation: which code runs; there is no fall-back.

    Raises:
        ContractError: shapes disagree, or the vocabulary is smaller than ``num_top``.

    Source: Gumbel-max trick (Gumbel, 1954); top-p, arXiv 1904.09751; min-p, arXiv 2407.01082; repetition penalty,
    arXiv 1909.05858.
    """
    num_rows, vocab = logits.shape
    require(
        counts.shape == bias.shape and counts.shape[1] == vocab,
        f"counts {counts.shape} and bias {bias.shape} must be [slots, {vocab}]",
    )
    require(0 < num_top <= vocab, f"num_top {num_top} must be in 1..{vocab}, the vocabulary")
    for name, field in zip(rows._fields, rows, strict=True):
        require(field.shape[0] == num_rows, f"rows.{name} {field.shape} needs one entry for each of {num_rows} rows")
    run = {
        "reference": reference.sample,
        "xla": xla.sample,
        "native": xla.sample,
        "pallas": pallas.sample,
    }[implementation]
    with jax.named_scope("sample"):
        return Sampled(*run(logits, rows, counts, bias, num_top=num_top))
