"""The Triton kernels of paged_decode over int8, bmq4 and bmq2 pools, interpreted on the CPU."""

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pallas_kernels.errors import ContractError
from pallas_kernels.kv_layout import BitmaskLayout
from pallas_kernels.model_shapes import SMOLLM2_135M, HeadShape
from pallas_kernels.operands import CONSTANTS, Unpack, chunks, rounded
from pallas_kernels.paged_decode import examine, op, pallas_bitmask, pallas_int8
from pallas_kernels.paged_decode.cases import QUANTISED_CASES
from pallas_kernels.paged_decode.stretches import Shares
from tests.support.exact import decode_attention
from tests.support.paged import LAYERS
from tests.support.quantised import BASE_BITS, FORMATS, SINKS, block_read, block_words, quantised_history
from tests.support.quick import quick_jit

pytestmark = pytest.mark.interpret

SCALE = 0.125
ATOL = {"float32": 1e-5, "bf16": 3e-2}
"""Of a softmax-weighted mean of values of about 1; bf16 operands have 8 bits."""

EDGES = (0, 1, 15, 16, 17, 127, 128, 129, 143, 144, 255, 256, 300)


@dataclass(frozen=True)
class Case:
    kv_format: str
    heads: HeadShape
    page_size: int


CASES = (
    Case("int8", SMOLLM2_135M, 16),
    Case("int8", HeadShape("d80", 10, 1, 80), 64),
    Case("int8", HeadShape("wide", 9, 1, 256), 512),
    Case("bmq4", SMOLLM2_135M, 128),
    Case("bmq4", HeadShape("d80", 20, 1, 80), 256),
    Case("bmq4", HeadShape("wide", 9, 1, 256), 128),
    Case("bmq2", SMOLLM2_135M, 256),
    Case("bmq2", HeadShape("d96", 2, 2, 96), 128),
    Case("bmq2", HeadShape("tiny", 6, 2, 8), 512),
)


@functools.cache
def compiled(kv_format: str, scale: float, softcap: float, tile: object = None):
    kernel = pallas_int8.paged_decode if kv_format == "int8" else pallas_bitmask.paged_decode
    return quick_jit(functools.partial(kernel, scale=scale, softcap=softcap, tile=tile, interpret=True))


def run(kv_format, new, history, *, layer=1, window=0, scale=SCALE, softcap=0.0, tile=None, pages=None):
    pages = jax.tree.map(jnp.asarray, history.pages if pages is None else pages)
    arrays = (jnp.int32(layer), history.table, history.lengths, jnp.int32(window))
    return np.asarray(compiled(kv_format, scale, softcap, tile)(*new, pages, *arrays))


def wanted_of(new, history, *, layer=1, window=0, softcap=0.0):
    arguments = (*new, history.plain, layer, history.plain_table, history.lengths, window)
    return decode_attention(*arguments, scale=SCALE, softcap=softcap)


def queries(rng: np.random.Generator, heads: HeadShape, slots: int):
    q = rng.standard_normal((slots, heads.q_heads, heads.head_dim), dtype=np.float32)
    k, v = rng.standard_normal((2, slots, heads.kv_heads, heads.head_dim), dtype=np.float32)
    return q, k, v


def inputs(case: Case, lengths: tuple[int, ...] = EDGES):
    rng = np.random.default_rng(0)
    history = quantised_history(
        case.kv_format, rng, lengths, kv_heads=case.heads.kv_heads, head_dim=case.heads.head_dim,
        page_size=case.page_size, width=-(-max(lengths) // case.page_size) + 1,
    )  # fmt: skip
    return queries(rng, case.heads, len(lengths)), history


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.kv_format}-{case.heads.name}-page-{case.page_size}")
def test_it_is_the_float64_statement(case):
    """Windows of one position, inside a block, reaching into the first positions of some rows only, and none."""
    new, history = inputs(case)
    for window in (0, 1, 129, 290):
        wanted = wanted_of(new, history, window=window)
        got = run(case.kv_format, new, history, window=window)
        np.testing.assert_allclose(got, wanted, rtol=0, atol=ATOL["float32"], err_msg=f"window {window}")


@pytest.mark.parametrize("case", [CASES[0], CASES[3], CASES[7]], ids=lambda case: case.kv_format)
def test_operands_of_bf16_lose_their_own_rounding_only(case):
    """These are the operands on a GPU; codes in them are exact, and what is added to codes is gone from the sums."""
    new, history = inputs(case)
    new = tuple(np.asarray(part, jnp.bfloat16) for part in new)
    got = run(case.kv_format, new, history)
    assert got.dtype == jnp.bfloat16
    wanted = wanted_of([part.astype(np.float32) for part in new], history)
    np.testing.assert_allclose(got.astype(np.float32), wanted, rtol=0, atol=ATOL["bf16"])


