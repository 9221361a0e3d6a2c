"""page_write by Triton kernels, in the pool that the caller gave away: each program stores some tokens of a head.

Owns the kernels of float and int8 pools, and of the rows that a bitmask pool keeps in bf16; ``pallas_blocks`` has the
kernel of its blocks. A pool is an aliased argument, of which nothing is touched but what the tokens replace.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.access import DIRECT, Access
from pallas_kernels.bits import pair
from pallas_kernels.errors import require
from pallas_kernels.kv_int8 import codes_of, scale_of
from pallas_kernels.page_write.blocks import filled_blocks, kept_lines
from pallas_kernels.page_write.pallas_blocks import write_blocks
from pallas_kernels.pages import BitmaskPages, Int8Pages, Pages, PoolShape, kind, pool_shape
from pallas_kernels.rows import Rows, pages_of, places

_NUMBERS = 2048  # of keys, and of values, that a program stores
_NUMBERS_OF_A_WARP = 512


class _Pool(NamedTuple):
    """Sizes that the kernels address a pool by; ``num_pages`` is also the page of tokens to be dropped."""

    num_pages: int
    kv_heads: int
    page_size: int
    head_dim: int
    tokens: int
    access: Access


class _Tokens(NamedTuple):
    """The tokens of one program: their rows of the new keys or values, the pool's page of one head, the place there."""

    row: Int32[Array, " t"]
    page: Int32[Array, " t"]
    offset: Int32[Array, " t"]
    stored: Bool[Array, " t"]


def _tokens(pool: _Pool, pages_ref: jax.Ref, offsets_ref: jax.Ref, height: int) -> _Tokens:
    head, layer = pl.program_id(1), pl.program_id(2)
    token = pl.program_id(0) * height + jnp.arange(height, dtype=jnp.int32)
    exists = token < pool.tokens
    page = pool.access.load(pages_ref, (token,), exists)
    return _Tokens(
        row=(layer * pool.tokens + token) * pool.kv_heads + head,
        page=(layer * pool.num_pages + page) * pool.kv_heads + head,
        offset=pool.access.load(offsets_ref, (token,), exists),
        stored=exists & (page < pool.num_pages),
    )


