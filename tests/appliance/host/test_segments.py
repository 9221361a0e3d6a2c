"""Segments: the layout byte for byte, two processes on one file, allocation, stale files."""

import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.host.segments import (
    MIN_STRIDE_BYTES,
    SEGMENT_TOKENS,
    SegmentAllocator,
    SegmentError,
    SegmentFile,
    SegmentRange,
    SegmentsExhaustedError,
    remove_stale,
    share,
)

STRIDE = 528_384


def test_least_stride_is_516_kib() -> None:
    assert MIN_STRIDE_BYTES == STRIDE == 516 * 1024


def test_layout_byte_for_byte(tmp_path: Path) -> None:
    with SegmentFile.create("layout", 2, STRIDE, tmp_path) as segments:
        segments.write_prompt(1, [7, -1, 131_071], context_id=0x1122334455667788, timestamp_ns=99, device=3)
        segments.tokens(1)[3], segments.tokens(1)[4] = 11, 12
        segments.publish_completion(1, 2)
        data = segments.path.read_bytes()
    assert len(data) == 2 * STRIDE
    base = STRIDE
    assert data[:12] == data[base : base + 12] == struct.pack("<QI", 0xCAFEBABE, 1)
    assert data[base + 12 : base + 16] == bytes(4)
    assert struct.unpack_from("<QQ", data, base + 16) == (0x1122334455667788, 99)
    assert data[base + 32 : base + 128] == bytes(96)
    assert struct.unpack_from("<5i", data, base + 128) == (7, -1, 131_071, 11, 12)
    assert data[base + 148 : base + 128 + 4 * SEGMENT_TOKENS] == bytes(4 * SEGMENT_TOKENS - 20)
    assert struct.unpack_from("<III", data, base + 524_416) == (3, 2, 3)
    assert data[base + 524_428 :] == bytes(STRIDE - 524_428)


def test_file_is_private_and_removed_by_its_maker(tmp_path: Path) -> None:
    segments = SegmentFile.create("private", 1, STRIDE, tmp_path)
    assert segments.path.stat().st_mode & 0o777 == 0o600
    attached = SegmentFile.attach(segments.path, 1, STRIDE)
    attached.close()
    assert segments.path.exists()
    segments.close()
    segments.close()
    assert not segments.path.exists()


