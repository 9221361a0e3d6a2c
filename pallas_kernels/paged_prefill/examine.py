"""paged_prefill without a card: the code of a case for a card, and the operations that it needs.

Reads cases; used by the kernel bench and by tests, never by an op. Float pages are bf16, as on a GPU.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.card import Card
from pallas_kernels.compiled import KernelCode, compile_kernel
from pallas_kernels.kv_layout import BASE_BITS, BLOCK, RECENT, BitmaskLayout, int8_page_words
from pallas_kernels.paged_prefill import op, pallas, pallas_bitmask, pallas_int8
from pallas_kernels.paged_prefill.cases import PrefillCase
from pallas_kernels.pages import BitmaskPages, Int8Pages, Pages
from pallas_kernels.rows import Rows

AnyTiling = pallas.Tiling | pallas_int8.Int8Tiling

SCALE = 0.125
WIDE_POOL = 2**31 + 1
"""Elements from which on a pool is addressed by 64-bit numbers, as the pools of most plans are."""


def code(case: PrefillCase, card: Card, tile: AnyTiling | None = None) -> KernelCode:
    """The kernel that attends, compiled for a card; ``tile`` replaces its sizes.

    Raises:
        CompileError: it cannot be compiled here, or not at all.
    """
    leaves, structure = _arguments(case)

    def run(*arrays: jax.Array) -> jax.Array:
        q, k, v, pages, *rest = jax.tree.unflatten(structure, arrays)
        return op.kernel_for(pages)(q, k, v, pages, *rest, scale=SCALE, softcap=case.softcap, tile=tile)

    return compile_kernel(card, kernel_name(case), run, *leaves)


def unpacking_code(case: PrefillCase, card: Card) -> KernelCode:
    """The kernel that unpacks blocks for a case over a bitmask pool, compiled for a card.

    Raises:
        CompileError: it cannot be compiled here, or not at all.
    """
    leaves, structure = _arguments(case)

    def run(*arrays: jax.Array) -> jax.Array:
        _, _, _, pages, layer, *rows, window = jax.tree.unflatten(structure, arrays)
        return pallas_bitmask.unpacked(
            pages, case.heads.head_dim, layer, Rows(*rows), window, None, jnp.int32(0), case.width * case.page_size,
            dtype=jnp.dtype(jnp.bfloat16),
        )  # fmt: skip

    return compile_kernel(card, "paged_prefill_unpack", run, *leaves)


def _arguments(case: PrefillCase) -> tuple[list[jax.ShapeDtypeStruct], jax.tree_util.PyTreeDef]:
    """The shapes of a case's arguments, with a pool of as many layers as make it large."""
    one_layer = max(math.prod(part.shape) for part in jax.tree.leaves(shapes(case, 1)[3]))
    return jax.tree.flatten(shapes(case, 1 if case.small else -(-WIDE_POOL // one_layer)))


def kernel_name(case: PrefillCase) -> str:
    """The name of the ``pallas_call`` that a case is."""
    return "paged_prefill_int8" if case.kv_format == "int8" else "paged_prefill"


def flops(case: PrefillCase) -> int:
    """The operations that a case needs: two products of each query with each key that it sees."""
    pairs = 0
    for start, length in case.chunks:
        seen = range(start + 1, start + length + 1)
        pairs += sum(min(keys, case.window) for keys in seen) if case.window else sum(seen)
    return 4 * case.heads.q_heads * case.heads.head_dim * pairs


def tile_of(case: PrefillCase) -> AnyTiling:
    """The sizes that a case is launched with."""
    heads = case.heads
    if case.kv_format == "int8":
        return pallas_int8.tiling(heads.head_dim)
    return pallas.tiling(case.tokens, heads.q_heads, heads.kv_heads, heads.head_dim)


def shapes(case: PrefillCase, layers: int) -> tuple[jax.ShapeDtypeStruct | Pages, ...]:
    """The arguments of the op for a case with a pool of so many layers."""
    bf16 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    int32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    heads, rows, head_dim = case.heads, len(case.chunks), case.heads.head_dim
    num_pages = sum(-(-start // case.page_size) for start, _ in case.chunks)
    new, pool = bf16((case.tokens, heads.kv_heads, head_dim)), (layers, num_pages + 1, heads.kv_heads)
    pages: Any = bf16((*pool, 2, case.page_size, head_dim))  # a pool of shapes in place of arrays
    if case.kv_format == "int8":
        pages = Int8Pages(*[int32((*pool, int8_page_words(case.page_size, head_dim)))])
    elif case.kv_format in BASE_BITS:
        words = int32((*pool, case.page_size // BLOCK, BitmaskLayout(head_dim, BASE_BITS[case.kv_format]).words))
        pages = BitmaskPages(*[words, bf16((layers, rows, heads.kv_heads, 2, RECENT, head_dim))])
    return (
        bf16((case.tokens, heads.q_heads, head_dim)),
        new,
        new,
        pages,
        int32(()),
        int32((rows, case.width)),
        *(int32((rows,)) for _ in ("slots", "starts", "lengths", "offsets")),
        int32(()),
    )
