"""page_write: the plain meaning, one scatter that drops what lies outside the pool."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32


def page_write(
    pages: Float[Array, "layers num_pages kv_heads 2 page_size head_dim"],
    k: Float[Array, "layers tokens kv_heads head_dim"],
    v: Float[Array, "layers tokens kv_heads head_dim"],
    page_ids: Int32[Array, " tokens"],
    offsets: Int32[Array, " tokens"],
) -> Float[Array, "layers num_pages kv_heads 2 page_size head_dim"]:
    """See ``op.page_write``."""
    both = jnp.stack([k, v], axis=3).astype(pages.dtype)  # layers tokens kv_heads 2 head_dim
    both = jnp.moveaxis(both, 1, 0)  # the two index arrays are apart, so their axis comes first
    # a negative id would wrap around before the drop is decided
    page_ids = jnp.where(page_ids < 0, pages.shape[1], page_ids)
    return pages.at[:, page_ids, :, :, offsets].set(both, mode="drop")
