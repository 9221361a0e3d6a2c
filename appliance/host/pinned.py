"""Page-locked memory: what a GPU reads itself, such as a node's segments, registered once with the CUDA runtime.

Owns the call and its errors. The runtime is loaded by name and only where there is a GPU; it works on the context that
jax has made on the device, which is the process's primary one. Never imports jax.
Source: CUDA Runtime API, cudaHostRegister.
"""

import ctypes
from importlib.util import find_spec
from pathlib import Path

_PORTABLE = 1
_LIBRARY = "libcudart.so.12"


class PinError(RuntimeError):
    """Memory cannot be page-locked; the message gives the cause. Transfers then go through a buffer of the driver's."""


def page_lock(memory: memoryview, library: str | Path | None = None) -> None:
    """Register memory with the CUDA runtime, for all devices, until the process ends.

    Args:
        memory: writable, contiguous, beginning at a page.
        library: the CUDA runtime; found beside jax's own packages by default.

    Raises:
        PinError: there is no CUDA runtime, or it refuses.
    """
    path = library or _find()
    try:
        runtime = ctypes.CDLL(str(path))
    except OSError as error:
        raise PinError(f"the CUDA runtime {path} cannot be loaded: {error}") from error
    runtime.cudaHostRegister.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint)
    runtime.cudaGetErrorString.argtypes, runtime.cudaGetErrorString.restype = (ctypes.c_int,), ctypes.c_char_p
    place = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    code: int = runtime.cudaHostRegister(place, memory.nbytes, _PORTABLE)
    if code:
        cause: bytes = runtime.cudaGetErrorString(code) or b"unknown"
        raise PinError(f"{memory.nbytes} bytes of memory cannot be page-locked: {cause.decode()} ({code})")


def _find() -> str:
    """The runtime that jax's packages bring, else the system's."""
    try:
        package = find_spec("nvidia.cuda_runtime")
    except ModuleNotFoundError:
        package = None
    places = [] if package is None else package.submodule_search_locations or []
    found = (Path(place) / "lib" / _LIBRARY for place in places)
    return next((str(file) for file in found if file.is_file()), _LIBRARY)
