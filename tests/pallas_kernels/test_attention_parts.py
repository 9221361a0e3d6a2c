"""Attention to a context in parts, as several devices hold it: the merged parts are the whole."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.model_shapes import HeadShape
from pallas_kernels.paged_decode import op as decode
from pallas_kernels.paged_prefill import op as prefill
from pallas_kernels.softmax import finish, merge
from tests.support.paged import paged_history
from tests.support.quantised import quantised_history
from tests.support.quick import quick_jit

SCALE, SHARD = 0.125, 128
HEADS = HeadShape("parts", 4, 2, 16)
FORMATS = {"float32": 64, "int8": 32, "bmq4": 128, "bmq2": 128}
"""Page sizes."""
LENGTHS = (700, 0, 5, 128, 129, 300, 384)
"""Nothing, inside the first shard, at its end and behind it, and five shards and a bit."""
SLOTS = np.array([3, 0, 6, 1, 5, 2, 4], np.int32)


LAUNCHES = (("xla", 1), ("xla", 3), pytest.param("pallas", 2, marks=pytest.mark.interpret))


def history_of(kv_format, slots):
    rng, page_size = np.random.default_rng(0), FORMATS[kv_format]
    options = {"kv_heads": HEADS.kv_heads, "head_dim": HEADS.head_dim, "page_size": page_size}
    width = -(-max(LENGTHS) // page_size)
    if kv_format == "float32":
        return paged_history(rng, LENGTHS, width=width, **options)
    return quantised_history(kv_format, rng, LENGTHS, width=width, slots=slots, **options)


def parts_of(history, page_size, devices):
    """(page table, positions, whether it begins) of each device; shard s of row r lies on device (s + r) % devices."""
    shard_pages = SHARD // page_size
    rows, shards = len(LENGTHS), -(-max(LENGTHS) // SHARD)
    table = np.pad(history.table, ((0, 0), (0, shards * shard_pages - history.table.shape[1])))
    table = table.reshape(rows, shards, shard_pages)
    for device in range(devices):
        local = np.full((rows, -(-shards // devices), shard_pages), 2**31 - 1, np.int32)
        lengths = np.zeros(rows, np.int32)
        for row, length in enumerate(LENGTHS):
            own = [shard for shard in range(shards) if (shard + row) % devices == device]
            local[row, : len(own)] = table[row, own]
            lengths[row] = sum(min(max(length - shard * SHARD, 0), SHARD) for shard in own)
        begins = np.arange(rows) % devices == device
        yield local.reshape(rows, -1), lengths, begins


def merged(parts):
    return np.asarray(finish(functools.reduce(merge, parts)))


@pytest.mark.parametrize(("implementation", "devices"), LAUNCHES)
@pytest.mark.parametrize("kv_format", FORMATS)
def test_parts_of_decoding_are_the_whole(kv_format, implementation, devices):
    history, rng = history_of(kv_format, np.arange(7)), np.random.default_rng(1)
    q = rng.standard_normal((7, HEADS.q_heads, HEADS.head_dim), dtype=np.float32)
    k, v = rng.standard_normal((2, 7, HEADS.kv_heads, HEADS.head_dim), dtype=np.float32)
    pages, layer = jax.tree.map(jnp.asarray, history.pages), jnp.int32(1)
    options = {"scale": SCALE, "softcap": 2.0}
    whole = quick_jit(functools.partial(decode.paged_decode, implementation="xla", **options))(
        q, k, v, pages, layer, history.table, history.lengths, jnp.int32(0)
    )
    if implementation == "xla":
        run = functools.partial(decode.paged_decode_part, implementation="xla", **options)
    else:
        kernel = functools.partial(decode.kernel_for(pages), interpret=True, **options)
        run = functools.partial(_without_window, kernel)
    call = quick_jit(run)
    parts = [call(q, k, v, pages, layer, *part) for part in parts_of(history, FORMATS[kv_format], devices)]
    np.testing.assert_allclose(merged(parts), whole, rtol=0, atol=1e-5)


def _without_window(kernel, *arguments):
    *rest, begins = arguments
    return kernel(*rest, jnp.int32(0), begins)


@pytest.mark.parametrize(("implementation", "devices"), LAUNCHES)
@pytest.mark.parametrize("kv_format", FORMATS)
def test_parts_of_a_prefill_are_the_whole(kv_format, implementation, devices):
    history, rng = history_of(kv_format, SLOTS), np.random.default_rng(2)
    lengths = np.array([9, 4, 1, 3, 2, 0, 0], np.int32)
    offsets = np.minimum(np.cumsum(lengths) - lengths, lengths.sum()).astype(np.int32)
    tokens, used = 24, int(lengths.sum())
    q = rng.standard_normal((tokens, HEADS.q_heads, HEADS.head_dim), dtype=np.float32)
    k, v = rng.standard_normal((2, tokens, HEADS.kv_heads, HEADS.head_dim), dtype=np.float32)
    pages, layer = jax.tree.map(jnp.asarray, history.pages), jnp.int32(0)
    rows = lengths, offsets
    whole = quick_jit(functools.partial(prefill.paged_prefill, scale=SCALE, implementation="xla"))(
        q, k, v, pages, layer, history.table, SLOTS, history.lengths, *rows, jnp.int32(0)
    )
    if implementation == "xla":
        run = functools.partial(prefill.paged_prefill_part, scale=SCALE, implementation="xla")
    else:
        kernel = functools.partial(prefill.kernel_for(pages), scale=SCALE, interpret=True)
        run = functools.partial(_without_window, kernel)
    call = quick_jit(run)
    parts = []
    for table, starts, begins in parts_of(history, FORMATS[kv_format], devices):
        parts.append(call(q, k, v, pages, layer, table, SLOTS, starts, *rows, begins))
    np.testing.assert_allclose(merged(parts)[:used], whole[:used], rtol=0, atol=1e-5)
