"""page_write: contract and choice of implementation."""

from typing import Literal

import jax
from jaxtyping import Array, Float, Int32

from pallas_kernels.errors import require
from pallas_kernels.page_write import native, reference

Implementation = Literal["reference", "xla", "native"]


def page_write(
    pages: Float[Array, "layers num_pages kv_heads 2 page_size head_dim"],
    k: Float[Array, "layers tokens kv_heads head_dim"],
    v: Float[Array, "layers tokens kv_heads head_dim"],
    page_ids: Int32[Array, " tokens"],
    offsets: Int32[Array, " tokens"],
    *,
    implementation: Implementation,
) -> Float[Array, "layers num_pages kv_heads 2 page_size head_dim"]:
    """Store the keys and values of new tokens, all layers at once.

    Args:
        pages: the pool; donate it, and the result takes its place without a copy.
        k: new keys of every layer.
        v: new values of every layer.
        page_ids: the page of each token; an id outside the pool drops the token.
        offsets: the position of each token inside its page.
        implementation: which code runs (the scatter of ``reference`` is also the fast XLA path).

    Raises:
        ContractError: shapes disagree.
    """
    layers, _, kv_heads, _, _, head_dim = pages.shape
    wanted = (layers, page_ids.shape[0], kv_heads, head_dim)
    require(k.shape == v.shape == wanted, f"k {k.shape} and v {v.shape} must be {wanted}")
    require(offsets.shape == page_ids.shape, f"offsets {offsets.shape} and page_ids {page_ids.shape} must agree")
    run = {"reference": reference.page_write, "xla": reference.page_write, "native": native.page_write}[implementation]
    with jax.named_scope("page_write"):
        return run(pages, k, v, page_ids, offsets)
