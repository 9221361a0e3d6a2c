"""Traffic: the bytes that a kernel moves, counted from the addresses that it asks for while it is interpreted.

Owns the counting: every access of every program counts the distinct 32-byte sectors that it touches, which is what a
card moves when no program finds another's data in a cache. Never runs on a card.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from pallas_kernels.access import Access

SECTOR_BYTES = 32
"""What an NVIDIA GPU moves at least between its memory and its caches."""


class Traffic(Access):
    """Loads and stores as any access does, and counts the bytes."""

    def __init__(self) -> None:
        self.read_bytes = 0
        self.written_bytes = 0

    def load(self, ref: jax.Ref, index: tuple[Array, ...], mask: Array | None = None) -> Array:
        """See ``Access.load``."""
        self._watch(ref, index, mask, self._read)
        return super().load(ref, index, mask)

    def store(self, ref: jax.Ref, index: tuple[Array, ...], value: Array, mask: Array | None = None) -> None:
        """See ``Access.store``."""
        self._watch(ref, index, mask, self._write)
        super().store(ref, index, value, mask)

    def _watch(self, ref: jax.Ref, index: tuple[Array, ...], mask: Array | None, record: Callable[[int], None]) -> None:
        itemsize = ref.dtype.itemsize
        place = jnp.zeros((), jnp.int32)
        for axis, size in enumerate(ref.shape):
            place = place * size + index[axis]
        used = jnp.ones((), bool) if mask is None else mask
        jax.debug.callback(lambda place, used: record(_sectors(place, used, itemsize)), place, used)

    def _read(self, sectors: int) -> None:
        self.read_bytes += sectors * SECTOR_BYTES

    def _write(self, sectors: int) -> None:
        self.written_bytes += sectors * SECTOR_BYTES


def _sectors(place: Array, used: Array, itemsize: int) -> int:
    """Distinct sectors of the elements at ``place`` of an array that begins at a sector."""
    places, mask = np.broadcast_arrays(np.asarray(place, np.int64), np.asarray(used))
    return len(np.unique(places[mask] * itemsize // SECTOR_BYTES))
