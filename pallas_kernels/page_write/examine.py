"""page_write without a card: the code of a case for a card, and the memory that its program takes.

Reads cases; used by the kernel bench and by tests, never by an op. New keys and values are bf16, as on a GPU.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.card import Card
from pallas_kernels.compiled import KernelCode, ProgramMemory, Shapes, compile_kernel, program_memory
from pallas_kernels.kv_layout import BASE_BITS, BLOCK, RECENT, BitmaskLayout, int8_page_words
from pallas_kernels.page_write.cases import WriteCase
from pallas_kernels.page_write.pallas import page_write
from pallas_kernels.pages import BitmaskPages, Int8Pages, Pages
from pallas_kernels.rows import Rows


def code(case: WriteCase, card: Card) -> KernelCode:
    """The kernel of a case, compiled for a card; of a bitmask pool the one that fills blocks.

    The other one of a bitmask pool is that of plain pools, with other numbers.

    Raises:
        CompileError: it cannot be compiled here, or not at all.
    """
    kernel = "page_write_blocks" if case.kv_format in BASE_BITS else "page_write"
    return compile_kernel(card, kernel, _write, *shapes(case))


def memory(case: WriteCase, card: Card) -> ProgramMemory:
    """What a write takes beside the pool, which it is given.

    Raises:
        CompileError: it cannot be compiled here, or not at all.
    """
    return program_memory(card, _write, *shapes(case))


def _write(pages: Pages, k: jax.Array, v: jax.Array, energy: jax.Array, *rows: jax.Array) -> Pages:
    return page_write(pages, k, v, Rows(*rows), energy)


def shapes(case: WriteCase) -> tuple[Shapes, ...]:
    """The arguments for a case: the pool, keys, values, energy, then the fields of ``Rows``."""
    int32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    rows, heads = case.rows or case.tokens, case.heads
    new = jax.ShapeDtypeStruct((case.layers, case.tokens, heads.kv_heads, heads.head_dim), jnp.bfloat16)
    return (
        _pool(case, rows),
        new,
        new,
        jax.ShapeDtypeStruct((case.layers, heads.kv_heads, heads.head_dim), jnp.float32),
        int32((rows, -(-case.num_pages // rows))),
        *(int32((rows,)) for _ in ("slots", "starts", "lengths", "offsets")),
    )


def _pool(case: WriteCase, slots: int) -> Shapes:
    head_dim, before = case.heads.head_dim, (case.layers, case.num_pages, case.heads.kv_heads)
    if case.kv_format == "int8":
        return jax.eval_shape(
            lambda: Int8Pages(jnp.zeros((*before, int8_page_words(case.page_size, head_dim)), jnp.int32))
        )
    if base_bits := BASE_BITS.get(case.kv_format):
        words = (*before, case.page_size // BLOCK, BitmaskLayout(head_dim, base_bits).words)
        recent = (case.layers, slots, case.heads.kv_heads, 2, RECENT, head_dim)
        return jax.eval_shape(lambda: BitmaskPages(jnp.zeros(words, jnp.int32), jnp.zeros(recent, jnp.bfloat16)))
    return jax.ShapeDtypeStruct((*before, 2, case.page_size, head_dim), jnp.bfloat16)