@pytest.mark.parametrize(
    ("count", "stride", "match"),
    [
        (0, STRIDE, "0 segments; at least 1"),
        (1, STRIDE + 1, "multiple of 4096"),
        (1, STRIDE - 4096, "at least 528384"),
        (1 << 40, STRIDE, r"do not fit in .*lower shared_memory.segment_count"),
    ],
)
def test_numbers_that_break_a_rule(tmp_path: Path, count: int, stride: int, match: str) -> None:
    with pytest.raises(SegmentError, match=match):
        SegmentFile.create("bad", count, stride, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_name_in_use(tmp_path: Path) -> None:
    with SegmentFile.create("twice", 1, STRIDE, tmp_path), pytest.raises(SegmentError, match="File exists"):
        SegmentFile.create("twice", 1, STRIDE, tmp_path)


def test_attach_checks_size_and_header(tmp_path: Path) -> None:
    with pytest.raises(SegmentError, match="No such file"):
        SegmentFile.attach(tmp_path / "none", 1, STRIDE)
    with SegmentFile.create("checked", 2, STRIDE, tmp_path) as segments:
        with pytest.raises(SegmentError, match="where 3 x 528384 are expected"):
            SegmentFile.attach(segments.path, 3, STRIDE)
        with segments.path.open("r+b") as file:
            file.seek(STRIDE + 8)
            file.write(struct.pack("<I", 2))
        with pytest.raises(SegmentError, match=r"segment 1 .* version 2; this version reads 0xcafebabe version 1"):
            SegmentFile.attach(segments.path, 2, STRIDE)


def test_prompts_and_completions_that_do_not_fit(tmp_path: Path) -> None:
    with SegmentFile.create("full", 1, STRIDE, tmp_path) as segments:
        with pytest.raises(SegmentError, match="a prompt of 0 ids; a segment takes 1 to 131072"):
            segments.write_prompt(0, [], 0, 0)
        with pytest.raises(SegmentError, match="a prompt of 131073 ids"):
            segments.write_prompt(0, range(SEGMENT_TOKENS + 1), 0, 0)
        segments.write_prompt(0, range(SEGMENT_TOKENS), 0, 0)
        with pytest.raises(SegmentError, match=r"ids \[5, 131073\)"):
            segments.read_ids(0, 5, SEGMENT_TOKENS + 1)


def test_two_processes_see_one_memory(tmp_path: Path) -> None:
    child = """
import sys
from pathlib import Path
from appliance.host.segments import SegmentFile
with SegmentFile.attach(Path(sys.argv[1]), 2, 528384) as segments:
    ids = segments.read_ids(1, 0, segments.prompt_len(1))
    for place, token_id in enumerate(ids, 3):
        segments.tokens(1)[place] = 2 * token_id
    segments.publish_completion(1, 3)
"""
    with SegmentFile.create("shared", 2, STRIDE, tmp_path) as segments:
        segments.write_prompt(1, [1, 2, 3], 0, 0)
        subprocess.run([sys.executable, "-c", child, str(segments.path)], check=True)
        assert segments.completion_len(1) == 3
        assert segments.read_ids(1, 3, 6) == [2, 4, 6]
        assert segments.tokens(1)[3] == 2


def test_memory_that_is_in_use_outlives_the_file(tmp_path: Path) -> None:
    segments = SegmentFile.create("used", 1, STRIDE, tmp_path)
    segments.write_prompt(0, [5, 6], 0, 0)
    used = segments.tokens(0)[:2]
    exported = memoryview(used)
    segments.close()
    assert not segments.path.exists()
    assert exported.tolist() == [5, 6]


def test_stale_files_go_and_living_ones_stay(tmp_path: Path) -> None:
    child = """
import sys, time
from pathlib import Path
from appliance.host.segments import SegmentFile
segments = SegmentFile.create("other", 1, 528384, Path(sys.argv[1]))
print("up", flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", child, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        path = tmp_path / "zccp-other.segments"
        assert remove_stale(tmp_path) == []
        assert path.exists()
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert remove_stale(tmp_path) == [path]
    assert not path.exists()


def test_shares_are_contiguous_and_complete() -> None:
    assert [share(10, 4, worker) for worker in range(4)] == [
        SegmentRange(0, 3), SegmentRange(3, 3), SegmentRange(6, 2), SegmentRange(8, 2),
    ]  # fmt: skip
    with pytest.raises(SegmentError, match="3 segments for 4 workers; raise"):
        share(3, 4, 0)
    with pytest.raises(SegmentError, match="worker 4 of 4"):
        share(10, 4, 4)


@given(st.integers(1, 12), st.lists(st.integers(-3, 4), max_size=60))
def test_allocator_against_a_set(count: int, steps: list[int]) -> None:
    allocator = SegmentAllocator(SegmentRange(5, count))
    held: list[int] = []
    for step in steps:
        if step > 0:
            if step > count - len(held):
                with pytest.raises(SegmentsExhaustedError, match=f"{step} segments wanted"):
                    allocator.take(step)
            else:
                taken = allocator.take(step)
                assert not set(taken) & set(held)
                assert all(5 <= segment < 5 + count for segment in taken)
                held += taken
        elif held:
            segment = held.pop(step % len(held))
            allocator.give_back(segment)
            with pytest.raises(SegmentError, match="is not taken"):
                allocator.give_back(segment)
        assert allocator.free == count - len(held)


def test_allocator_refuses_a_foreign_segment() -> None:
    with pytest.raises(SegmentError, match="segment 4 is not taken"):
        SegmentAllocator(SegmentRange(5, 2)).give_back(4)


def test_module_needs_no_numpy() -> None:
    code = "import sys, appliance.host.segments, appliance.host.channel; print({'numpy', 'jax'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
