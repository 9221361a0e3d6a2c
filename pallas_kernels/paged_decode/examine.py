"""paged_decode without a card: the code of a case for a card, and the bytes that its addresses add up to.

Reads cases; used by the kernel bench and by tests, never by an op. Float pages are bf16, as on a GPU.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import jax
import jax.numpy as jnp

from pallas_kernels.card import Card
from pallas_kernels.compiled import KernelCode, compile_kernel
from pallas_kernels.kv_layout import (
    BASE_BITS,
    BLOCK,
    RECENT,
    SINKS,
    BitmaskLayout,
    bitmask_page_bytes,
    int8_page_bytes,
    int8_page_words,
    recent_bytes,
)
from pallas_kernels.paged_decode import op, pallas, pallas_bitmask, pallas_int8
from pallas_kernels.paged_decode.cases import DecodeCase
from pallas_kernels.pages import BitmaskPages, Int8Pages
from pallas_kernels.traffic import Traffic

SCALE = 0.125
WIDE_POOL = 2**31 + 1
"""Elements from which on a pool is addressed by 64-bit numbers, as the pools of most plans are."""

_QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}  # it runs once
_Pool = TypeVar("_Pool")


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
    heads, slots = case.heads, len(case.lengths)
    one_layer = max(math.prod(part.shape) for part in jax.tree.leaves(arguments(case, slots, heads.kv_heads, 1)[3]))
    layers = 1 if case.small else -(-WIDE_POOL // one_layer)
    launch = arguments(case, slots, heads.kv_heads, layers)
    leaves, structure = jax.tree.flatten(launch)

    def run(*arrays: jax.Array) -> jax.Array:
        q, k, v, pages, *rest = jax.tree.unflatten(structure, arrays)
        return op.kernel_for(pages)(q, k, v, pages, *rest, scale=SCALE, softcap=case.softcap)

    return compile_kernel(card, kernel_name(case), run, *leaves)


def kernel_name(case: DecodeCase) -> str:
    """The name of the ``pallas_call`` that a case is."""
    if case.kv_format in BASE_BITS:
        return "paged_decode_bitmask"
    return "paged_decode_int8" if case.kv_format == "int8" else "paged_decode"


def traffic(case: DecodeCase) -> Bytes:
    """The bytes of one slot and one key/value head of a case whose slots are all alike.

    The launch keeps the sizes of the whole case; its other slots and heads do the same at other addresses. What a
    bitmask pool keeps in bf16 counts whole, as XLA reads it.
    """
    group, head_dim = case.heads.q_heads // case.heads.kv_heads, case.heads.head_dim
    tile, length, watch = tile_of(case), case.lengths[0], Traffic()
    launch = arguments(case, 1, 1, 1)
    q, k, v, pages, layer, table, lengths, window = jax.tree.map(lambda part: jnp.zeros(part.shape, part.dtype), launch)
    table = jnp.arange(table.size, dtype=table.dtype).reshape(table.shape) % _num_pages(case, 1)
    arrays = (q, k, v, pages, layer, table, lengths + length, window + case.window)
    kernel = op.kernel_for(pages)
    run = functools.partial(kernel, scale=SCALE, softcap=case.softcap, interpret=True, tile=tile, access=watch)
    jax.block_until_ready(jax.jit(run, compiler_options=_QUICKLY)(*arrays))
    jax.effects_barrier()
    splits = tile.splits if isinstance(tile, pallas.Tiling) else tile.shares.splits
    vectors = (2 * group + 2) * head_dim * q.dtype.itemsize  # queries, new key and value, result
    beside = recent_bytes(head_dim) if case.kv_format in BASE_BITS else 0
    merged = vectors + beside + splits * group * (head_dim + 2) * 4  # what the merge reads again, and the result
    return Bytes(
        moved=watch.read_bytes + watch.written_bytes + merged,
        least=history_bytes(case, length) + vectors + beside,
    )


def history_bytes(case: DecodeCase, length: int) -> int:
    """Bytes of what the newest token of a slot attends to in pages, for one key/value head, in the pool's format."""
    head_dim, seen = case.heads.head_dim, min(length, case.window - 1) if case.window else length
    if case.kv_format in BASE_BITS:
        blocks = length // BLOCK - max(length - seen, SINKS) // BLOCK
        return blocks * bitmask_page_bytes(BLOCK, head_dim, BASE_BITS[case.kv_format])
    return int8_page_bytes(seen, head_dim) if case.kv_format == "int8" else 2 * seen * head_dim * 2


def tile_of(case: DecodeCase) -> pallas.Tiling | pallas_int8.Int8Tiling | pallas_bitmask.BitmaskTiling:
    """The sizes that a case is launched with."""
    slots, heads, context = len(case.lengths), case.heads, case.width * case.page_size
    if case.kv_format in BASE_BITS:
        layout = BitmaskLayout(heads.head_dim, BASE_BITS[case.kv_format])
        return pallas_bitmask.tiling(slots, heads.q_heads, heads.kv_heads, context, layout)
    tiling = pallas_int8.tiling if case.kv_format == "int8" else pallas.tiling
    return tiling(slots, heads.q_heads, heads.kv_heads, heads.head_dim, context)


def shapes(case: DecodeCase, slots: int, kv_heads: int, layers: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The arguments of the op for a case of float pages cut or widened to some slots, heads and layers."""
    bf16 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    int32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    group, head_dim = case.heads.q_heads // case.heads.kv_heads, case.heads.head_dim
    return (
        bf16((slots, group * kv_heads, head_dim)),
        bf16((slots, kv_heads, head_dim)),
        bf16((slots, kv_heads, head_dim)),
        bf16((layers, _num_pages(case, slots), kv_heads, 2, case.page_size, head_dim)),
        int32(()),
        int32((slots, case.width)),
        int32((slots,)),
        int32(()),
    )


def arguments(
    case: DecodeCase, slots: int, kv_heads: int, layers: int
) -> tuple[jax.ShapeDtypeStruct | BitmaskPages | Int8Pages, ...]:
    """``shapes`` of a case of any format."""
    q, k, v, pages, *rest = shapes(case, slots, kv_heads, layers)
    head_dim, pool = case.heads.head_dim, pages.shape[:3]
    if case.kv_format == "int8":
        words = jax.ShapeDtypeStruct((*pool, int8_page_words(case.page_size, head_dim)), jnp.int32)
        return (q, k, v, _pool(Int8Pages, words), *rest)
    if case.kv_format in BASE_BITS:
        block_words = BitmaskLayout(head_dim, BASE_BITS[case.kv_format]).words
        words = jax.ShapeDtypeStruct((*pool, case.page_size // BLOCK, block_words), jnp.int32)
        kept = jax.ShapeDtypeStruct((layers, slots, kv_heads, 2, RECENT, head_dim), jnp.bfloat16)
        return (q, k, v, _pool(BitmaskPages, words, kept), *rest)
    return (q, k, v, pages, *rest)


def _pool(kind: Callable[..., _Pool], *parts: jax.ShapeDtypeStruct) -> _Pool:
    """A pool of shapes in place of arrays."""
    return kind(*parts)


def _num_pages(case: DecodeCase, slots: int) -> int:
    return slots * (case.width - 1)
