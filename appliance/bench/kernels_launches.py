"""What ``zccp bench kernels --device`` launches: every case of every kernel, its data, its check and what it must do.

Loads jax. Owns one function a kernel that makes launches of its cases, with new inputs for every measurement. Measures
nothing itself.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from appliance.bench.kernels_checks import Check, Checked, check_attention, check_pools, check_samples
from appliance.bench.kernels_data import layers_of, normal, random_pool, random_table
from appliance.bench.kernels_static import LONG_CONTEXT
from pallas_kernels.kv_layout import BASE_BITS, BLOCK, bitmask_page_bytes, int8_page_bytes, recent_bytes
from pallas_kernels.page_write import cases as write_cases
from pallas_kernels.page_write import examine as write_examine
from pallas_kernels.page_write import op as write_op
from pallas_kernels.page_write import pallas as write_pallas
from pallas_kernels.paged_decode import cases as decode_cases
from pallas_kernels.paged_decode import examine as decode_examine
from pallas_kernels.paged_decode import op as decode_op
from pallas_kernels.paged_prefill import cases as prefill_cases
from pallas_kernels.paged_prefill import examine as prefill_examine
from pallas_kernels.paged_prefill import op as prefill_op
from pallas_kernels.pages import Pages
from pallas_kernels.rows import Rows
from pallas_kernels.sample import cases as sample_cases
from pallas_kernels.sample import examine as sample_examine
from pallas_kernels.sample import op as sample_op
from pallas_kernels.sample import pallas as sample_pallas

MOST_GATHERED_BYTES = 2**31
"""What the reference of paged_prefill may gather; beyond, a case is held against the XLA implementation."""
LONG_PREFILL = 2 * 10**10
"""Operations from which on a prefill counts for the figure: below, launches and the last wave of tiles decide."""
DRAWS = 8
"""Launches that a check of sample compares."""
WAYS = {"greedy": {"temperature": 0.0}, "top-k-top-p": {"top_k": 50, "top_p": 0.9}, "all": {}}
"""How all rows of a launch of sample are sampled; what is not named is off."""
_SPREAD = 4.0  # of logits: a model's hundreds of likeliest ids have nearly all of the probability

_BF16_BYTES, _FLOAT_BYTES = 2, 4

Yardstick = Literal["of copy bandwidth", "of what a copy writes", "of the product's operations"]


@dataclass(frozen=True, slots=True)
class Launch:
    """One case with its data.

    ``step`` takes a number, the inputs, and gives the first input of the next step, which depends on all that it did;
    ``donates`` says that it does so in place. ``inputs`` makes new ones from a key. A step does at least ``amount`` of
    what ``of`` counts, bytes or operations; ``counts`` marks cases that figures are made of.
    """

    kernel: str
    name: str
    step: Callable[..., Any]
    inputs: Callable[[Array], tuple[Any, ...]]
    check: Check
    amount: int
    of: Yardstick
    counts: bool = False
    donates: bool = False


def launches(pool_bytes: int, *, interpret: bool = False) -> Iterator[tuple[str, Callable[[], Launch]]]:
    """Every case by name, and what makes its data; a pool has at least ``pool_bytes`` where layers can give them."""
    for case in (*decode_cases.CASES, *decode_cases.QUANTISED_CASES, *decode_cases.PAIR_64K):
        yield f"paged_decode {case.name}", functools.partial(of_decode, case, pool_bytes, interpret=interpret)
    for case in (*prefill_cases.CASES, *prefill_cases.QUANTISED_CASES):
        yield f"paged_prefill {case.name}", functools.partial(of_prefill, case, pool_bytes, interpret=interpret)
    for case in write_cases.GPU_CASES:
        yield f"page_write {case.name}", functools.partial(of_write, case, interpret=interpret)
    for case in sample_cases.CASES:
        for way in WAYS:
            yield f"sample {case.name} {way}", functools.partial(of_sample, case, way, interpret=interpret)


def of_decode(case: decode_cases.DecodeCase, pool_bytes: int, *, interpret: bool = False) -> Launch:
    """A case of paged_decode; bytes are those of the pool's format, of vectors, and of what lies beside pages."""
    heads, lengths = case.heads, np.array(case.lengths, np.int32)
    shapes = decode_examine.arguments(case, len(lengths), heads.kv_heads, 1)
    stored = sum(decode_examine.history_bytes(case, length) for length in case.lengths)
    if case.kv_format in BASE_BITS:
        stored += len(lengths) * recent_bytes(heads.head_dim)
    vectors = len(lengths) * 2 * (heads.q_heads + heads.kv_heads) * heads.head_dim * _BF16_BYTES
    return _attention(
        "paged_decode",
        case,
        shapes,
        decode_op,
        rest=(random_table(-(-lengths // case.page_size), case.width), jnp.asarray(lengths), jnp.int32(case.window)),
        rows=len(lengths),
        amount=heads.kv_heads * stored + vectors,
        of="of copy bandwidth",
        counts=min(case.lengths) >= LONG_CONTEXT,
        pool_bytes=pool_bytes,
        interpret=interpret,
    )


def of_prefill(case: prefill_cases.PrefillCase, pool_bytes: int, *, interpret: bool = False) -> Launch:
    """A case of paged_prefill."""
    heads, shapes, flops = case.heads, prefill_examine.shapes(case, 1), prefill_examine.flops(case)
    starts, lengths = (np.array(column, np.int32) for column in zip(*case.chunks, strict=True))
    rows = (np.arange(len(starts)), starts, lengths, np.cumsum(lengths) - lengths)
    position_bytes = 2 * heads.kv_heads * heads.head_dim * _FLOAT_BYTES
    gathered = case.tokens * case.width * case.page_size * position_bytes
    return _attention(
        "paged_prefill",
        case,
        shapes,
        prefill_op,
        rest=(
            random_table(-(-starts // case.page_size), case.width),
            *(jnp.asarray(part, jnp.int32) for part in rows),
            jnp.int32(case.window),
        ),
        rows=int(lengths.sum()),
        amount=flops,
        of="of the product's operations",
        counts=flops >= LONG_PREFILL,
        pool_bytes=pool_bytes,
        interpret=interpret,
        against="reference" if gathered <= MOST_GATHERED_BYTES else "xla",
    )


def _attention(
    kernel: str,
    case: decode_cases.DecodeCase | prefill_cases.PrefillCase,
    shapes: tuple[Any, ...],
    op: Any,
    *,
    rest: tuple[Array, ...],
    rows: int,
    amount: int,
    of: Yardstick,
    counts: bool,
    pool_bytes: int,
    interpret: bool,
    against: str = "reference",
) -> Launch:
    """A launch whose arguments are queries, keys, values, pages, the layer and ``rest``; ``rows`` results mean much."""
    layers = layers_of(shapes[3], pool_bytes)
    pages = random_pool(shapes[3], case.heads.head_dim, layers, jax.random.key(1))
    options = {"scale": decode_examine.SCALE, "softcap": case.softcap}
    exact = functools.partial(getattr(op, kernel), implementation=against, **options)

    def run(q: Array, k: Array, v: Array, pages: Pages, *rest: Array) -> Array:
        return op.kernel_for(pages)(q, k, v, pages, *rest, interpret=interpret, **options)

    def step(index: Array, q: Array, k: Array, v: Array, pages: Pages, *rest: Array) -> Array:
        return run(q, k, v, pages, index % layers, *rest)

    def check() -> Checked:
        new, layer = normal(shapes[:3], jax.random.key(3)), jnp.int32(layers - 1)
        got = jax.jit(run)(*new, pages, layer, *rest)
        with jax.default_matmul_precision("highest"):
            wanted = jax.jit(exact)(*(part.astype(jnp.float32) for part in new), pages, layer, *rest)
        return check_attention(got[:rows], wanted[:rows], against)

    def inputs(key: Array) -> tuple[Any, ...]:
        return (*normal(shapes[:3], key), pages, *rest)

    return Launch(kernel, case.name, step, inputs, check, amount, of, counts)


def of_write(case: write_cases.WriteCase, *, interpret: bool = False) -> Launch:
    """A case of page_write; each step writes behind the last, from the beginning again where a row's pages end."""
    shapes: Any = write_examine.shapes(case)
    (rows, width), head_dim = shapes[4].shape, case.heads.head_dim
    row = jnp.arange(rows, dtype=jnp.int32)
    length, capacity = case.tokens // rows, width * case.page_size
    # rows fill their blocks in different steps, and one does so in the first
    first = (BLOCK - 1 + row * BLOCK + row * BLOCK // rows) % capacity
    table = random_table([case.num_pages // rows] * rows, width)
    where = (table, row, first, jnp.full(rows, length, jnp.int32), row * length)

    def inputs(key: Array) -> tuple[Any, ...]:
        of_pool, of_new = jax.random.split(key)
        pool = random_pool(shapes[0], head_dim, case.layers, of_pool)
        k, v, energy = normal(shapes[1:4], of_new)
        return (pool, k, v, jnp.abs(energy), *where)

    def write(pages: Pages, k: Array, v: Array, energy: Array, *rows: Array) -> Pages:
        return write_pallas.page_write(pages, k, v, Rows(*rows), energy, interpret=interpret)

    def exact(pages: Pages, k: Array, v: Array, energy: Array, *rows: Array) -> Pages:
        return write_op.page_write(pages, k, v, *rows, energy=energy, implementation="xla")

    def step(index: Array, pages: Pages, k: Array, v: Array, energy: Array, *rows: Array) -> Pages:
        table, slots, starts, lengths, offsets = rows
        return write(pages, k, v, energy, table, slots, (starts + index * lengths) % capacity, lengths, offsets)

    def check() -> Checked:
        key = jax.random.key(3)  # the same inputs twice, since a pool is given away
        got = jax.jit(write, donate_argnums=0)(*inputs(key))
        with jax.default_matmul_precision("highest"):
            wanted = jax.jit(exact, donate_argnums=0)(*inputs(key))
        return check_pools(got, wanted, head_dim)

    written = round(case.layers * case.heads.kv_heads * rows * _row_bytes(case, length))
    return Launch("page_write", case.name, step, inputs, check, written, "of what a copy writes", donates=True)


def _row_bytes(case: write_cases.WriteCase, length: int) -> float:
    """Bytes that so many new positions of a row write on an average, for one key/value head."""
    head_dim = case.heads.head_dim
    vectors = 2 * head_dim * _BF16_BYTES
    if base_bits := BASE_BITS.get(case.kv_format):
        kept = sum(min(length, end % BLOCK) for end in range(BLOCK)) / BLOCK
        return length / BLOCK * bitmask_page_bytes(BLOCK, head_dim, base_bits) + kept * vectors
    return int8_page_bytes(length, head_dim) if case.kv_format == "int8" else length * vectors


def of_sample(case: sample_cases.SampleCase, way: str, *, interpret: bool = False) -> Launch:
    """A case of sample, all rows in one of ``WAYS``; logits lie where the product before would leave them.

    Bytes are the logits once, which is the least for any way.
    """
    shapes, top = sample_examine.shapes(case), sample_examine.NUM_TOP
    fields = {"temperature": 1.0, "top_p": 1.0, "repetition": 1.0, "top_logprobs": -1, **WAYS[way]}
    filled = {name: jnp.full(part.shape, fields.get(name, 0), part.dtype) for name, part in shapes[1]._asdict().items()}
    row = jnp.arange(case.rows, dtype=jnp.int32)
    rows = sample_op.SampleRows(**filled)._replace(slot=row, suppressed=filled["suppressed"] - 1)
    counts, bias = (jnp.zeros(part.shape, part.dtype) for part in shapes[2:])
    run = functools.partial(sample_pallas.sample, num_top=top, interpret=interpret)

    def inputs(key: Array) -> tuple[Any, ...]:
        of_logits, *others = jax.random.split(key, 4)
        low, high, position = (jax.random.randint(part, row.shape, 0, 2**30, jnp.int32) for part in others)
        logits = _SPREAD * jax.random.normal(of_logits, shapes[0].shape, shapes[0].dtype)
        return position, logits, rows._replace(seed_low=low, seed_high=high), counts, bias

    def step(_: Array, position: Array, logits: Array, rows: sample_op.SampleRows, *rest: Array) -> Array:
        return position + 1 + run(logits, rows._replace(position=position), *rest)[0] % 2

    def check() -> Checked:
        draws = list[tuple[sample_op.Sampled, sample_op.Sampled]]()
        reference = functools.partial(sample_op.sample, num_top=top, implementation="reference")
        ours, theirs = jax.jit(run), jax.jit(reference)
        for key in jax.random.split(jax.random.key(3), DRAWS):
            position, logits, rows, *rest = inputs(key)
            rows = rows._replace(position=position, top_logprobs=jnp.full_like(position, top))
            draws.append((sample_op.Sampled(*ours(logits, rows, *rest)), theirs(logits, rows, *rest)))
        return check_samples(draws)

    amount = case.rows * case.vocab * _FLOAT_BYTES
    return Launch("sample", f"{case.name} {way}", step, inputs, check, amount, "of copy bandwidth")
