import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pallas_kernels.errors import ContractError
from pallas_kernels.model_shapes import ALL
from pallas_kernels.paged_prefill import op, xla
from pallas_kernels.paged_prefill.cases import CASES, PrefillCase
from tests.support.exact import prefill_attention
from tests.support.paged import LAYERS, paged_history
from tests.support.quick import quick_jit

SPARED = ("smollm2-360m", "qwen2-0.5b", "qwen2-7b", "llama-3.1-70b")  # groups as in others; decode has them all
SMALL = [case for case in CASES if case.small and not case.name.startswith(SPARED)]
COMPARED = [case for case in SMALL if case.name.startswith(("smollm2-135m", "llama-3.1-8b", "gemma", "d80", "tiny"))]
DTYPES = {"float32": jnp.float32, "bf16": jnp.bfloat16}
# float32 sums err by rounding only; with bf16 operands the softmax weights and the result have 8 bits each
TOLERANCE = {"float32": 1e-5, "bf16": 4e-2}
SCALE = 0.125

unchecked = inspect.unwrap(op.paged_prefill)


@functools.cache
def compiled(implementation: str, scale: float, softcap: float, quick: bool):
    run = functools.partial(op.paged_prefill, scale=scale, softcap=softcap, implementation=implementation)
    return quick_jit(run) if quick or implementation == "reference" else jax.jit(run)


def launch(rng, chunks, *, heads, tokens, page_size, width, spare=2):
    """Arguments of a launch; tokens behind the last row hold noise."""
    starts, lengths = (np.array(column, np.int32) for column in zip(*chunks, strict=True))
    offsets = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int32)
    history = paged_history(
        rng, starts, kv_heads=heads[1], head_dim=heads[2], page_size=page_size, width=width, spare=spare
    )
    q = rng.standard_normal((tokens, heads[0], heads[2]), dtype=np.float32)
    k, v = rng.standard_normal((2, tokens, heads[1], heads[2]), dtype=np.float32)
    return (q, k, v, history.pages), (history.table, starts, lengths, offsets)


def of_case(case: PrefillCase):
    heads = case.heads.q_heads, case.heads.kv_heads, case.heads.head_dim
    rng = np.random.default_rng(1)
    return launch(rng, case.chunks, heads=heads, tokens=case.tokens, page_size=case.page_size, width=case.width)


def with_slots(rows):
    """The rows with a slot each, which float pools do not look at."""
    return rows[0], np.arange(len(rows[1]), dtype=np.int32), *rows[1:]


def run(implementation, data, layer, rows, window, *, scale=SCALE, softcap=0.0, quick=False):
    arrays = (*data, np.int32(layer), *with_slots(rows), np.int32(window))
    return np.asarray(compiled(implementation, scale, softcap, quick)(*map(jnp.asarray, arrays)), np.float32)


def used(rows) -> np.ndarray:
    return np.arange(int(rows[2].sum()))


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_it_is_the_float64_statement(case):
    data, rows = of_case(case)
    got = run("xla", data, 1, rows, case.window, softcap=case.softcap, quick=case not in COMPARED)
    wanted = prefill_attention(*data, 1, *rows, case.window, scale=SCALE, softcap=case.softcap)
    np.testing.assert_allclose(got[used(rows)], wanted[used(rows)], rtol=0, atol=TOLERANCE["float32"])
    assert np.isfinite(got).all(), "tokens of nobody are finite"


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *((case, "float32") for case in COMPARED),
        *((case, "bf16") for case in COMPARED if case.name in ("smollm2-135m-9:3-d64-mixed", "gemma3-270m-window")),
    ],
    ids=lambda part: getattr(part, "name", part),
)
def test_implementations_agree_with_the_reference(fast_implementations, case, dtype):
    data, rows = of_case(case)
    data = tuple(jnp.asarray(part, DTYPES[dtype]) for part in data)
    wanted = run("reference", data, 0, rows, case.window, softcap=case.softcap)
    for implementation in fast_implementations:
        if implementation == "native" and (dtype != "float32" or case.heads.head_dim % 16):
            continue  # it takes float32 pages and head dims that 16 divides
        got = run(implementation, data, 0, rows, case.window, softcap=case.softcap)
        np.testing.assert_allclose(
            got[used(rows)], wanted[used(rows)], rtol=0, atol=TOLERANCE[dtype], err_msg=implementation
        )


