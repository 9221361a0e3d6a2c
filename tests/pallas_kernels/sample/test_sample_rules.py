"""What may be drawn and what is reported: penalties, bias, suppression, greedy, log-probabilities, contract."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.errors import ContractError
from pallas_kernels.sample import op
from pallas_kernels.sample.cases import CASES
from pallas_kernels.sample.op import PROMPT_BIT
from pallas_kernels.sample.reference import adjust
from planner.batch import NUM_SUPPRESSED, PROMPT_COUNT
from tests.support import sampling_rows
from tests.support.quick import quick_jit
from tests.support.sampling_rows import sample_rows

SMALL = [case for case in CASES if case.small]
IMPLEMENTATIONS = ["reference", "xla"]

unchecked = inspect.unwrap(op.sample)


@functools.cache
def compiled(implementation: str, num_top: int):
    return quick_jit(functools.partial(op.sample, num_top=num_top, implementation=implementation))


def run(implementation, logits, rows, counts=None, bias=None, num_top=3):
    logits = np.asarray(logits, np.float32)
    counts = np.zeros(logits.shape, np.int32) if counts is None else np.asarray(counts, np.int32)
    bias = np.zeros(logits.shape, np.float32) if bias is None else np.asarray(bias, np.float32)
    return jax.tree.map(np.asarray, compiled(implementation, num_top)(*map(jnp.asarray, (logits,)), rows, counts, bias))


def test_the_packed_columns_are_those_of_the_op():
    assert (PROMPT_BIT, sampling_rows.NUM_SUPPRESSED) == (PROMPT_COUNT, NUM_SUPPRESSED)


class TestPenalties:
    """Prompt 5, 5, 6 and completion 7, 7 over ten ids."""

    counts = np.zeros((1, 10), np.int32)
    counts[0, [5, 6, 7]] = PROMPT_BIT, PROMPT_BIT, 2

    def after(self, logits, **penalty):
        rows = sample_rows(1, **{"penalised": 1, **penalty})
        return np.asarray(adjust(jnp.asarray(logits[None]), rows, jnp.asarray(self.counts), jnp.zeros((1, 10))))[0]

    @pytest.mark.parametrize(
        ("penalty", "logit", "wanted"),
        [
            ({"presence": 1.0}, 1.0, {7: 0.0}),
            ({"frequency": 0.5}, 1.0, {7: 0.0}),
            ({"frequency": -0.25}, 1.0, {7: 1.5}),
            ({"repetition": 2.0}, 1.0, {5: 0.5, 6: 0.5, 7: 0.5}),
            ({"repetition": 2.0}, -1.0, {5: -2.0, 6: -2.0, 7: -2.0}),
            ({"repetition": 2.0, "presence": 1.0, "frequency": 0.5}, 1.0, {5: 0.5, 6: 0.5, 7: -1.5}),
            ({"presence": 1.0, "penalised": 0}, 1.0, {}),
        ],
    )
    def test_exactly(self, penalty, logit, wanted):
        expected = np.full(10, logit, np.float32)
        for token_id, value in wanted.items():
            expected[token_id] = value
        np.testing.assert_array_equal(self.after(np.full(10, logit, np.float32), **penalty), expected)

    @pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
    def test_they_reach_the_choice(self, implementation):
        logits = np.zeros((5, 9))
        logits[:, 7], logits[:, 5] = 3.0, 2.9
        counts = np.repeat(self.counts[:, :9], 5, axis=0)
        rows = sample_rows(5, temperature=0.0, penalised=[1, 0, 1, 1, 0], presence=[1.0, 1.0, 0.0, 0.2, 0.0])
        assert run(implementation, logits, rows, counts).ids.tolist() == [5, 7, 7, 5, 7]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bias_of_100_forces_and_forbids(implementation, temperature):
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((16, 300)) * 4
    bias = np.zeros((16, 300))
    bias[:8, 13], bias[8:, 14:] = 100.0, -100.0
    rows = sample_rows(16, temperature=temperature, biased=1, seed_low=np.arange(16))
    ids = run(implementation, logits, rows, bias=bias).ids
    assert (ids[:8] == 13).all()
    assert (ids[8:] < 14).all()
    unbiased = rows._replace(biased=jnp.zeros(16, jnp.int32))
    assert (run(implementation, logits, unbiased, bias=bias).ids != ids).any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("temperature", [0.0, 1e-10, 1.0, 2.0])
def test_all_suppressed_but_one(implementation, temperature):
    logits = np.repeat(np.arange(9.0)[None], 5, axis=0)
    suppressed = [[i for i in range(9) if i != row] for row in range(5)]
    rows = sample_rows(5, temperature=temperature, suppressed=suppressed)
    assert run(implementation, logits, rows).ids.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("temperature", [1e-38, 1e-10, 1e-5, 1e-4])
def test_tiny_temperatures_give_the_greedy_choice(implementation, temperature):
    rng = np.random.default_rng(1)
    logits = rng.permuted(np.repeat(np.linspace(-30, 30, 300)[None], 16, axis=0), axis=1)
    rows = sample_rows(16, temperature=temperature, seed_low=np.arange(16))
    np.testing.assert_array_equal(run(implementation, logits, rows).ids, logits.argmax(1))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_denormal_temperature_still_gives_an_id(implementation):
    logits = np.random.default_rng(4).standard_normal((16, 300))
    np.testing.assert_array_equal(run(implementation, logits, sample_rows(16, temperature=1e-44)).ids, logits.argmax(1))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_top_p_0_and_1e_12_keep_the_likeliest_id(implementation):
    rng = np.random.default_rng(2)
    logits = rng.standard_normal((16, 300))
    rows = sample_rows(16, temperature=2.0, top_p=[0.0, 1e-12] * 8, seed_low=np.arange(16))
    np.testing.assert_array_equal(run(implementation, logits, rows).ids, logits.argmax(1))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_greedy_takes_the_first_of_equal_logits(implementation):
    logits = np.zeros((16, 300))
    logits[1:, [250, 40]] = 1.0
    assert run(implementation, logits, sample_rows(16, temperature=0.0)).ids.tolist() == [0, *[40] * 15]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_logprobs_are_raw_and_sorted(implementation, case):
    rng = np.random.default_rng(case.vocab)
    logits = rng.standard_normal((case.rows, case.vocab)) * 3
    bias = np.zeros((case.rows, case.vocab))
    bias[:, 3] = 100.0
    rows = sample_rows(case.rows, temperature=2.0, top_k=1, biased=1, top_logprobs=20)
    out = run(implementation, logits, rows, bias=bias, num_top=20)
    exact = logits.astype(np.float32).astype(np.float64)
    exact = exact - np.log(np.exp(exact).sum(1, keepdims=True))
    order = np.argsort(-exact, axis=1, kind="stable")[:, :20]
    assert (out.ids == 3).all(), "the bias decides the choice but not the log-probability"
    np.testing.assert_allclose(out.logprob, exact[:, 3], rtol=0, atol=2e-5)
    np.testing.assert_array_equal(out.top_ids, order)
    np.testing.assert_allclose(out.top_logprobs, np.take_along_axis(exact, order, 1), rtol=0, atol=2e-5)
    assert (np.diff(out.top_logprobs, axis=1) <= 0).all()
    assert (np.exp(out.top_logprobs.astype(np.float64)).sum(1) <= 1.0001).all()
    assert (out.top_logprobs <= 0).all()


def test_one_row_that_asks_is_enough_for_logprobs_of_all():
    logits = np.random.default_rng(3).standard_normal((16, 300))
    some = run("xla", logits, sample_rows(16, temperature=0.0, top_logprobs=[-1] * 15 + [0]))
    every = run("xla", logits, sample_rows(16, temperature=0.0, top_logprobs=20))
    np.testing.assert_array_equal(some.top_logprobs, every.top_logprobs)
    np.testing.assert_array_equal(some.logprob, some.top_logprobs[:, 0])


def zeros(*shape, dtype=np.float32):
    return jnp.zeros(shape, dtype)


GOOD = {"logits": zeros(2, 9), "rows": sample_rows(2), "counts": zeros(4, 9, dtype=np.int32), "bias": zeros(4, 9)}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"counts": zeros(4, 8, dtype=np.int32)}, r"counts \(4, 8\) and bias \(4, 9\) must be \[slots, 9\]"),
        ({"bias": zeros(3, 9)}, r"bias \(3, 9\) must be \[slots, 9\]"),
        ({"num_top": 10}, r"num_top 10 must be in 1\.\.9, the vocabulary"),
        ({"num_top": 0}, r"num_top 0 must be in 1\.\.9"),
        ({"rows": sample_rows(2)._replace(min_p=zeros(3))}, r"rows.min_p \(3,\) needs one entry for each of 2 rows"),
    ],
)
def test_contract(wrong, message):
    with pytest.raises(ContractError, match=message):
        unchecked(**{**GOOD, "num_top": 2, **wrong}, implementation="xla")
