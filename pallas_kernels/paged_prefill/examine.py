"""paged_prefill without a card: the code of a case for a card, and the operations that it needs.

Reads cases; used by the kernel bench and by tests, never by an op. Pages are bf16, as on a GPU.
"""

import functools
import math

import jax
import jax.numpy as jnp

from pallas_kernels.card import Card
from pallas_kernels.compiled import KernelCode, compile_kernel
from pallas_kernels.paged_prefill.cases import PrefillCase
from pallas_kernels.paged_prefill.pallas import Tiling, paged_prefill, tiling

SCALE = 0.125
WIDE_POOL = 2**31 + 1
"""Elements from which on a pool is addressed by 64-bit numbers, as the pools of most plans are."""


def code(case: PrefillCase, card: Card, tile: Tiling | None = None) -> KernelCode:
    """The kernel of a case, compiled for a card; ``tile`` replaces its sizes.

    Raises:
        CompileError: it cannot be compiled here, or not at all.
    """
    run = functools.partial(paged_prefill, scale=SCALE, softcap=case.softcap, tile=tile)
    one_layer = math.prod(shapes(case, 1)[3].shape)
    return compile_kernel(card, "paged_prefill", run, *shapes(case, 1 if case.small else -(-WIDE_POOL // one_layer)))


def flops(case: PrefillCase) -> int:
    """The operations that a case needs: two products of each query with each key that it sees."""
    pairs = 0
    for start, length in case.chunks:
        seen = range(start + 1, start + length + 1)
        pairs += sum(min(keys, case.window) for keys in seen) if case.window else sum(seen)
    return 4 * case.heads.q_heads * case.heads.head_dim * pairs


def tile_of(case: PrefillCase) -> Tiling:
    """The sizes that a case is launched with."""
    return tiling(case.tokens, case.heads.q_heads, case.heads.kv_heads, case.heads.head_dim)


def shapes(case: PrefillCase, layers: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The arguments of the op for a case with a pool of so many layers."""
    bf16 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    int32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    heads, rows = case.heads, len(case.chunks)
    num_pages = sum(-(-start // case.page_size) for start, _ in case.chunks)
    new = bf16((case.tokens, heads.kv_heads, heads.head_dim))
    return (
        bf16((case.tokens, heads.q_heads, heads.head_dim)),
        new,
        new,
        bf16((layers, num_pages + 1, heads.kv_heads, 2, case.page_size, heads.head_dim)),
        int32(()),
        int32((rows, case.width)),
        *(int32((rows,)) for _ in ("slots", "starts", "lengths", "offsets")),
        int32(()),
    )
