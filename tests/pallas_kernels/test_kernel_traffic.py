"""Traffic: bytes of kernels whose addresses a person can count."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from pallas_kernels.traffic import Traffic

pytestmark = pytest.mark.interpret


def copied(stride: int, used: int, programs: int) -> tuple[Traffic, jax.Array]:
    """Copy 16 float32 elements ``stride`` apart, the first ``used`` of them, by each of some programs."""
    watch = Traffic()

    def kernel(source, target):
        place = jnp.arange(16, dtype=jnp.int32)
        value = watch.load(source, (place * stride,), place < used)
        watch.store(target, (pl.program_id(0), place), value)

    source = jnp.arange(1024, dtype=jnp.float32)
    shape = jax.ShapeDtypeStruct((programs, 16), jnp.float32)
    target = pl.pallas_call(kernel, out_shape=shape, grid=(programs,), interpret=True)(source)
    jax.block_until_ready(target)
    jax.effects_barrier()
    return watch, target


@pytest.mark.parametrize(
    ("stride", "used", "programs", "read", "written"),
    [
        (1, 16, 1, 64, 64),
        (1, 9, 1, 64, 64),  # the ninth element begins the second sector
        (1, 8, 3, 96, 192),
        (8, 16, 1, 512, 64),  # each element in a sector of its own
        (1, 0, 2, 0, 128),
    ],
)
def test_sectors_are_counted_once_an_access(stride, used, programs, read, written):
    watch, target = copied(stride, used, programs)
    assert (watch.read_bytes, watch.written_bytes) == (read, written)
    np.testing.assert_array_equal(target[-1], [place * stride if place < used else 0 for place in range(16)])