EDGES = ((0, 1), (0, 2), (0, 15), (0, 16), (0, 17), (120, 9), (128, 1), (1000, 3))
"""Fresh prompts around a page of 16, and chunks behind histories around 128 and of 1000 positions."""


@pytest.mark.parametrize("heads", ALL, ids=lambda heads: heads.name)
def test_bc169_every_head_shape_around_the_edges_of_pages(fast_implementations, heads):
    case = PrefillCase(heads.name, heads, EDGES, 64, 16)
    data, rows = of_case(case)
    wanted = prefill_attention(*data, 1, *rows, 0, scale=SCALE)
    implementations = {"native"} & set(fast_implementations) if heads.head_dim % 16 == 0 else set()
    for implementation in implementations | ({"xla"} if heads.name.startswith(SPARED) else set()):
        got = run(implementation, data, 1, rows, 0, quick=True)
        np.testing.assert_allclose(
            got[used(rows)], wanted[used(rows)], rtol=0, atol=TOLERANCE["float32"], err_msg=implementation
        )


def test_float32_pages_serve_bf16_queries():
    (q, k, v, pages), rows = of_case(SMALL[0])
    new = tuple(jnp.asarray(part, jnp.bfloat16) for part in (q, k, v))
    got = run("xla", (*new, pages), 0, rows, 0)
    wanted = prefill_attention(*(np.asarray(p, np.float32) for p in (*new, pages)), 0, *rows, 0, scale=SCALE)
    np.testing.assert_allclose(got[used(rows)], wanted[used(rows)], rtol=0, atol=TOLERANCE["bf16"])


@pytest.mark.parametrize("softcap", [0.0, 20.0])
def test_float32_operands_may_be_multiplied_in_bf16(fast_implementations, softcap):
    """The int8 form: float32 in and out, bf16 where it is multiplied."""
    (q, k, v, pages), rows = of_case(SMALL[0])
    wanted = prefill_attention(q, k, v, pages, 0, *rows, 0, scale=SCALE, softcap=softcap)
    for implementation in fast_implementations:
        call = functools.partial(op.paged_prefill, scale=SCALE, softcap=softcap, implementation=implementation)
        arrays = [*map(jnp.asarray, (q, k, v, pages)), jnp.int32(0), *map(jnp.asarray, with_slots(rows)), jnp.int32(0)]
        rounded, exact = (
            np.asarray(jax.jit(functools.partial(call, products=p))(*arrays)) for p in ("bf16", "float32")
        )
        assert rounded.dtype == np.float32, implementation
        np.testing.assert_allclose(
            rounded[used(rows)], wanted[used(rows)], rtol=0, atol=TOLERANCE["bf16"], err_msg=implementation
        )
        np.testing.assert_allclose(
            exact[used(rows)], wanted[used(rows)], rtol=0, atol=TOLERANCE["float32"], err_msg=implementation
        )


