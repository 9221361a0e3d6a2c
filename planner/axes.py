"""Axes: what the dimensions of a plan's arrays are called, and which axes of the device mesh each is cut over.

Owns the one table of both. Devices form a mesh of "model" by "context", see ``planner.sharding``. Never imports jax.
"""

from collections.abc import Mapping

MODEL, CONTEXT = "model", "context"

AXES: Mapping[str, tuple[str, ...]] = {
    "kv_heads": (MODEL, CONTEXT),
    "ffw": (MODEL, CONTEXT),
    "vocab": (MODEL, CONTEXT),
    "page_heads": (MODEL,),
    "pages": (CONTEXT,),
    "layers": (),
    "embed": (),
    "head_dim": (),
    "slots": (),
}
"""Logical axis -> the mesh axes that it is cut over, the coarser one first; () = every device has all of it."""

Axes = tuple[str, ...]
"""The logical axes of an array's first dimensions; every device has all of the others."""

ENERGY_AXES: Axes = ("layers", "page_heads", "head_dim")
"""Of the query energies, which are used where pages are written."""
