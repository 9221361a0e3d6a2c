"""Random data for the kernel bench on a GPU: pools of every format with real codes, tables, keys and values.

Loads jax. Owns how data are made: pools of several layers, so that a launch never finds its keys and values in a cache,
codes by rounding random numbers, pages in random order. Pools are made page by page, since numbers take more room
than codes. Float pools hold bf16 numbers.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels import kv_int8
from pallas_kernels.kv_bitmask import op as kv_bitmask
from pallas_kernels.kv_layout import BLOCK, int8_page_size
from pallas_kernels.pages import BitmaskPages, Int8Pages, Pages, layout_of

MOST_LAYERS = 64
_PAGES_AT_ONCE = 32


def layers_of(one_layer: Pages, pool_bytes: int) -> int:
    """Layers of which a pool has at least so many bytes, up to ``MOST_LAYERS``; ``one_layer`` has shapes for arrays."""
    words = one_layer.words if isinstance(one_layer, (Int8Pages, BitmaskPages)) else one_layer
    return min(MOST_LAYERS, max(1, -(-pool_bytes // (words.size * words.dtype.itemsize))))


def random_pool(one_layer: Pages, head_dim: int, layers: int, key: Array) -> Pages:
    """A pool of so many layers, each like ``one_layer``, which has shapes for arrays; full of random numbers."""
    of_pages, of_recent = jax.random.split(key)
    words = one_layer.words if isinstance(one_layer, (Int8Pages, BitmaskPages)) else one_layer
    num_pages, kv_heads = words.shape[1:3]
    if isinstance(one_layer, Int8Pages):
        page_size = int8_page_size(words.shape[3], head_dim)
        page = functools.partial(_int8_page, (kv_heads, page_size, head_dim))
    elif isinstance(one_layer, BitmaskPages):
        blocks, base_bits = (kv_heads, words.shape[3], BLOCK, head_dim), layout_of(one_layer, head_dim).base_bits
        page = functools.partial(_bitmask_page, blocks, base_bits)
    else:
        page = functools.partial(jax.random.normal, shape=words.shape[2:], dtype=jnp.bfloat16)
    made = _pages(page, jax.random.split(of_pages, layers * num_pages))
    made = made.reshape(layers, num_pages, *made.shape[1:])
    if isinstance(one_layer, Int8Pages):
        return Int8Pages(made)
    if isinstance(one_layer, BitmaskPages):
        kept = jax.random.normal(of_recent, (layers, *one_layer.recent.shape[1:]), jnp.bfloat16)
        return BitmaskPages(made, kept)
    return made


@functools.partial(jax.jit, static_argnums=0)
def _pages(page: functools.partial[Array], keys: Array) -> Array:
    return jax.lax.map(page, keys, batch_size=_PAGES_AT_ONCE)


def _int8_page(shape: tuple[int, ...], key: Array) -> Array:
    codes, scale = kv_int8.quantize(jax.random.normal(key, (2, *shape), jnp.bfloat16))
    parts = (*codes, kv_int8.scale_words(*scale))
    return jnp.concatenate([part.reshape(shape[0], -1) for part in parts], axis=-1)


def _bitmask_page(shape: tuple[int, ...], base_bits: int, key: Array) -> Array:
    k, v = jax.random.normal(key, (2, *shape), jnp.bfloat16)
    energy, counted = jnp.ones((1, 1, shape[-1])), jnp.ones((1, 1, BLOCK), bool)
    return kv_bitmask.quantize(k, v, energy, counted, base_bits=base_bits, implementation="xla")


def random_table(pages: Sequence[int] | np.ndarray, width: int) -> Array:
    """A table of so many pages a row, in random order; places behind a row's pages name the first page."""
    counts = np.asarray(pages)
    table = np.zeros((len(counts), width), np.int32)
    table[np.arange(width) < counts[:, None]] = np.random.default_rng(2).permutation(int(counts.sum()))
    return jnp.asarray(table)


def normal(shapes: Sequence[jax.ShapeDtypeStruct], key: Array) -> tuple[Array, ...]:
    """Random arrays of these shapes."""
    keys = jax.random.split(key, len(shapes))
    return tuple(jax.random.normal(part, of.shape, of.dtype) for part, of in zip(keys, shapes, strict=True))
