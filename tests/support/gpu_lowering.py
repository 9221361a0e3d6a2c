"""Lowering of a program for a GPU that is not there."""

import warnings
from collections.abc import Callable

import jax
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

_A100 = AbstractDevice(device_kind="NVIDIA A100-SXM4-80GB", num_cores=None, platform="gpu")


def lowered_for_a100(function: Callable[..., object], *shapes: jax.ShapeDtypeStruct) -> str:
    """The program in the compiler's own language; newer versions of jax want to know which GPU, and warn of Triton."""
    with use_abstract_mesh(AbstractMesh((1,), ("card",), abstract_device=_A100)), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
        return jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
