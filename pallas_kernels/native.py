"""The native CPU kernels: compiles ``*/native*.cc`` into one shared library and makes it known to XLA.

Owns the compiler's command line, the list of XLA call targets, and how these take a pool of keys and values. A library
belongs to the programs that call it: it is built beside them, for the same instruction sets, and registered before they
are loaded.
"""

import ctypes
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp

from pallas_kernels.bits import bf16_bits
from pallas_kernels.errors import ContractError
from pallas_kernels.pages import BitmaskPages, Int8Pages, Pages, kind

CALLS = (
    "zccp_linear_planes",
    *(f"zccp_linear_{form}{gate}" for form in ("blocks16", "blocks32", "bf16") for gate in ("", "_silu", "_gelu")),
    *(f"zccp_{op}{pool}" for op in ("paged_decode", "paged_prefill") for pool in ("", "_int8", "_bitmask")),
    "zccp_page_write",
    "zccp_page_write_int8",
)
"""XLA call targets that the library defines."""

_SOURCES = Path(__file__).parent
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-Wall", "-Wextra", "-Wno-maybe-uninitialized")
_TIMEOUT_S = 300
_loaded: list[ctypes.CDLL] = []


def pool_operands(pages: Pages) -> tuple[str, tuple[jax.Array, ...]]:
    """How the names of call targets for a pool end, and the arrays of it that they take.

    Raises:
        ContractError: no kernel takes this pool.
    """
    if isinstance(pages, Int8Pages):
        return "_int8", (pages.words,)
    if isinstance(pages, BitmaskPages):
        bits = pages.recent if pages.recent.dtype == jnp.uint16 else bf16_bits(pages.recent)
        return "_bitmask", (pages.words, bits)
    if pages.dtype == jnp.float32:
        return "", (pages,)
    raise ContractError(f"pages are {kind(pages)}; the native path takes float32 pages and those of few bits")


class NativeBuildError(RuntimeError):
    """The library could not be compiled; the message holds the compiler's words."""


def compiler() -> str | None:
    """The C++ compiler of this host, if it has one."""
    return shutil.which("g++") or shutil.which("c++")


def compile_library() -> bytes:
    """The kernels compiled for this host's CPU, as the bytes of a shared library.

    Raises:
        NativeBuildError: there is no compiler, or it fails.
    """
    command = compiler()
    if command is None:
        raise NativeBuildError("no C++ compiler (g++ or c++) was found; install one, or plan for implementation xla")
    sources = sorted(str(file) for file in _SOURCES.glob("*/native*.cc"))
    includes = (f"-I{_SOURCES.parent}", "-isystem", jax.ffi.include_dir())
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch) / "native.so"
        try:
            subprocess.run(  # noqa: S603 - a fixed command on our own sources
                [command, *_FLAGS, *includes, *sources, "-o", str(result)],
                check=True,
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
            )
        except subprocess.CalledProcessError as error:
            raise NativeBuildError(f"{command} failed on the native kernels:\n{error.stderr[-4000:]}") from error
        except subprocess.TimeoutExpired as error:
            raise NativeBuildError(f"{command} did not finish the native kernels within {_TIMEOUT_S} s") from error
        return result.read_bytes()


def register(library: bytes) -> None:
    """Load a library and make its kernels known to XLA; does nothing after the first time in a process.

    The bytes are loaded from memory, so that what runs is what the caller has verified.

    Raises:
        NativeBuildError: they are no such library.
    """
    if _loaded:
        return
    descriptor = os.memfd_create("zccp-native")
    with os.fdopen(descriptor, "wb") as file:
        file.write(library)
        file.flush()
        try:
            loaded = ctypes.CDLL(f"/proc/self/fd/{descriptor}")
            for name in CALLS:
                jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(loaded, name)), platform="cpu")
        except (OSError, AttributeError) as error:
            raise NativeBuildError(f"{len(library)} bytes are no library of native kernels: {error}") from error
    _loaded.append(loaded)
