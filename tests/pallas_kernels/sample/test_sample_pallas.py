"""The Triton kernel of ``sample``, interpreted on the CPU, and that it lowers for a GPU."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pallas_kernels.sample import examine, op, pallas
from pallas_kernels.sample.cases import CASES
from pallas_kernels.sample.passes import Tiling, tiling
from tests.support.gpu_lowering import lowered_for_a100
from tests.support.quick import quick_jit
from tests.support.sampling_rows import OFF, ROWS, VOCAB, row_fields, sample_batch, sample_rows, take

pytestmark = pytest.mark.interpret

SMALL = [case for case in CASES if case.small]
NUM_TOP = 7
# several turns, and so little room that a row may have more likely ids than fit, or a top-k beyond them
TILES = Tiling(width=64, few=64, wanted=40, warps=4)


@functools.cache
def compiled(tile: Tiling | None, num_top: int = NUM_TOP):
    return quick_jit(functools.partial(pallas.sample, num_top=num_top, tile=tile, interpret=True))


@functools.cache
def plain(num_top: int = NUM_TOP):
    return quick_jit(functools.partial(op.sample, num_top=num_top, implementation="reference"))


def run(logits, rows, counts=None, bias=None, tile=TILES, num_top=NUM_TOP) -> op.Sampled:
    out = compiled(tile, num_top)(*arrays(logits, rows, counts, bias))
    return op.Sampled(*map(np.asarray, out))


def arrays(logits, rows, counts, bias):
    logits = jnp.asarray(logits, jnp.float32)
    counts = jnp.zeros(logits.shape, jnp.int32) if counts is None else jnp.asarray(counts)
    bias = jnp.zeros(logits.shape, jnp.float32) if bias is None else jnp.asarray(bias)
    return logits, rows, counts, bias


def wanted(logits, rows, counts=None, bias=None, num_top=NUM_TOP) -> op.Sampled:
    return op.Sampled(*map(np.asarray, plain(num_top)(*arrays(logits, rows, counts, bias))))


def assert_same(got: op.Sampled, reference: op.Sampled) -> None:
    np.testing.assert_array_equal(got.ids, reference.ids)
    np.testing.assert_array_equal(got.top_ids, reference.top_ids)
    for name in ("logprob", "top_logprobs"):
        np.testing.assert_allclose(getattr(got, name), getattr(reference, name), rtol=0, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("tile", [TILES, tiling(VOCAB)], ids=["several turns", "one turn"])
@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32 - 1),
    spread=st.sampled_from([0.1, 1.0, 4.0]),
    ties=st.sampled_from([0, 0, 2]),
    fields=st.lists(row_fields, min_size=ROWS, max_size=ROWS),
)
@example(seed=0, spread=0.1, ties=0, fields=[{**OFF, "top_k": k} for k in (256, 257, 300, 399, 400, 10**6)])
@example(seed=1, spread=0.1, ties=0, fields=[{**OFF, "top_p": p} for p in (0.0, 1e-12, 0.5, 0.9, 0.999, 1.0)])
@example(seed=2, spread=4.0, ties=1, fields=[OFF, {**OFF, "top_k": 3}, {**OFF, "top_k": 257, "top_p": 0.9}] * 2)
@example(seed=3, spread=1.0, ties=0, fields=[{**OFF, "top_k": k, "top_p": 0.8} for k in (1, 39, 40, 41, 64, 65)])
@example(seed=4, spread=4.0, ties=0, fields=[{**OFF, "min_p": p} for p in (1e-6, 1e-3, 0.1, 0.5, 1.0, 0.0)])
def test_it_draws_what_the_reference_draws(tile, seed, spread, ties, fields):
    logits, rows, counts, bias = sample_batch(seed, spread, ties, fields)
    rows = rows._replace(top_logprobs=jnp.zeros(ROWS, jnp.int32))
    assert_same(run(logits, rows, counts, bias, tile), wanted(logits, rows, counts, bias))


@pytest.fixture(scope="module")
def real():
    """Rows of every kind over a vocabulary of a real model; the flat ones have thousands of ids in their nucleus."""
    vocab, rng = 49_152, np.random.default_rng(7)
    fields = [
        {**OFF, "temperature": 0.0},
        {**OFF, "temperature": 0.0, "penalised": 1, "repetition": 1.3, "frequency": 0.4, "biased": 1},
        OFF,
        {**OFF, "top_k": 40, "top_p": 0.95},
        {**OFF, "top_p": 0.9},
        {**OFF, "top_k": 5_000, "top_p": 0.999, "temperature": 1.7},
        {**OFF, "min_p": 0.05, "penalised": 1, "presence": 1.5},
        {**OFF, "min_p": 1e-6, "top_p": 0.9999},
    ]  # fmt: skip
    spread = np.array([3, 3, 3, 3, 4, 1, 3, 1])[:, None]
    logits = (rng.standard_normal((8, vocab)) * spread).astype(np.float32)
    counts = rng.choice(np.array([0, 0, 0, 1, 3, 65536, 65539], np.int32), (8, vocab))
    bias = rng.choice(np.array([0, 0, 0, 0, 5, -5], np.float32), (8, vocab))
    columns = {name: [row[name] for row in fields] for name in OFF}
    suppressed = [np.argsort(-row)[:8] for row in logits]
    rows = sample_rows(
        8, **columns, suppressed=suppressed, seed_low=np.arange(8), top_logprobs=[0, 20, -1, -1, 5, -1, 20, 1]
    )
    return logits, rows, counts, bias


def test_a_whole_vocabulary(real):
    got, reference = run(*real, tile=None), wanted(*real)
    np.testing.assert_array_equal(got.ids, reference.ids)
    asked = np.asarray(real[1].top_logprobs) >= 0
    assert_same(op.Sampled(*(part[asked] for part in got)), op.Sampled(*(part[asked] for part in reference)))
    for part in got[1:]:
        assert not part[~asked].any(), "a row that asks for none pays for none"


@pytest.mark.parametrize("case", [SMALL[0], SMALL[-1]], ids=lambda case: case.name)
def test_logprobs_are_raw_and_sorted(case):
    rng = np.random.default_rng(case.vocab)
    logits = rng.standard_normal((case.rows, case.vocab)).astype(np.float32) * 3
    bias = np.zeros((case.rows, case.vocab), np.float32)
    bias[:, 3] = 100.0
    rows = sample_rows(case.rows, temperature=2.0, top_k=1, biased=1, top_logprobs=20)
    got = run(logits, rows, bias=bias, tile=None, num_top=20)
    exact = logits.astype(np.float64)
    exact -= np.log(np.exp(exact).sum(1, keepdims=True))
    order = np.argsort(-exact, axis=1, kind="stable")[:, :20]
    assert (got.ids == 3).all(), "the bias decides the choice but not the log-probability"
    np.testing.assert_allclose(got.logprob, exact[:, 3], rtol=0, atol=2e-5)
    np.testing.assert_array_equal(got.top_ids, order)
    np.testing.assert_allclose(got.top_logprobs, np.take_along_axis(exact, order, 1), rtol=0, atol=2e-5)


def test_equal_logits():
    """The first of equal ids is the greedy choice, and alternatives come in the order of ids, more than fit or not."""
    logits = np.zeros((ROWS, VOCAB), np.float32)
    logits[3:] = -np.inf
    logits[1:, [250, 40]] = 1.0
    rows = sample_rows(ROWS, temperature=[0, 0, 1, 1, 0, 0], top_k=1, top_logprobs=0, seed_low=np.arange(ROWS))
    got, reference = run(logits, rows), wanted(logits, rows)
    assert_same(got, reference)
    assert got.ids[[0, 1, 4]].tolist() == [0, 40, 40]
    assert got.top_ids[0].tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert got.top_ids[1].tolist() == [40, 250, 0, 1, 2, 3, 4]


@pytest.mark.parametrize("temperature", [0.0, 1e-44, 1e-38, 1e-10, 1e-4])
def test_tiny_temperatures_give_the_greedy_choice(temperature):
    rng = np.random.default_rng(1)
    logits = rng.permuted(np.repeat(np.linspace(-30, 30, VOCAB)[None], ROWS, axis=0), axis=1)
    rows = sample_rows(ROWS, temperature=temperature, seed_low=np.arange(ROWS), top_p=[1, 0.5] * 3)
    np.testing.assert_array_equal(run(logits, rows).ids, logits.argmax(1))


@pytest.mark.parametrize("temperature", [1e5, 1e30])
def test_huge_temperatures_draw_from_all(temperature):
    logits = np.random.default_rng(1).standard_normal((ROWS, VOCAB)) * 8
    rows = sample_rows(ROWS, temperature=temperature, seed_low=np.arange(ROWS), top_k=[0, 3, 300, 0, 0, 0])
    got = run(logits, rows).ids
    np.testing.assert_array_equal(got, wanted(logits, rows).ids)
    assert len(set(got.tolist())) > 3


@pytest.mark.parametrize("fields", [{"temperature": 0.0}, {}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}], ids=str)
def test_all_suppressed_but_one_and_all(fields):
    logits = np.full((ROWS, VOCAB), -np.inf, np.float32)
    for row in range(ROWS):
        logits[row, 100 : 100 + row] = 1.0
    suppressed = [range(101, 100 + row) for row in range(ROWS)]
    rows = sample_rows(ROWS, suppressed=suppressed, **fields)
    assert run(logits, rows).ids.tolist() == [0, *[100] * (ROWS - 1)]


@settings(max_examples=10)
@given(seed=st.integers(0, 2**32 - 1), fields=st.lists(row_fields, min_size=ROWS, max_size=ROWS))
@example(seed=3, fields=[{**OFF, "top_p": 0.95, "temperature": 0.9}, *[OFF] * 5])
@example(seed=4, fields=[{**OFF, "top_k": 40}, *[{**OFF, "top_k": 300}] * 5])
def test_a_row_does_not_depend_on_its_neighbours(seed, fields):
    logits, rows, counts, bias = sample_batch(seed, 2.0, 0, fields)
    rows = rows._replace(top_logprobs=jnp.asarray([3, -1, 0, -1, 3, 3], jnp.int32))
    among = run(logits, rows, counts, bias)
    for row in (0, ROWS - 1):
        alone = run(np.repeat(logits[[row]], ROWS, axis=0), take(rows, [row] * ROWS), counts, bias)
        for part, whole in zip(alone, among, strict=True):
            np.testing.assert_array_equal(part, np.repeat(whole[[row]], ROWS, axis=0))


def test_what_a_row_does_not_ask_for_is_not_read():
    logits, rows, counts, bias = sample_batch(5, 2.0, 0, [OFF] * ROWS)
    clean = run(logits, rows, np.zeros_like(counts), np.zeros_like(bias))
    garbage = run(logits, rows, np.full_like(counts, 65_539), np.full_like(bias, np.nan))
    for part, other in zip(clean, garbage, strict=True):
        np.testing.assert_array_equal(part, other)


def test_a_logit_that_is_no_number_still_gives_an_id():
    logits = np.random.default_rng(0).standard_normal((ROWS, VOCAB))
    logits[:3, 17], logits[3:] = np.nan, np.nan
    rows = sample_rows(ROWS, temperature=[0, 1, 1, 0, 1, 1], top_p=[1, 1, 0.5] * 2, top_logprobs=3)
    got = run(logits, rows)
    for ids in (got.ids, got.top_ids):
        assert ((ids >= 0) & (ids < VOCAB)).all()


@pytest.mark.parametrize("case", [case for case in CASES if case not in SMALL[1:]], ids=lambda case: case.name)
def test_it_lowers_for_a_gpu_as_triton(case):
    plan = functools.partial(op.sample, num_top=examine.NUM_TOP, implementation="pallas")
    assert "__gpu$xla.gpu.triton" in lowered_for_a100(plan, *examine.shapes(case))


def test_bytes_of_a_greedy_row_and_of_one_that_draws():
    """A greedy row reads its logits; one that draws stores them and reads them again, and so do its alternatives."""
    case = next(case for case in CASES if case.name == "smollm2-8")
    greedy = {"temperature": 0.0}
    ways = (greedy, greedy | {"penalised": 1}, {"top_k": 40}, {}, greedy | {"top_logprobs": 20})
    moved = examine.traffic(case, *ways)
    for bytes_moved, times in zip(moved, (1, 2, 3, 3, 3), strict=True):
        assert times <= bytes_moved / (case.vocab * 4) < 1.03 * times
