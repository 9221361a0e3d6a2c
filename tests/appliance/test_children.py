"""One child through its lives: last words, new lives, and the end of one that does not listen."""

import os
import selectors
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.assignment import Assignment, read_cause, read_notices, write_cause
from appliance.children import DUMP_S, Child
from appliance.config import build

PROGRAM = """
import json, os, sys, time
say = lambda line: os.write(json.load(open(sys.argv[1]))["notify_fd"], line + b"\\n")
exec(open(os.path.join(os.path.dirname(sys.argv[0]), "body")).read())
"""
READY = """say(b'{"state":"ready"}'); time.sleep(60)"""
FAILED = """say(b''); say(b'{"state":"failed","reason":"no luck"}'); sys.exit(3)"""


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


class Bench:
    """A child whose program is a line of Python that can ``say`` something to its parent."""

    def __init__(self, folder: Path) -> None:
        self.selector = selectors.DefaultSelector()
        self.folder = folder
        program = folder / "program.py"
        program.write_text(PROGRAM)
        self.child = Child("worker", 3, (sys.executable, "-I", "-S", str(program)), {}, self.selector)

    def start(self, body: str) -> None:
        def assign(notify_fd: int) -> Assignment:
            return Assignment(
                role="worker", index=3, parent_pid=os.getpid(), notify_fd=notify_fd, epoch=1, port=1, segments_file="",
                socket="", metrics="", model="", config=build({}, {}),
            )  # fmt: skip

        (self.folder / "body").write_text(body)
        self.child.start(assign, self.folder)

    def turn(self, now_s: float) -> str | None:
        """Handle one batch of events; how the child ended, if it did."""
        told = [self.child.handle(key.fd, now_s) for key, _ in self.selector.select(5)]
        return next((how for how in told if how is not None), None)

    def until_it_ends(self, now_s: float) -> str:
        while (how := self.turn(now_s)) is None:
            pass
        return how


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.child.kill(0.0)
    made.selector.close()


def test_last_words_and_a_new_life_under_the_same_name(bench: Bench) -> None:
    before = descriptors()
    for pause_s in (0.1, 0.2, 0.4):
        bench.start(FAILED)
        assert bench.child.is_alive
        assert (bench.folder / "worker-3.json").stat().st_mode & 0o777 == 0o600
        assert bench.until_it_ends(100.0) == "exit code 3: no luck"
        assert not bench.child.is_alive
        assert bench.child.retry_after_end(100.0) == pytest.approx(pause_s)
        assert bench.child.wake_s == pytest.approx(100.0 + pause_s)
        assert not bench.child.is_due(100.0 + pause_s / 2)
        assert bench.child.is_due(100.1 + pause_s)
    assert descriptors() == before


def test_a_long_ready_life_begins_with_the_first_pause_again(bench: Bench) -> None:
    for ready_for_s, pause_s in ((0.0, 0.1), (29.0, 0.2), (31.0, 0.1)):
        bench.start(READY)
        while bench.child.ready_since_s is None:
            assert bench.turn(50.0) is None
        bench.child.terminate()
        assert bench.until_it_ends(51.0) == "signal SIGTERM"
        assert bench.child.retry_after_end(50.0 + ready_for_s) == pytest.approx(pause_s)


def test_silence_counts_only_from_ready_on(bench: Bench) -> None:
    bench.start(READY)
    assert [bench.child.silent_s(now_s) for now_s in (0.0, 1.0)] == [0.0, 0.0]
    while bench.child.ready_since_s is None:
        bench.turn(1.0)
    assert [bench.child.silent_s(now_s) for now_s in (2.0, 3.0, 4.5)] == [0.0, 1.0, 2.5]


def test_a_doomed_child_is_killed_after_its_grace_with_the_cause(bench: Bench) -> None:
    bench.start(READY)
    while bench.child.ready_since_s is None:
        bench.turn(1.0)
    (pid,) = map(int, Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split())
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)  # until it has stopped, and hears nothing more
    assert bench.child.doom("it hangs", 10.0)
    assert not bench.child.doom("for another reason", 10.5)
    assert bench.child.wake_s == 10.0 + DUMP_S
    bench.child.kill_if_due(10.0 + DUMP_S / 2)
    assert bench.child.is_alive
    bench.child.kill_if_due(10.0 + DUMP_S)
    assert bench.until_it_ends(11.0) == "signal SIGKILL: it hangs"
    assert not bench.child.doom("too late", 12.0)


def test_a_start_that_fails_leaves_nothing_behind(bench: Bench) -> None:
    before = descriptors()
    (bench.folder / "worker-3.json").mkdir()
    with pytest.raises(OSError, match=r"worker-3\.json"):
        bench.start(READY)
    assert not bench.child.is_alive
    assert descriptors() == before


def test_a_terminated_child_is_not_started_again(bench: Bench) -> None:
    bench.start(FAILED)
    bench.until_it_ends(1.0)
    bench.child.retry_after_end(1.0)
    bench.child.terminate()
    assert not bench.child.is_due(1e9)
    assert bench.child.wake_s == float("inf")


def test_empty_lines_say_nothing_and_damaged_ones_are_skipped() -> None:
    buffer = bytearray(b'\n\n{"state":"ready"}\n{"state":\n\n{"state":"lo')
    assert [notice.state for notice in read_notices(buffer)] == ["ready"]
    assert buffer == b'{"state":"lo'


def test_the_cause_stands_beside_the_socket_until_it_is_taken_back(tmp_path: Path) -> None:
    socket = tmp_path / "engine.sock"
    assert read_cause(socket) == ""
    write_cause(socket, "x" * 1000)
    assert read_cause(socket) == "x" * 500
    write_cause(socket, "gone")
    assert read_cause(socket) == "gone"
    write_cause(socket, "")
    assert read_cause(socket) == ""
    assert list(tmp_path.iterdir()) == []
    write_cause(tmp_path / "no folder" / "engine.sock", "nobody reads this")
