"""Which id is drawn: the distribution, both implementations against a float64 statement, and independence of rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pallas_kernels.sample import op
from pallas_kernels.sample.reference import gumbel
from tests.support.exact import adjusted_logits, kept_ids
from tests.support.quick import quick_jit
from tests.support.sampling_rows import OFF, ROWS, VOCAB, row_fields, sample_batch, sample_rows, take

IMPLEMENTATIONS = ["reference", "xla"]


@functools.cache
def compiled(implementation: str):
    run = functools.partial(op.sample, num_top=1, implementation=implementation)
    return quick_jit(run) if implementation == "reference" else jax.jit(run)


def ids_of(implementation, logits, rows, counts=None, bias=None):
    logits = np.asarray(logits, np.float32)
    counts = np.zeros(logits.shape, np.int32) if counts is None else counts
    bias = np.zeros(logits.shape, np.float32) if bias is None else bias
    return np.asarray(compiled(implementation)(jnp.asarray(logits), rows, jnp.asarray(counts), jnp.asarray(bias)).ids)


SEEDS = 20_000
PROBABILITIES = np.array([0.4, 0.25, 0.15, 0.1, 0.06, 0.03, 0.009, 0.001])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({}, 8),
        ({"top_k": 3}, 3),
        ({"top_k": 9_999_999}, 8),
        ({"top_p": 0.75}, 3),
        ({"top_p": 0.5}, 2),
        ({"min_p": 0.2}, 4),
        ({"top_k": 4, "top_p": 0.9}, 4),
        ({"top_k": 2, "top_p": 0.6}, 1),
    ],
    ids=str,
)
def test_the_distribution(implementation, fields, kept):
    """Counts over many seeds lie where a chi-square test does not doubt them (0.999 quantile)."""
    logits = np.repeat(np.log(PROBABILITIES)[None], SEEDS, axis=0) + 3
    seeds = np.arange(SEEDS)
    ids = ids_of(implementation, logits, sample_rows(SEEDS, seed_low=seeds, seed_high=-seeds, **fields))
    counts = np.bincount(ids, minlength=8)
    expected = PROBABILITIES[:kept] / PROBABILITIES[:kept].sum() * SEEDS
    assert counts[kept:].sum() == 0
    statistic = ((counts[:kept] - expected) ** 2 / expected).sum()
    assert statistic < [0, 0, 10.83, 13.82, 16.27, 18.47, 20.52, 22.46, 24.32][kept] if kept > 1 else statistic == 0


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_temperature_sharpens_and_flattens(temperature):
    logits = np.repeat(np.log(PROBABILITIES)[None], SEEDS, axis=0)
    ids = ids_of("xla", logits, sample_rows(SEEDS, seed_low=np.arange(SEEDS), temperature=temperature))
    expected = PROBABILITIES ** (1 / temperature)
    expected *= SEEDS / expected.sum()
    assert ((np.bincount(ids, minlength=8) - expected) ** 2 / expected).sum() < 24.32


def test_positions_and_both_halves_of_the_seed_give_other_draws():
    logits = np.zeros((600, 64))
    index = np.arange(600)
    streams = [
        ids_of("xla", logits, sample_rows(600, **{"position": 7, "seed_low": 1, "seed_high": 2, field: index}))
        for field in ("position", "seed_low", "seed_high")
    ]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert np.mean(streams[one] == streams[other]) < 0.05
    for stream in streams:
        assert np.bincount(stream, minlength=64).max() < 30


def statement(logits, rows, counts, bias) -> tuple[list[int], list[bool]]:
    """The id each row should draw, and whether it is clear of every rounding."""
    noise = np.asarray(gumbel(rows, jnp.broadcast_to(jnp.arange(VOCAB), (ROWS, VOCAB))), np.float64)
    ids, clear = [], []
    for row in range(ROWS):
        get = {name: float(np.asarray(getattr(rows, name))[row]) for name in OFF}
        slot = int(rows.slot[row])
        penalties = (get["repetition"], get["presence"], get["frequency"]) if get["penalised"] else (1.0, 0.0, 0.0)
        own = bias[slot] if get["biased"] else np.zeros(VOCAB)
        adjusted = adjusted_logits(logits[row], own, counts[slot], np.asarray(rows.suppressed[row]), *penalties)
        if get["temperature"] == 0:
            top = np.sort(adjusted)[-2:]
            ids.append(int(adjusted.argmax()))
            clear.append(top[1] - top[0] > 1e-4)
            continue
        tight, loose = (
            kept_ids(adjusted, get["temperature"], int(get["top_k"]), get["top_p"] * by, get["min_p"] / by)
            for by in (1 - 1e-5, 1 + 1e-5)
        )
        score = (adjusted - adjusted.max()) / get["temperature"] + noise[row]
        best = sorted(loose, key=lambda i: -score[i])[:2]
        ids.append(best[0])
        clear.append(tight == loose and (len(best) == 1 or score[best[0]] - score[best[1]] > 1e-3))
    return ids, clear


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32 - 1),
    spread=st.sampled_from([0.1, 1.0, 4.0]),
    ties=st.sampled_from([0, 0, 2]),
    fields=st.lists(row_fields, min_size=ROWS, max_size=ROWS),
)
@example(seed=0, spread=0.1, ties=0, fields=[{**OFF, "top_k": k} for k in (256, 257, 300, 399, 400, 10**6)])
@example(seed=1, spread=0.1, ties=0, fields=[{**OFF, "top_p": p} for p in (0.0, 1e-12, 0.5, 0.9, 0.999, 1.0)])
@example(seed=2, spread=4.0, ties=1, fields=[OFF, {**OFF, "top_k": 3}, {**OFF, "top_k": 257, "top_p": 0.9}] * 2)
def test_both_implementations_draw_what_the_statement_says(seed, spread, ties, fields):
    logits, rows, counts, bias = sample_batch(seed, spread, ties, fields)
    wanted, clear = statement(logits, rows, counts, bias)
    reference, xla = (ids_of(name, logits, rows, counts, bias) for name in IMPLEMENTATIONS)
    np.testing.assert_array_equal(xla, reference)
    assert [int(i) for i, sure in zip(xla, clear, strict=True) if sure] == [
        i for i, sure in zip(wanted, clear, strict=True) if sure
    ]


@settings(max_examples=15)
@given(seed=st.integers(0, 2**32 - 1), fields=st.lists(row_fields, min_size=ROWS, max_size=ROWS))
@example(seed=3, fields=[{**OFF, "top_p": 0.95, "temperature": 0.9}, *[OFF] * 5])
@example(seed=4, fields=[{**OFF, "top_k": 40}, *[{**OFF, "top_k": 300}] * 5])
def test_a_row_depends_neither_on_its_neighbours_nor_on_their_number(seed, fields):
    logits, rows, counts, bias = sample_batch(seed, 2.0, 0, fields)
    among = ids_of("xla", logits, rows, counts, bias)
    for row in (0, ROWS - 1):
        alone = ids_of("xla", logits[[row]], take(rows, [row]), counts, bias)
        assert alone[0] == among[row]
    backwards = list(range(ROWS))[::-1]
    np.testing.assert_array_equal(
        ids_of("xla", logits[backwards], take(rows, backwards), counts, bias), among[backwards]
    )


def test_the_fast_way_never_sorts_the_vocabulary():
    logits, counts = jnp.zeros((1, 6_000)), jnp.zeros((1, 6_000), jnp.int32)
    text = compiled("xla").lower(logits, sample_rows(1), counts, logits).compile().as_text()
    assert 'custom_call_target="TopK"' in text
    assert "sort(" not in text
