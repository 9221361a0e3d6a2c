"""paged_decode over int8, bmq4 and bmq2 pools, against the float64 statement over what their words say."""

import functools
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pallas_kernels.errors import ContractError
from pallas_kernels.model_shapes import SMOLLM2_135M, HeadShape
from pallas_kernels.paged_decode import op
from tests.support.exact import decode_attention
from tests.support.paged import LAYERS
from tests.support.quantised import (
    BASE_BITS,
    FORMATS,
    SINKS,
    QuantisedHistory,
    block_read,
    block_words,
    quantised_history,
)
from tests.support.quick import quick_jit

SCALE = 0.125
ATOL = 1e-5
"""Of a softmax-weighted mean of values of about 1, in float32."""

EDGES = (0, 1, 15, 16, 17, 127, 128, 129, 143, 144, 255, 256, 300)
"""Histories around the first positions, around blocks, and where both end."""

unchecked = inspect.unwrap(op.paged_decode)


@dataclass(frozen=True)
class Case:
    kv_format: str
    heads: HeadShape
    page_size: int
    reference: bool = False

    @property
    def name(self) -> str:
        return f"{self.kv_format}-{self.heads.name}-page-{self.page_size}"


CASES = (
    Case("int8", SMOLLM2_135M, 16, reference=True),
    Case("int8", HeadShape("d80", 3, 3, 80), 64),
    Case("int8", HeadShape("wide", 4, 1, 256), 512),
    Case("int8", HeadShape("tiny", 6, 2, 8), 32),
    Case("bmq4", SMOLLM2_135M, 128),
    Case("bmq4", HeadShape("d80", 3, 3, 80), 256, reference=True),
    Case("bmq4", HeadShape("d96", 2, 1, 96), 128),
    Case("bmq4", HeadShape("d128", 8, 2, 128), 128),
    Case("bmq4", HeadShape("wide", 4, 1, 256), 128),
    Case("bmq4", HeadShape("tiny", 6, 2, 8), 512),
    Case("bmq4", HeadShape("d32", 2, 1, 32), 128),
    Case("bmq2", SMOLLM2_135M, 256, reference=True),
    Case("bmq2", HeadShape("d80", 3, 3, 80), 128),
    Case("bmq2", HeadShape("d96", 2, 2, 96), 128),
    Case("bmq2", HeadShape("wide", 4, 1, 256), 128),
)
NAMED = {case.name: case for case in CASES}


@functools.cache
def compiled(implementation: str, softcap: float = 0.0):
    return quick_jit(functools.partial(op.paged_decode, scale=SCALE, softcap=softcap, implementation=implementation))


def run(implementation, q, k, v, history: QuantisedHistory, layer=1, window=0, softcap=0.0, lengths=None):
    pages = jax.tree.map(jnp.asarray, history.pages)
    arrays = (jnp.int32(layer), history.table, history.lengths if lengths is None else lengths, jnp.int32(window))
    return np.asarray(compiled(implementation, softcap)(q, k, v, pages, *arrays))


def wanted_of(q, k, v, history: QuantisedHistory, layer=1, window=0, softcap=0.0):
    arguments = (q, k, v, history.plain, layer, history.plain_table, history.lengths, window)
    return decode_attention(*arguments, scale=SCALE, softcap=softcap)


def queries(rng: np.random.Generator, heads: HeadShape, slots: int):
    q = rng.standard_normal((slots, heads.q_heads, heads.head_dim), dtype=np.float32)
    k, v = rng.standard_normal((2, slots, heads.kv_heads, heads.head_dim), dtype=np.float32)
    return q, k, v