SLOTS, WIDTH = 4, {"int8": (16, 20), "bmq4": (128, 3), "bmq2": (128, 3)}
SMALL = HeadShape("small", 6, 2, 16)


def small(kv_format: str, rng: np.random.Generator, lengths: Sequence[int], **options: int):
    """Histories in a pool that has one size whatever they are, so that one program serves."""
    page_size, width = WIDTH[kv_format]
    needed = sum(-(-length // page_size) for length in lengths)
    return quantised_history(
        kv_format, rng, lengths, kv_heads=SMALL.kv_heads, head_dim=SMALL.head_dim, page_size=page_size, width=width,
        spare=1 + SLOTS * width - needed, num_slots=SLOTS + 1, **options,
    )  # fmt: skip


def tile_of(kv_format: str, splits: int):
    """The sizes for ``SMALL`` with so many stretches, as short as a turn."""
    if kv_format == "int8":
        tile = pallas_int8.tiling(SLOTS, SMALL.q_heads, SMALL.kv_heads, SMALL.head_dim, 320)
    else:
        layout = BitmaskLayout(SMALL.head_dim, BASE_BITS[kv_format])
        tile = pallas_bitmask.tiling(SLOTS, SMALL.q_heads, SMALL.kv_heads, 384, layout)
    return dataclasses.replace(tile, shares=dataclasses.replace(tile.shares, splits=splits, least_turns=1))


@pytest.mark.parametrize("kv_format", FORMATS)
@settings(max_examples=30)
@given(
    lengths=st.lists(st.one_of(st.sampled_from(EDGES), st.integers(0, 319)), min_size=SLOTS, max_size=SLOTS),
    window=st.one_of(st.just(0), st.integers(1, 330)),
    softcap=st.sampled_from([0.0, 2.0]),
    layer=st.integers(0, LAYERS - 1),
    seed=st.integers(0, 2**32 - 1),
)
@example(lengths=[0, 0, 0, 0], window=0, softcap=0.0, layer=0, seed=0)
@example(lengths=[319, 16, 144, 272], window=0, softcap=2.0, layer=1, seed=1)
@example(lengths=[128, 128, 0, 1], window=1, softcap=0.0, layer=1, seed=1)
@example(lengths=[256, 300, 144, 128], window=129, softcap=0.0, layer=0, seed=2)
def test_ragged_histories_in_pages_of_any_order(kv_format, lengths, window, softcap, layer, seed):
    rng = np.random.default_rng(seed)
    history = small(kv_format, rng, lengths)
    new, tile = queries(rng, SMALL, SLOTS), tile_of(kv_format, 3)
    got = run(kv_format, new, history, layer=layer, window=window, softcap=softcap, tile=tile)
    wanted = wanted_of(new, history, layer=layer, window=window, softcap=softcap)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=ATOL["float32"])


def few(kv_format: str, **options: int):
    return queries(np.random.default_rng(0), SMALL, SLOTS), small(
        kv_format, np.random.default_rng(3), (37, 0, 300, 128), **options
    )


@pytest.mark.parametrize(("kv_format", "splits"), [("int8", 1), ("int8", 7), ("bmq4", 7)])
def test_any_number_of_stretches_gives_the_same(kv_format, splits):
    new, history = few(kv_format)
    got = run(kv_format, new, history, tile=tile_of(kv_format, splits))
    np.testing.assert_allclose(got, wanted_of(new, history), rtol=0, atol=ATOL["float32"])


@pytest.mark.parametrize("kv_format", FORMATS)
def test_what_lies_in_unused_places_changes_nothing(kv_format):
    outcomes = []
    for garbage in (0x7FC07FC0, 0x7F807F80, 0x7F7F7F7F, 0, 0xFFFFFFFF):
        new, history = few(kv_format, garbage=garbage)
        outcomes.append(run(kv_format, new, history, tile=tile_of(kv_format, 3)))
    for outcome in outcomes[1:]:
        np.testing.assert_array_equal(outcome, outcomes[0])


@pytest.mark.parametrize("kv_format", BASE_BITS)
def test_codes_of_the_first_positions_change_nothing(kv_format):
    new, history = few(kv_format)
    base_bits, words = BASE_BITS[kv_format], history.pages.words.copy()
    first = history.table[2, 0]
    block = block_read(words[:, first], SMALL.head_dim, base_bits)
    key_codes, value_codes = block.key_codes.copy(), block.value_codes.copy()
    key_codes[..., :SINKS, :] ^= (1 << base_bits) - 1
    value_codes[..., :SINKS, :] ^= 15
    words[:, first] = block_words(dataclasses.replace(block, key_codes=key_codes, value_codes=value_codes), base_bits)
    pages, tile = history.pages._replace(words=words), tile_of(kv_format, 3)
    assert np.any(words != history.pages.words)
    np.testing.assert_array_equal(
        run(kv_format, new, history, pages=pages, tile=tile), run(kv_format, new, history, tile=tile)
    )


@pytest.mark.parametrize(
    "case", [case for case in QUANTISED_CASES if "8k" in case.name or "page" in case.name], ids=lambda case: case.name
)
def test_it_lowers_for_a_gpu_as_triton(case):
    arguments = examine.arguments(case, len(case.lengths), case.heads.kv_heads, 1)
    run = functools.partial(op.paged_decode, scale=SCALE, implementation="pallas")
    text = jax.jit(run).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert "__gpu$xla.gpu.triton" in text
    assert examine.kernel_name(case) in text


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_operands_are_the_codes_of_words(dtype):
    ones, byte_base = (jnp.full((1, 1), value, jnp.int32) for value in CONSTANTS)
    unpack = Unpack(jnp.dtype(dtype), ones, byte_base)
    words = np.random.default_rng(0).integers(-(2**31), 2**31, (8, 16), dtype=np.int64).astype(np.int32)
    bits = words.view(np.uint32)
    for width in (2, 4):
        for shift in range(0, 16, width):
            for place, got in zip((shift, shift + 16), unpack.pair(jnp.asarray(words), shift, width), strict=True):
                wanted = (bits >> np.uint32(place) & np.uint32(2**width - 1)) + unpack.excess
                np.testing.assert_array_equal(np.asarray(got, np.float64), wanted)
                assert got.dtype == dtype
    for index in range(4):
        got = unpack.signed_byte(jnp.asarray(words), index)
        np.testing.assert_array_equal(np.asarray(got, np.float64), (bits >> np.uint32(8 * index)).astype(np.int8))


def test_every_byte_is_exact_in_bf16():
    ones, byte_base = (jnp.full((1, 1), value, jnp.int32) for value in CONSTANTS)
    got = Unpack(jnp.dtype(jnp.bfloat16), ones, byte_base).signed_byte(jnp.arange(-128, 128, dtype=jnp.int32)[None], 0)
    np.testing.assert_array_equal(np.asarray(got, np.float64)[0], np.arange(-128, 128))


def test_rounding_to_an_operand():
    x = np.array([0.0, 1.0, -1.0, 1 + 2**-8, -1 - 2**-8, 1 + 2**-9, 3e38, -1e-30], np.float32)
    operand, whole = rounded(jnp.asarray(x), jnp.dtype(jnp.bfloat16))
    np.testing.assert_array_equal(np.asarray(operand, np.float32), np.asarray(whole))
    np.testing.assert_allclose(np.asarray(whole), x, rtol=2**-8)
    np.testing.assert_array_equal(np.asarray(whole)[:6], [0, 1, -1, 1 + 2**-7, -1 - 2**-7, 1])


def test_chunks_cover_any_count_in_powers_of_two():
    assert {count: chunks(count, 64) for count in (2, 16, 20, 32, 40, 48, 64, 128)} == {
        2: (16,), 16: (16,), 20: (32,), 32: (32,), 40: (32, 16), 48: (32, 16), 64: (64,), 128: (64, 64),
    }  # fmt: skip
    assert chunks(128, 32) == (32,) * 4


def test_stretches_fill_the_card_but_are_not_too_short():
    layout = BitmaskLayout(128, 4)
    assert pallas_bitmask.tiling(8, 32, 8, 8192, layout).shares == Shares(8, 128, 11, 6)  # of 6 blocks or more
    assert pallas_bitmask.tiling(64, 64, 8, 8192, layout).shares.splits == 2  # 1024 programs, more than eight each
    assert pallas_int8.tiling(8, 32, 8, 128, 8192).shares == Shares(8, 64, 14, 6)
    assert pallas_int8.tiling(1, 20, 1, 64, 8192).shares.grid(1, 1, 20)[0] % 2 == 0  # two tiles of query heads


def test_what_no_kernel_takes_is_refused():
    new, history = few("int8")
    with pytest.raises(ContractError, match=r"head_dim 72 has no tile; this kernel takes \(8, 16, 32, 64, 80, 96, 128"):
        pallas_int8.tiling(1, 8, 8, 72, 1024)
    for kv_format in ("int8", "bmq4"):
        new, history = few(kv_format)
        with pytest.raises(ContractError, match=r"scale 0\.0 is not positive"):
            run(kv_format, new, history, scale=0.0)
        half = [part.astype(np.float16) for part in new]
        with pytest.raises(ContractError, match="q is float16; this kernel takes bf16 and float32"):
            run(kv_format, half, history)
