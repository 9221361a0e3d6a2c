"""Page-locking through a runtime that notes what it is asked, since there is no GPU to ask."""

import ctypes
import subprocess
from pathlib import Path

import numpy as np
import pytest

from appliance.host.pinned import PinError, page_lock
from appliance.host.segments import SegmentFile

SOURCE = """
#include <cstddef>
extern "C" {
void *seen_place; size_t seen_bytes; unsigned seen_flags;
int cudaHostRegister(void *place, size_t bytes, unsigned flags) {
  seen_place = place; seen_bytes = bytes; seen_flags = flags;
  return bytes > 1 << 20 ? 2 : 0;
}
const char *cudaGetErrorString(int code) { return code == 2 ? "out of memory" : "?"; }
}
"""
STRIDE = 528_384


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cuda")
    (folder / "fake.cc").write_text(SOURCE)
    library = folder / "libcudart.so.12"
    subprocess.run(["g++", "-shared", "-fPIC", "-o", library, folder / "fake.cc"], check=True)
    return library


def test_the_whole_region_is_registered_once_for_all_devices(runtime: Path, tmp_path: Path) -> None:
    with SegmentFile.create("pin", 1, STRIDE, tmp_path) as segments:
        page_lock(segments.memory, runtime)
        seen = ctypes.CDLL(str(runtime))
        place = ctypes.c_void_p.in_dll(seen, "seen_place").value
        assert place == np.frombuffer(segments.tokens(0), np.int32).ctypes.data - 128
        assert place % 4096 == 0
        assert ctypes.c_size_t.in_dll(seen, "seen_bytes").value == STRIDE
        assert ctypes.c_uint.in_dll(seen, "seen_flags").value == 1


def test_a_refusal_is_told_in_words(runtime: Path, tmp_path: Path) -> None:
    with (
        SegmentFile.create("large", 4, STRIDE, tmp_path) as segments,
        pytest.raises(PinError, match=r"2113536 bytes of memory cannot be page-locked: out of memory \(2\)"),
    ):
        page_lock(segments.memory, runtime)


def test_without_a_runtime_the_cause_is_told() -> None:
    with pytest.raises(PinError, match=r"the CUDA runtime libcudart.so.12 cannot be loaded"):
        page_lock(memoryview(bytearray(4096)))
