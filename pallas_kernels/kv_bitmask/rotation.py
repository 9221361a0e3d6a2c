"""Rotation: the fixed orthogonal matrix that values are turned by before they are rounded to four bits.

Owns the matrix. A channel that stands out would cost all others their precision, since one scale serves a whole vector;
turned, every channel holds a bit of everything. Source: QuaRot, arXiv 2404.00456.
"""

import functools

import numpy as np

from pallas_kernels.errors import require
from pallas_kernels.kv_layout import BITMASK_HEAD_DIMS

_SEED = 128


@functools.cache
def rotation(head_dim: int) -> np.ndarray:
    """float32 [head_dim, head_dim]: random signs times a Hadamard matrix, orthogonal; 80 and 96 in two blocks.

    A row vector is turned by ``x @ rotation(d)`` and turned back by ``y @ rotation(d).T``.

    Raises:
        ContractError: the head dim is none that the bitmask formats take.
    """
    require(
        head_dim in BITMASK_HEAD_DIMS, f"head_dim {head_dim} has no rotation; bitmask formats take {BITMASK_HEAD_DIMS}"
    )
    signs = np.random.default_rng(_SEED).choice(np.array([-1.0, 1.0]), head_dim)
    turn, start = np.zeros((head_dim, head_dim)), 0
    while start < head_dim:
        size = 1 << (head_dim - start).bit_length() - 1
        turn[start : start + size, start : start + size] = _hadamard(size) / np.sqrt(size)
        start += size
    return (signs[:, None] * turn).astype(np.float32)


def _hadamard(size: int) -> np.ndarray:
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix
