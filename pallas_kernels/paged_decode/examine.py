"""paged_decode without a card: the code of a case for a card, and the bytes that its addresses add up to.

Reads cases; used by the kernel bench and by tests, never by an op. Pages are bf16, as on a GPU.
"""

import functools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.card import Card
from pallas_kernels.compiled import KernelCode, compile_kernel
from pallas_kernels.paged_decode.cases import DecodeCase
from pallas_kernels.paged_decode.pallas import Tiling, paged_decode, tiling
from pallas_kernels.traffic import Traffic

SCALE = 0.125
WIDE_POOL = 2**31 + 1
"""Elements from which on a pool is addressed by 64-bit numbers, as the pools of most plans are."""


@dataclass(frozen=True, slots=True)
class Bytes:
    """What a launch moves, and the least it could: pages, queries, new keys and values and the result, each once."""

    moved: int
    least: int

    @property
    def ratio(self) -> float:
        """Moved over least."""
        return self.moved / self.least


def code(case: DecodeCase, card: Card) -> KernelCode:
    """The kernel of a case, compiled for a card.

    Raises:
        CompileError: it cannot be compiled here, or not at all.
    """
    run = functools.partial(paged_decode, scale=SCALE, softcap=case.softcap)
    one_layer = math.prod(shapes(case, len(case.lengths), case.heads.kv_heads, 1)[3].shape)
    layers = 1 if case.small else -(-WIDE_POOL // one_layer)
    return compile_kernel(card, "paged_decode", run, *shapes(case, len(case.lengths), case.heads.kv_heads, layers))


def traffic(case: DecodeCase) -> Bytes:
    """The bytes of one slot and one key/value head of a case whose slots are all alike.

    The launch keeps the sizes of the whole case; its other slots and heads do the same at other addresses.
    """
    group, head_dim = case.heads.q_heads // case.heads.kv_heads, case.heads.head_dim
    tile, length, watch = tile_of(case), case.lengths[0], Traffic()
    launch = shapes(case, 1, 1, 1)
    q, k, v, pages, layer, table, lengths, window = (jnp.zeros(part.shape, part.dtype) for part in launch)
    table = jnp.arange(table.size, dtype=table.dtype).reshape(table.shape) % pages.shape[1]
    arguments = (q, k, v, pages, layer, table, lengths + length, window + case.window)
    run = functools.partial(paged_decode, scale=SCALE, softcap=case.softcap, interpret=True, tile=tile, access=watch)
    jax.block_until_ready(jax.jit(run)(*arguments))
    jax.effects_barrier()
    seen = min(length, case.window - 1) if case.window else length
    vectors = (2 * group + 2) * head_dim * q.dtype.itemsize  # queries, new key and value, result
    merged = vectors + tile.splits * group * (head_dim + 2) * 4  # what the merge reads again, and the result
    return Bytes(
        moved=watch.read_bytes + watch.written_bytes + merged,
        least=2 * seen * head_dim * pages.dtype.itemsize + vectors,
    )


def tile_of(case: DecodeCase) -> Tiling:
    """The sizes that a case is launched with."""
    heads = case.heads
    return tiling(len(case.lengths), heads.q_heads, heads.kv_heads, heads.head_dim, case.width * case.page_size)


def shapes(case: DecodeCase, slots: int, kv_heads: int, layers: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The arguments of the op for a case cut or widened to some slots, heads and layers."""
    bf16 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    int32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    group, head_dim = case.heads.q_heads // case.heads.kv_heads, case.heads.head_dim
    return (
        bf16((slots, group * kv_heads, head_dim)),
        bf16((slots, kv_heads, head_dim)),
        bf16((slots, kv_heads, head_dim)),
        bf16((layers, slots * (case.width - 1), kv_heads, 2, case.page_size, head_dim)),
        int32(()),
        int32((slots, case.width)),
        int32((slots,)),
        int32(()),
    )
