"""What ``zccp bench kernels --device`` launches: every case of every kernel with random data, and what it must move.

Loads jax. Owns the data: pools of several layers, so that a launch never finds its keys and values in a cache, pages in
random order, new inputs for every measurement. Measures nothing itself.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.paged_decode import cases as decode_cases
from pallas_kernels.paged_decode import examine as decode_examine
from pallas_kernels.paged_decode import op as decode_op
from pallas_kernels.paged_decode.pallas import paged_decode
from pallas_kernels.paged_prefill import cases as prefill_cases
from pallas_kernels.paged_prefill import examine as prefill_examine
from pallas_kernels.paged_prefill import op as prefill_op
from pallas_kernels.paged_prefill.pallas import paged_prefill

MOST_LAYERS = 64
MOST_GATHERED_BYTES = 2**31
"""What the reference of paged_prefill may gather; beyond, a case is held against the XLA implementation."""

New = tuple[Array, Array, Array]
"""Queries, keys and values of one launch."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One case with its data.

    ``run`` and ``exact`` take queries, keys and values, then ``pages``, the layer and ``rest``; ``against`` names the
    implementation that ``exact`` is. The first ``rows`` rows of a result mean something. ``least_bytes`` and ``flops``
    are what a launch must move and compute.
    """

    kernel: str
    name: str
    run: Callable[..., Array]
    exact: Callable[..., Array]
    against: str
    new: Callable[[Array], New]
    pages: Array
    rest: tuple[Array, ...]
    rows: int
    least_bytes: int
    flops: int


def launches(pool_bytes: int, *, interpret: bool = False) -> Iterator[tuple[str, Callable[[], Launch]]]:
    """Every case by name, and what makes its data; a pool has at least ``pool_bytes`` where layers can give them."""
    for case in decode_cases.CASES:
        yield f"paged_decode {case.name}", functools.partial(of_decode, case, pool_bytes, interpret=interpret)
    for case in prefill_cases.CASES:
        yield f"paged_prefill {case.name}", functools.partial(of_prefill, case, pool_bytes, interpret=interpret)


def of_decode(case: decode_cases.DecodeCase, pool_bytes: int, *, interpret: bool = False) -> Launch:
    """A case of paged_decode."""
    options = {"scale": decode_examine.SCALE, "softcap": case.softcap}
    shapes = decode_examine.shapes(case, len(case.lengths), case.heads.kv_heads, 1)
    seen = sum(min(length, case.window - 1) if case.window else length for length in case.lengths)
    vectors = sum(shape.size for shape in (*shapes[:3], shapes[0])) * shapes[0].dtype.itemsize
    lengths = np.array(case.lengths, np.int32)
    return Launch(
        kernel="paged_decode",
        name=case.name,
        run=functools.partial(paged_decode, interpret=interpret, **options),
        exact=functools.partial(decode_op.paged_decode, implementation="reference", **options),
        against="reference",
        new=functools.partial(_normal, shapes[:3]),
        pages=_pool(shapes[3], pool_bytes),
        rest=(_table(-(-lengths // case.page_size), case.width), jnp.asarray(lengths), jnp.int32(case.window)),
        rows=len(case.lengths),
        least_bytes=2 * seen * case.heads.kv_heads * case.heads.head_dim * shapes[3].dtype.itemsize + vectors,
        flops=4 * seen * case.heads.q_heads * case.heads.head_dim,
    )


def of_prefill(case: prefill_cases.PrefillCase, pool_bytes: int, *, interpret: bool = False) -> Launch:
    """A case of paged_prefill."""
    options = {"scale": prefill_examine.SCALE, "softcap": case.softcap}
    shapes = prefill_examine.shapes(case, 1)
    starts, lengths = (np.array(column, np.int32) for column in zip(*case.chunks, strict=True))
    offsets = np.cumsum(lengths) - lengths
    rows = (np.arange(len(starts)), starts, lengths, offsets)
    gathered = case.tokens * case.width * shapes[3].size // shapes[3].shape[1] * jnp.dtype(jnp.float32).itemsize
    against = "reference" if gathered <= MOST_GATHERED_BYTES else "xla"
    vectors = sum(shape.size for shape in (*shapes[:3], shapes[0])) * shapes[0].dtype.itemsize
    stored = 2 * int(starts.sum()) * case.heads.kv_heads * case.heads.head_dim * shapes[3].dtype.itemsize
    return Launch(
        kernel="paged_prefill",
        name=case.name,
        run=functools.partial(paged_prefill, interpret=interpret, **options),
        exact=functools.partial(prefill_op.paged_prefill, implementation=against, **options),
        against=against,
        new=functools.partial(_normal, shapes[:3]),
        pages=_pool(shapes[3], pool_bytes),
        rest=(
            _table(-(-starts // case.page_size), case.width),
            *(jnp.asarray(part, jnp.int32) for part in rows),
            jnp.int32(case.window),
        ),
        rows=int(lengths.sum()),
        least_bytes=stored + vectors,
        flops=prefill_examine.flops(case),
    )


def _normal(shapes: tuple[jax.ShapeDtypeStruct, ...], key: Array) -> New:
    q, k, v = (jax.random.normal(part, shape.shape, shape.dtype) for part, shape in zip(
        jax.random.split(key, 3), shapes, strict=True
    ))  # fmt: skip
    return q, k, v


def _pool(one_layer: jax.ShapeDtypeStruct, pool_bytes: int) -> Array:
    layers = min(MOST_LAYERS, max(1, -(-pool_bytes // (one_layer.size * one_layer.dtype.itemsize))))
    return jax.random.normal(jax.random.key(1), (layers, *one_layer.shape[1:]), one_layer.dtype)


def _table(pages: np.ndarray, width: int) -> Array:
    """A table of so many pages a row, in random order; places behind a row's pages name the first page."""
    table = np.zeros((len(pages), width), np.int32)
    table[np.arange(width) < pages[:, None]] = np.random.default_rng(2).permutation(int(pages.sum()))
    return jnp.asarray(table)
