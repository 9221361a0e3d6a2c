"""jit for programs that a test runs a few times: XLA's backend is told not to optimise, which halves its time."""

from collections.abc import Callable
from typing import Any

import jax

_OPTIONS = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def quick_jit(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """``jax.jit`` of a function, compiled fast rather than to fast code."""
    return jax.jit(function, compiler_options=_OPTIONS, **options)
