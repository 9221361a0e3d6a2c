"""The rotation: orthogonal, and applied by parts as by the whole matrix."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.errors import ContractError
from pallas_kernels.kv_bitmask.rotation import rotation, turned, turned_back

HEAD_DIMS = (4, 8, 16, 20, 32, 64, 80, 96, 112, 128, 192, 256)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_by_parts_it_is_the_product_with_the_matrix(head_dim):
    matrix = rotation(head_dim).astype(np.float64)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(head_dim), atol=1e-6)
    x = np.random.default_rng(0).standard_normal((3, 2, head_dim), dtype=np.float32)
    np.testing.assert_allclose(turned(jnp.asarray(x)), x @ matrix, rtol=0, atol=2e-6)
    np.testing.assert_allclose(turned_back(jnp.asarray(x)), x @ matrix.T, rtol=0, atol=2e-6)
    np.testing.assert_allclose(turned_back(turned(jnp.asarray(x))), x, rtol=0, atol=2e-6)


def test_the_dtype_is_kept():
    x = jnp.ones((2, 64), jnp.bfloat16)
    assert turned(x).dtype == turned_back(x).dtype == jnp.bfloat16


def test_a_channel_that_stands_out_is_spread_over_all():
    """The largest channel of what is rounded then says little of the one that stood out."""
    x = np.random.default_rng(1).standard_normal((100, 128), dtype=np.float32)
    x[:, 7] *= 50
    crest = np.abs(np.asarray(turned(jnp.asarray(x)))).max(axis=1) / np.sqrt((x**2).mean(axis=1))
    assert crest.mean() < 3
    assert (np.abs(x).max(axis=1) / np.sqrt((x**2).mean(axis=1))).mean() > 8


@pytest.mark.parametrize("head_dim", [6, 66])
def test_other_head_dims_are_refused(head_dim):
    with pytest.raises(ContractError, match=f"head_dim {head_dim} has no rotation; it must be a multiple of 4"):
        turned(jnp.ones((1, head_dim)))
