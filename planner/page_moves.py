"""Moves of whole pages: what a plan's programs read out of the pool, and write back into it, a few pages at a time.

Owns the two steps and the shape of a page outside of the pool. A page travels as an array of its own, so that what pads
a launch is never copied to the host. Launches have a fixed number of pages; one that moves fewer repeats its first.
"""

from typing import Any

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int32, Shaped

from pallas_kernels.pages import BitmaskPages, Int8Pages, Pages
from planner.axes import AXES
from planner.decoder import DeviceState

PAGE_CUT = PartitionSpec(None, AXES["page_heads"])
"""How a page outside of the pool is cut over devices: by its heads."""


def read_pages(
    state: DeviceState, ids: Int32[Array, " at_once"]
) -> tuple[DeviceState, tuple[Shaped[Array, "layers kv_heads *page"], ...]]:
    """The state as it is, and copies of the pages with these ids."""
    pool = _contents(state.pages)
    copies = tuple(jax.lax.dynamic_index_in_dim(pool, ids[n], axis=1, keepdims=False) for n in range(ids.shape[0]))
    return state, copies


def write_pages(
    state: DeviceState, ids: Int32[Array, " at_once"], *contents: Shaped[Array, "layers kv_heads *page"]
) -> DeviceState:
    """The state with these contents in the pages with these ids; of a page named twice, the last content stays."""
    pool = _contents(state.pages)
    for n, content in enumerate(contents):
        pool = jax.lax.dynamic_update_index_in_dim(pool, content, ids[n], axis=1)
    pages = state.pages
    return state._replace(pages=pages._replace(words=pool) if isinstance(pages, (BitmaskPages, Int8Pages)) else pool)


def page_shape(pool: Any) -> jax.ShapeDtypeStruct:
    """The shape of one page of a pool with these shapes: all layers and key/value heads of all devices."""
    words: jax.ShapeDtypeStruct = jax.tree.leaves(pool)[0]
    layers, _, *page = words.shape
    return jax.ShapeDtypeStruct((layers, *page), words.dtype)


def _contents(pages: Pages) -> Array:
    """The array of a pool that pages are parts of; what slots keep beside it stays where it is."""
    return pages.words if isinstance(pages, (BitmaskPages, Int8Pages)) else pages