def test_what_lies_in_unused_places_changes_nothing(implementation):
    (q, k, v, pages), (table, *rest) = of_case(SMALL[0])
    outcomes = []
    for garbage in (np.nan, np.inf, -3e38, 0.0):
        filled = np.where(np.isnan(pages), np.float32(garbage), pages)
        places = table.copy()
        for row, (start, _) in enumerate(SMALL[0].chunks):
            places[row, -(-start // 16) :] = int(garbage == 0)
        outcomes.append(run(implementation, (q, k, v, filled), 0, (places, *rest), 0)[used((table, *rest))])
    for outcome in outcomes[1:]:
        np.testing.assert_array_equal(outcome, outcomes[0])


def test_a_row_does_not_depend_on_its_neighbours(implementation):
    (q, k, v, pages), rows = of_case(SMALL[0])
    whole = run(implementation, (q, k, v, pages), 0, rows, 0)
    table, starts, lengths, offsets = rows
    alone = (
        table[[1, 0, 2, 3]],
        starts[[1, 0, 2, 3]],
        np.array([20, 0, 0, 0], np.int32),
        np.array([0, 20, 20, 20], np.int32),
    )
    own = slice(offsets[1], offsets[1] + lengths[1])
    moved = (np.concatenate([part[own], part[: 32 - lengths[1]]]) for part in (q, k, v))
    got = run(implementation, (*moved, pages), 0, alone, 0)
    np.testing.assert_allclose(got[: lengths[1]], whole[own], rtol=0, atol=2e-6)


def zeros(*shape, dtype=np.float32):
    return jnp.zeros(shape, dtype)


GOOD = {
    "q": zeros(6, 4, 8), "k": zeros(6, 2, 8), "v": zeros(6, 2, 8), "pages": zeros(1, 3, 2, 2, 4, 8),
    "layer": jnp.int32(0), "page_table": zeros(2, 3, dtype=np.int32), "slots": zeros(2, dtype=np.int32),
    "starts": zeros(2, dtype=np.int32), "lengths": zeros(2, dtype=np.int32), "offsets": zeros(2, dtype=np.int32),
    "window": jnp.int32(0),
}  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"k": zeros(5, 2, 8)}, r"k \(5, 2, 8\) and v \(6, 2, 8\) must be one row a token"),
        ({"v": zeros(6, 2, 8, dtype=jnp.bfloat16)}, "v bfloat16 must be of one dtype"),
        ({"pages": zeros(1, 3, 2, 2, 4, 16)}, r"pages \(1, 3, 2, 2, 4, 16\) do not hold keys and values of head_dim 8"),
        ({"pages": zeros(1, 3, 2, 3, 4, 8)}, r"pages \(1, 3, 2, 3, 4, 8\) do not hold keys and values"),
        ({"q": zeros(6, 3, 8)}, "q_heads 3 is no multiple of kv_heads 2"),
        ({"starts": zeros(3, dtype=np.int32)}, r"starts \(3,\), lengths \(2,\) and offsets \(2,\) need one entry"),
        ({"offsets": zeros(1, dtype=np.int32)}, r"offsets \(1,\) need one entry"),
    ],
)
def test_contract(wrong, message):
    with pytest.raises(ContractError, match=message):
        unchecked(**{**GOOD, **wrong}, scale=1.0, implementation="xla")


ROWS, TOKENS, WIDTH, PAGE = 4, 24, 6, 4
HEADS = 6, 2, 16


@pytest.fixture(scope="module")
def small_tiles():
    """Tiles so small that rows end mid tile, cross tiles and span blocks of keys."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(xla, "QUERY_TILE", 8)
        patch.setattr(xla, "KEY_BLOCK", 8)
        compiled.cache_clear()
        yield
    compiled.cache_clear()


@st.composite
def chunk_lists(draw):
    """Rows back to back, empty ones last, at most TOKENS tokens together and WIDTH pages each."""
    left, chunks = TOKENS, []
    for _ in range(draw(st.integers(0, ROWS))):
        if left:
            length = draw(st.integers(1, left))
            left -= length
            chunks.append((draw(st.integers(0, WIDTH * PAGE - 1)), length))
    return [*chunks, *[(0, 0)] * (ROWS - len(chunks))]


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("softcap", [0.0, 2.0])
@settings(max_examples=40)
@given(
    chunks=chunk_lists(),
    window=st.one_of(st.just(0), st.integers(1, WIDTH * PAGE + TOKENS)),
    layer=st.integers(0, LAYERS - 1),
    seed=st.integers(0, 2**32 - 1),
)
@example(chunks=[(0, 0)] * 4, window=0, layer=0, seed=0)
@example(chunks=[(0, 24), (0, 0), (0, 0), (0, 0)], window=0, layer=0, seed=1)
@example(chunks=[(23, 24), (0, 0), (0, 0), (0, 0)], window=1, layer=1, seed=2)
@example(chunks=[(23, 3), (0, 9), (8, 8), (17, 4)], window=5, layer=1, seed=3)
@example(chunks=[(20, 1), (21, 1), (22, 1), (23, 1)], window=0, layer=0, seed=4)
def test_ragged_launches_with_and_without_history(fast_implementations, softcap, chunks, window, layer, seed):
    rng = np.random.default_rng(seed)
    spare = 1 + ROWS * WIDTH - sum(-(-start // PAGE) for start, _ in chunks)  # one size of pool: one program
    data, rows = launch(rng, chunks, heads=HEADS, tokens=TOKENS, page_size=PAGE, width=WIDTH, spare=spare)
    wanted = prefill_attention(*data, layer, *rows, window, scale=0.25, softcap=softcap)
    for implementation in fast_implementations:
        got = run(implementation, data, layer, rows, window, scale=0.25, softcap=softcap)
        np.testing.assert_allclose(got[used(rows)], wanted[used(rows)], rtol=0, atol=4e-6, err_msg=implementation)
        assert np.isfinite(got).all()
