"""Rotation: the fixed orthogonal matrix that vectors are turned by before they are rounded with one scale.

Owns the matrix and its fast application. A channel that stands out would cost all others their precision, since one
scale serves a whole vector; turned, every channel holds a bit of everything. Source: QuaRot, arXiv 2404.00456.
"""

import functools

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pallas_kernels.errors import require

_SEED = 128


@functools.cache
def rotation(head_dim: int) -> np.ndarray:
    """float32 [head_dim, head_dim]: random signs times a Hadamard matrix, orthogonal; 80 and 96 in two blocks.

    A row vector is turned by ``x @ rotation(d)`` and turned back by ``y @ rotation(d).T``.

    Raises:
        ContractError: the head dim is no multiple of 4, so that a block would turn next to nothing.
    """
    require(head_dim % 4 == 0, f"head_dim {head_dim} has no rotation; it must be a multiple of 4")
    turn, start = np.zeros((head_dim, head_dim)), 0
    for size in _blocks(head_dim):
        turn[start : start + size, start : start + size] = _hadamard(size) / np.sqrt(size)
        start += size
    return (_signs(head_dim)[:, None] * turn).astype(np.float32)


def turned(x: Float[Array, "*n head_dim"]) -> Float[Array, "*n head_dim"]:
    """``x @ rotation(head_dim)`` in float32 and then x's dtype; two products with small matrices for each block.

    Raises:
        ContractError: the head dim is no multiple of 4.
    """
    head_dim = x.shape[-1]
    require(head_dim % 4 == 0, f"head_dim {head_dim} has no rotation; it must be a multiple of 4")
    return _by_blocks(x.astype(jnp.float32) * _signs(head_dim)).astype(x.dtype)


def turned_back(x: Float[Array, "*n head_dim"]) -> Float[Array, "*n head_dim"]:
    """``x @ rotation(head_dim).T``, in the same way."""
    return (_by_blocks(x.astype(jnp.float32)) * _signs(x.shape[-1])).astype(x.dtype)


def _by_blocks(x: Float[Array, "*n head_dim"]) -> Float[Array, "*n head_dim"]:
    """The symmetric part: a matrix of Hadamard is the Kronecker product of two smaller ones."""
    parts, start = list[Array](), 0
    for size in _blocks(x.shape[-1]):
        rows = 1 << size.bit_length() // 2
        outer, inner = _hadamard(rows).astype(np.float32), (_hadamard(size // rows) / np.sqrt(size)).astype(np.float32)
        square = x[..., start : start + size].reshape(*x.shape[:-1], rows, size // rows)
        square = jnp.einsum("...ab,bc->...ac", square, inner, precision="highest")
        square = jnp.einsum("...ab,ac->...cb", square, outer, precision="highest")
        parts.append(square.reshape(*x.shape[:-1], size))
        start += size
    return jnp.concatenate(parts, axis=-1)


def _blocks(head_dim: int) -> list[int]:
    """``head_dim`` as powers of two, the largest first."""
    sizes: list[int] = []
    while (left := head_dim - sum(sizes)) > 0:
        sizes.append(1 << left.bit_length() - 1)
    return sizes


def _signs(head_dim: int) -> np.ndarray:
    return np.random.default_rng(_SEED).choice(np.array([-1.0, 1.0], np.float32), head_dim)


def _hadamard(size: int) -> np.ndarray:
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix
