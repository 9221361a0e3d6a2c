"""page_write through XLA: one scatter that drops what lies outside the pool, and a loop over the blocks that fill."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels import kv_int8
from pallas_kernels.bits import bf16_bits
from pallas_kernels.kv_bitmask import op as kv_bitmask
from pallas_kernels.kv_layout import BLOCK, SINKS
from pallas_kernels.page_write.blocks import filled_blocks, kept_lines
from pallas_kernels.pages import BitmaskPages, FloatPages, Int8Pages, Pages, layout_of, numbers, pool_shape
from pallas_kernels.rows import Rows, pages_of, places


def page_write(
    pages: Pages,
    k: Float[Array, "layers tokens kv_heads head_dim"],
    v: Float[Array, "layers tokens kv_heads head_dim"],
    rows: Rows,
    energy: Float[Array, "layers kv_heads head_dim"] | None,
) -> Pages:
    """See ``op.page_write``."""
    if isinstance(pages, BitmaskPages):
        assert energy is not None, "the contract asks for it"
        k, v = k.astype(jnp.bfloat16), v.astype(jnp.bfloat16)
        words, blocks = _full_blocks(pages, k, v, rows, energy)
        return BitmaskPages(words, _recent(pages.recent, k, v, rows, blocks))
    shape = pool_shape(pages, k.shape[3])
    ids, offsets = pages_of(rows, places(rows, k.shape[1]), shape.page_size, shape.num_pages)
    if isinstance(pages, Int8Pages):
        return _codes(pages, k, v, ids, offsets)
    return _scatter(pages, k, v, ids, offsets)


def _scatter(
    pages: FloatPages,
    k: Float[Array, "layers tokens kv_heads head_dim"],
    v: Float[Array, "layers tokens kv_heads head_dim"],
    ids: Int32[Array, " tokens"],
    offsets: Int32[Array, " tokens"],
) -> FloatPages:
    both = jnp.stack([k, v], axis=3)  # layers tokens kv_heads 2 head_dim
    both = bf16_bits(both) if pages.dtype == jnp.uint16 else both.astype(pages.dtype)
    both = jnp.moveaxis(both, 1, 0)  # the two index arrays are apart, so their axis comes first
    return pages.at[:, ids, :, :, offsets].set(both, mode="drop")


def _codes(
    pages: Int8Pages,
    k: Float[Array, "layers tokens kv_heads head_dim"],
    v: Float[Array, "layers tokens kv_heads head_dim"],
    ids: Int32[Array, " tokens"],
    offsets: Int32[Array, " tokens"],
) -> Int8Pages:
    head_dim = k.shape[3]
    page_size, width = pool_shape(pages, head_dim).page_size, head_dim // 4
    (keys, k_scale), (values, v_scale) = kv_int8.quantize(k), kv_int8.quantize(v)
    words = pages.words
    for new, column in (
        (keys, offsets * width),
        (values, (page_size + offsets) * width),
        (kv_int8.scale_words(k_scale, v_scale)[..., None], 2 * page_size * width + offsets),
    ):
        # a stretch of words a token: by single words it would be as many updates as there are words
        words = jax.lax.scatter(
            words,
            jnp.stack([ids, column], axis=1),
            jnp.moveaxis(new, 1, 0),
            jax.lax.ScatterDimensionNumbers(
                update_window_dims=(1, 2, 3), inserted_window_dims=(1,), scatter_dims_to_operand_dims=(1, 3)
            ),
            mode=jax.lax.GatherScatterMode.FILL_OR_DROP,
        )
    return Int8Pages(words)


def _full_blocks(
    pages: BitmaskPages,
    k: Float[Array, "layers tokens kv_heads head_dim"],
    v: Float[Array, "layers tokens kv_heads head_dim"],
    rows: Rows,
    energy: Float[Array, "layers kv_heads head_dim"],
) -> tuple[Int32[Array, "layers num_pages kv_heads blocks block_words"], Int32[Array, ""]]:
    """The words with every block that the new tokens fill, and how many these are.

    A turn of the loop is one block of all layers and heads.
    """
    _, num_pages, _, blocks_of_page, _ = pages.words.shape
    base_bits = layout_of(pages, k.shape[3]).base_bits
    plan = filled_blocks(rows, k.shape[1], pages.recent.shape[1], num_pages, blocks_of_page)

    def one(item: Int32[Array, ""], state: tuple[Array, Array]) -> tuple[Array, Array]:
        words, done = state
        position = jnp.arange(BLOCK, dtype=jnp.int32)
        token = jnp.clip(plan.first[item] + position, 0, k.shape[1] - 1)
        is_new = (position >= plan.kept[item])[:, None]
        counted = plan.number[item] * BLOCK + position >= SINKS
        kept = jax.lax.dynamic_index_in_dim(pages.recent, plan.slot[item], axis=1, keepdims=False)
        kept = numbers(kept[..., jnp.where(counted, SINKS + position, position), :])
        keys, values = (
            jnp.where(is_new, jnp.moveaxis(new[:, token], 1, 2), old)
            for new, old in ((k, kept[:, :, 0]), (v, kept[:, :, 1]))
        )
        found = kv_bitmask.quantize(keys, values, energy, counted, base_bits=base_bits, implementation="xla")
        return words.at[:, plan.page[item], :, plan.place[item]].set(found, mode="drop"), done + 1

    return jax.lax.fori_loop(0, plan.total, one, (pages.words, jnp.int32(0)))


def _recent(
    recent: Array,
    k: Float[Array, "layers tokens kv_heads head_dim"],
    v: Float[Array, "layers tokens kv_heads head_dim"],
    rows: Rows,
    blocks: Int32[Array, ""],
) -> Array:
    """The bf16 rows with the new tokens that are among the first of their sequence or behind its last full block.

    ``blocks`` is what ``_full_blocks`` counted.
    """
    slots, lines = kept_lines(rows, k.shape[1], recent.shape[1])
    # always so, but only after the loop that reads the old rows; otherwise XLA may write first, and copy all for that
    slots = jnp.where(blocks >= 0, slots, recent.shape[1])
    return _scatter(recent, k, v, slots, lines)