def _plain(
    pages_ref: jax.Ref,  # [tokens] int32
    offsets_ref: jax.Ref,  # [tokens] int32
    k_ref: jax.Ref,  # [layers*tokens*kv_heads head_dim]
    v_ref: jax.Ref,  # [layers*tokens*kv_heads head_dim]
    *pools: jax.Ref,  # [layers*num_pages*kv_heads*2*page_size head_dim] and what only waits; as arguments, as results
    pool: _Pool,
    height: int,
) -> None:
    # Bytes: each key and value read once and written once. Bound by memory.
    pool_ref, access = pools[len(pools) // 2], pool.access
    tokens = _tokens(pool, pages_ref, offsets_ref, height)
    channel = jnp.arange(pl.next_power_of_2(pool.head_dim), dtype=jnp.int32)
    mask = tokens.stored[:, None] & (channel < pool.head_dim)[None, :]
    for value, new_ref in enumerate((k_ref, v_ref)):
        new = access.load(new_ref, (tokens.row[:, None], channel[None, :]), mask)
        place = (2 * tokens.page + value) * pool.page_size + tokens.offset
        access.store(pool_ref, (place[:, None], channel[None, :]), new.astype(pool_ref.dtype), mask)


def _int8(
    pages_ref: jax.Ref,  # [tokens] int32
    offsets_ref: jax.Ref,  # [tokens] int32
    k_ref: jax.Ref,  # [layers*tokens*kv_heads head_dim]
    v_ref: jax.Ref,  # [layers*tokens*kv_heads head_dim]
    _: jax.Ref,  # the words, which only the result writes
    words_ref: jax.Ref,  # [layers*num_pages*kv_heads page_words] int32
    *,
    pool: _Pool,
    height: int,
) -> None:
    # Bytes: each key and value read once, a quarter or half of it written. Bound by memory.
    width, access = pool.head_dim // 4, pool.access
    tokens = _tokens(pool, pages_ref, offsets_ref, height)
    column = jnp.arange(pl.next_power_of_2(width), dtype=jnp.int32)
    mask = tokens.stored[:, None] & (column < width)[None, :]
    scales = list[Array]()
    for value, new_ref in enumerate((k_ref, v_ref)):
        columns = [(byte * width + column)[None, :] for byte in range(4)]
        parts = [access.load(new_ref, (tokens.row[:, None], place), mask).astype(jnp.float32) for place in columns]
        scale = scale_of(functools.reduce(jnp.maximum, (jnp.abs(part).max(axis=1) for part in parts)))
        words = jnp.zeros(mask.shape, jnp.int32)
        for byte, part in enumerate(parts):
            words |= (codes_of(part, scale[:, None]) & 255) << (8 * byte)
        place = (value * pool.page_size + tokens.offset)[:, None] * width + column[None, :]
        access.store(words_ref, (tokens.page[:, None], place), words, mask)
        scales.append(scale)
    place = 2 * pool.page_size * width + tokens.offset
    access.store(words_ref, (tokens.page, place), pair(*scales), tokens.stored)


def page_write(
    pages: Pages,
    k: Float[Array, "layers tokens kv_heads head_dim"],
    v: Float[Array, "layers tokens kv_heads head_dim"],
    rows: Rows,
    energy: Float[Array, "layers kv_heads head_dim"] | None,
    *,
    interpret: bool = False,
    access: Access = DIRECT,
) -> Pages:
    """See ``op.page_write``.

    On a GPU a quotient's last bit may differ from other processors', and with it a scale's last bit or a code by one.
    ``interpret`` runs the kernels on any backend, slowly; ``access`` lets a caller watch what is read and written.

    Raises:
        ContractError: the pool holds bits of bf16 instead of numbers.
    """
    tokens, head_dim = k.shape[1], k.shape[3]
    launch = functools.partial(_launch, k=k, v=v, interpret=interpret, access=access)
    shape = pool_shape(pages, head_dim)
    if isinstance(pages, BitmaskPages):
        assert energy is not None, "the contract asks for it"
        require(
            pages.recent.dtype == jnp.bfloat16, f"rows beside pages are {pages.recent.dtype}; this kernel takes bf16"
        )
        slots, lines = pages.recent.shape[1], pages.recent.shape[4]
        plan = filled_blocks(rows, tokens, slots, shape.num_pages, pages.words.shape[3])
        words = write_blocks(pages, k, v, energy, plan, interpret=interpret, access=access)
        # the words go through this launch too: it follows the other, so that nobody copies the rows that one reads
        recent, words = launch(
            _plain,
            (pages.recent.reshape(-1, head_dim), words),
            kept_lines(rows, tokens, slots),
            shape._replace(num_pages=slots, page_size=lines),
        )
        return BitmaskPages(words.reshape(pages.words.shape), recent.reshape(pages.recent.shape))
    at = pages_of(rows, places(rows, tokens), shape.page_size, shape.num_pages)
    if isinstance(pages, Int8Pages):
        (words,) = launch(_int8, (pages.words.reshape(-1, pages.words.shape[3]),), at, shape)
        return Int8Pages(words.reshape(pages.words.shape))
    require(pages.dtype != jnp.uint16, f"pages are {kind(pages)}; this kernel takes float32 and bf16")
    (written,) = launch(_plain, (pages.reshape(-1, head_dim),), at, shape)
    return written.reshape(pages.shape)


def _launch(
    kernel: Callable[..., None],
    pools: tuple[Array, ...],
    at: tuple[Int32[Array, " tokens"], Int32[Array, " tokens"]],
    shape: PoolShape,
    *,
    k: Float[Array, "layers tokens kv_heads head_dim"],
    v: Float[Array, "layers tokens kv_heads head_dim"],
    interpret: bool,
    access: Access,
) -> tuple[Array, ...]:
    """The pools after a launch over all tokens, heads and layers; ``at`` has each token's page and place in it."""
    layers, tokens, kv_heads, head_dim = k.shape
    width = pl.next_power_of_2(head_dim)
    height = max(1, min(_NUMBERS // width, pl.next_power_of_2(tokens)))
    pool = _Pool(shape.num_pages, kv_heads, shape.page_size, head_dim, tokens, access)
    return pl.pallas_call(
        functools.partial(kernel, pool=pool, height=height),
        out_shape=tuple(jax.ShapeDtypeStruct(part.shape, part.dtype) for part in pools),
        grid=(pl.cdiv(tokens, height), kv_heads, layers),
        input_output_aliases={4 + index: index for index in range(len(pools))},
        compiler_params=plgpu.CompilerParams(num_warps=max(1, height * width // _NUMBERS_OF_A_WARP), num_stages=1),
        interpret=interpret,
        name="page_write",
    )(*at, k.reshape(-1, head_dim), v.reshape(-1, head_dim), *pools)