@functools.cache
def inputs(case: Case, lengths: tuple[int, ...] = EDGES):
    rng = np.random.default_rng(0)
    history = quantised_history(
        case.kv_format, rng, lengths, kv_heads=case.heads.kv_heads, head_dim=case.heads.head_dim,
        page_size=case.page_size, width=-(-max(lengths) // case.page_size) + 1,
    )  # fmt: skip
    return *queries(rng, case.heads, len(lengths)), history


def implementations(fast: tuple[str, ...], case: Case) -> list[str]:
    """Those that a test compares: native code takes head dims that 16 divides."""
    found = [name for name in fast if name != "native" or case.heads.head_dim % 16 == 0]
    return [*found, "reference"] if case.reference else found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_is_the_float64_statement(fast_implementations, case):
    """Windows of one position, inside a block, reaching into the first positions of some rows only, and none."""
    q, k, v, history = inputs(case)
    for window in (0, 1, 129, 290):
        wanted = wanted_of(q, k, v, history, window=window)
        for implementation in implementations(fast_implementations, case):
            got = run(implementation, q, k, v, history, window=window)
            np.testing.assert_allclose(got, wanted, rtol=0, atol=ATOL, err_msg=f"{implementation}, window {window}")


@pytest.mark.parametrize("kv_format", FORMATS)
def test_histories_of_several_stretches(fast_implementations, kv_format):
    """One row is so long that its pages are shared among work items, beside rows that end in the first."""
    case = next(case for case in CASES if case.kv_format == kv_format and case.heads is SMOLLM2_135M)
    q, k, v, history = inputs(case, (1100, 20, 640))
    for window in (0, 700):
        wanted = wanted_of(q, k, v, history, window=window)
        for implementation in fast_implementations:
            got = run(implementation, q, k, v, history, window=window)
            np.testing.assert_allclose(got, wanted, rtol=0, atol=ATOL, err_msg=f"{implementation}, window {window}")


@pytest.mark.parametrize("kv_format", FORMATS)
def test_a_soft_cap(fast_implementations, kv_format):
    case = next(case for case in CASES if case.kv_format == kv_format and case.reference)
    q, k, v, history = inputs(case)
    for window in (0, 140):
        wanted = wanted_of(q, k, v, history, window=window, softcap=2.0)
        for implementation in implementations(fast_implementations, replace(case, reference=kv_format == "bmq4")):
            got = run(implementation, q, k, v, history, window=window, softcap=2.0)
            np.testing.assert_allclose(got, wanted, rtol=0, atol=ATOL, err_msg=implementation)


@pytest.mark.parametrize("kv_format", ["int8", "bmq4"])
def test_bf16_queries(fast_implementations, kv_format):
    case = next(case for case in CASES if case.kv_format == kv_format and case.reference)
    *new, history = inputs(case)
    q, k, v = (np.asarray(part, jnp.bfloat16) for part in new)
    wanted = wanted_of(*(part.astype(np.float32) for part in (q, k, v)), history)
    for implementation in fast_implementations:
        got = run(implementation, q, k, v, history)
        assert got.dtype == jnp.bfloat16
        np.testing.assert_allclose(got.astype(np.float32), wanted, rtol=0, atol=2e-2, err_msg=implementation)


SLOTS, WIDTH = 4, {"int8": (16, 20), "bmq4": (128, 3), "bmq2": (128, 3)}
SMALL = HeadShape("small", 4, 2, 16)
LENGTHS = st.one_of(st.sampled_from([length for length in EDGES if length <= 300]), st.integers(0, 319))


def small(kv_format: str, rng: np.random.Generator, lengths: Sequence[int], **options: int) -> QuantisedHistory:
    """Histories in a pool that has one size whatever they are, so that one program serves."""
    page_size, width = WIDTH[kv_format]
    needed = sum(-(-length // page_size) for length in lengths)
    return quantised_history(
        kv_format, rng, lengths, kv_heads=SMALL.kv_heads, head_dim=SMALL.head_dim, page_size=page_size, width=width,
        spare=1 + SLOTS * width - needed, num_slots=SLOTS + 1, **options,
    )  # fmt: skip


@pytest.mark.parametrize("kv_format", FORMATS)
@settings(max_examples=40)
@given(
    lengths=st.lists(LENGTHS, min_size=SLOTS, max_size=SLOTS),
    window=st.one_of(st.just(0), st.integers(1, 330)),
    near=st.one_of(st.none(), st.integers(-17, 2)),
    layer=st.integers(0, LAYERS - 1),
    seed=st.integers(0, 2**32 - 1),
)
@example(lengths=[0, 0, 0, 0], window=0, near=None, layer=0, seed=0)
@example(lengths=[319, 16, 144, 272], window=0, near=-15, layer=1, seed=1)
@example(lengths=[128, 128, 0, 1], window=1, near=None, layer=1, seed=1)
def test_ragged_histories_in_pages_of_any_order(fast_implementations, kv_format, lengths, window, near, layer, seed):
    """``near`` puts the window's first position about so far behind that of the longest history."""
    rng = np.random.default_rng(seed)
    history = small(kv_format, rng, lengths)
    q, k, v = queries(rng, SMALL, SLOTS)
    if near is not None:
        window = max(1, max(lengths) + near)
    wanted = wanted_of(q, k, v, history, layer=layer, window=window)
    for implementation in (*fast_implementations, "reference"):
        got = run(implementation, q, k, v, history, layer=layer, window=window)
        np.testing.assert_allclose(got, wanted, rtol=0, atol=ATOL, err_msg=implementation)


def few(kv_format: str, **options: int) -> QuantisedHistory:
    return small(kv_format, np.random.default_rng(3), (37, 0, 200, 128), **options)


@pytest.mark.parametrize("kv_format", FORMATS)
def test_what_lies_in_unused_places_changes_nothing(kv_format, implementation):
    new, outcomes = queries(np.random.default_rng(0), SMALL, SLOTS), []
    for garbage in (0x7FC07FC0, 0x7F807F80, 0x7F7F7F7F, 0, 0xFFFFFFFF):
        history = few(kv_format, garbage=garbage)
        outcomes.append(run(implementation, *new, history))
    for outcome in outcomes[1:]:
        np.testing.assert_array_equal(outcome, outcomes[0])


@pytest.mark.parametrize("kv_format", BASE_BITS)
def test_codes_of_the_first_positions_change_nothing(fast_implementations, kv_format):
    history, new, base_bits = few(kv_format), queries(np.random.default_rng(0), SMALL, SLOTS), BASE_BITS[kv_format]
    words = history.pages.words.copy()
    first = history.table[2, 0]  # a full first block
    block = block_read(words[:, first], SMALL.head_dim, base_bits)
    key_codes, value_codes = block.key_codes.copy(), block.value_codes.copy()
    key_codes[..., :SINKS, :] ^= (1 << base_bits) - 1
    value_codes[..., :SINKS, :] ^= 15
    words[:, first] = block_words(replace(block, key_codes=key_codes, value_codes=value_codes), base_bits)
    assert np.any(words != history.pages.words)
    other = replace(history, pages=history.pages._replace(words=words))
    for implementation in fast_implementations:
        np.testing.assert_array_equal(run(implementation, *new, other), run(implementation, *new, history))


@pytest.mark.parametrize("kv_format", FORMATS)
def test_a_slot_does_not_depend_on_its_neighbours(fast_implementations, kv_format):
    history, new = few(kv_format), queries(np.random.default_rng(0), SMALL, SLOTS)
    for implementation in fast_implementations:
        whole = run(implementation, *new, history)
        other = run(implementation, *new, history, lengths=np.array([0, 0, 200, 5], np.int32))
        np.testing.assert_array_equal(whole[2], other[2])
        np.testing.assert_allclose(whole[1], np.repeat(new[2][1], 2, axis=0), rtol=0, atol=1e-6)


def test_rows_beside_pages_may_be_bits(fast_implementations):
    history, new = few("bmq4"), queries(np.random.default_rng(0), SMALL, SLOTS)
    bits = replace(history, pages=history.pages._replace(recent=history.pages.recent.view(np.uint16)))
    for implementation in fast_implementations:
        np.testing.assert_array_equal(run(implementation, *new, bits), run(implementation, *new, history))


@pytest.mark.parametrize("kv_format", FORMATS)
def test_native_code_refuses_other_head_dims(kv_format):
    heads = HeadShape("tiny", 6, 2, 8)
    history = quantised_history(
        kv_format, np.random.default_rng(0), (3,), kv_heads=2, head_dim=8, page_size=128, width=1
    )
    with pytest.raises(ContractError, match="head_dim 8 is no multiple of 16, which the native path needs"):
        run("native", *queries(np.random.default_rng(0), heads, 1), history)


def test_native_code_refuses_more_slots_than_rows_beside_pages():
    history = few("bmq4")
    few_rows = replace(history, pages=history.pages._replace(recent=history.pages.recent[:, :2]))
    with pytest.raises(ContractError, match="4 slots need as many rows beside pages, the pool has 2"):
        run("native", *queries(np.random.default_rng(0), SMALL, SLOTS), few_rows)


def test_a_pool_of_other_heads_is_refused():
    history = few("bmq4")
    q, k, v = (part[..., :8] for part in queries(np.random.default_rng(0), SMALL, SLOTS))
    with pytest.raises(ContractError, match=r"blocks of 632 words beside rows of 16 do not hold .* head_dim 8"):
        run("xla", q, k, v, history)
    history = few("int8")
    with pytest.raises(ContractError, match="pages of 145 words do not hold keys and values of head_dim 16"):
        unchecked(
            *map(jnp.asarray, queries(np.random.default_rng(0), SMALL, SLOTS)),
            type(history.pages)(jnp.zeros((2, 3, 2, 145), jnp.int32)), jnp.int32(0), jnp.asarray(history.table),
            jnp.asarray(history.lengths), jnp.int32(0), scale=1.0, implementation="xla",
        )  # fmt: skip
