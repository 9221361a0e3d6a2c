"""The tiers below host memory: files and a real Redis, with damage, bounds and faults, and the thread that asks."""

import contextlib
import os
import stat
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import structlog

from appliance.reuse.disk_tier import DiskTier
from appliance.reuse.lower_tiers import MAX_WRITES, DamagedPageError, LowerTiers
from appliance.reuse.redis_index import connect
from appliance.reuse.redis_tier import RedisTier
from appliance.reuse.tiers import HostMemory, PageForm
from planner.searching import Search
from tests.reuse.test_tiers import Moves, settle
from tests.support.engine_rig import EngineRig, prompt
from tests.support.front import wait_for
from tests.support.redis_server import RedisServer, needs_redis, redis_server

PAGE = 1000
HEADER = 52
SPACE = bytes(32)


def page(number: int) -> bytes:
    return np.random.default_rng(number).bytes(PAGE)


def name(number: int) -> bytes:
    return number.to_bytes(32)


@dataclass
class Events:
    """What tiers said."""

    seen: list[tuple[str, str, int]] = field(default_factory=list)

    def tier_event(self, tier: str, event: str, num_bytes: int = 0) -> None:
        self.seen.append((tier, event, num_bytes))

    def count(self, event: str) -> int:
        return sum(seen == event for _, seen, _ in self.seen)


# ---------------------------------------------------------------------- files


class Disk:
    """A disk tier and the number of files that gave way."""

    def __init__(self, folder: Path, pages: int = 4, space: bytes = SPACE) -> None:
        self.gone = 0
        self.tier = DiskTier(folder, pages * (PAGE + HEADER), space, self._count)

    def _count(self) -> None:
        self.gone += 1


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_a_page_survives_a_restart_and_only_its_own_name_finds_it(tmp_path: Path) -> None:
    folder = tmp_path / "pages"
    first = Disk(folder).tier
    assert first.get(name(1), PAGE) is None
    assert first.put(name(1), memoryview(page(1)))
    assert not first.put(name(1), page(1)), "it is there"
    again = Disk(folder).tier
    assert again.get(name(1), PAGE) == page(1)
    assert again.get(name(2), PAGE) is None
    assert Disk(folder, space=bytes([1] * 32)).tier.get(name(1), PAGE) is None, "of another model"


def test_nobody_else_can_read_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "state" / "pages"
    folder.mkdir(parents=True, mode=0o755)
    Disk(folder).tier.put(name(1), page(1))
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.iterdir())] == [0o700, 0o700]
    assert [stat.S_IMODE(path.stat().st_mode) for path in files(folder)] == [0o600]


def test_the_files_used_longest_ago_give_way_and_the_bound_holds_over_a_restart(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    for number in range(4):
        disk.tier.put(name(number), page(number))
    for age, number in enumerate((3, 2, 1, 0)):  # a clock that is coarse must not decide
        (file,) = tmp_path.rglob(disk.tier._file_name(name(number)))
        os.utime(file, (1000 + age, 1000 + age))
    again = Disk(tmp_path)
    assert again.tier.get(name(3), PAGE) == page(3)
    again.tier.put(name(4), page(4))
    assert [n for n in range(5) if again.tier.get(name(n), PAGE) is not None] == [0, 1, 3, 4]
    assert again.gone == 1
    assert sum(file.stat().st_size for file in files(tmp_path)) == 4 * (PAGE + HEADER)
    smaller = Disk(tmp_path, pages=1)
    smaller.tier.get(name(9), PAGE)
    assert (smaller.gone, len(files(tmp_path))) == (3, 1)
    assert not Disk(tmp_path / "tiny", pages=0).tier.put(name(1), page(1)), "one page is larger than all"


@pytest.mark.parametrize("how", ["a bit", "cut", "longer", "empty", "of another page", "another version"])
def test_a_file_that_is_not_what_was_written_is_removed(tmp_path: Path, how: str) -> None:
    disk = Disk(tmp_path)
    disk.tier.put(name(1), page(1))
    (file,) = files(tmp_path)
    content = bytearray(file.read_bytes())
    match how:
        case "a bit":
            content[500] ^= 1
        case "cut":
            del content[-1:]
        case "longer":
            content += b"x"
        case "empty":
            content.clear()
        case "of another page":
            other = Disk(tmp_path / "other")
            other.tier.put(name(2), page(2))
            content = bytearray(files(tmp_path / "other")[0].read_bytes())
        case "another version":
            content[7] += 1
    file.write_bytes(content)
    with pytest.raises(DamagedPageError):
        disk.tier.get(name(1), PAGE)
    assert not file.exists()
    assert disk.tier.get(name(1), PAGE) is None
    assert disk.tier.put(name(1), page(1))
    assert disk.tier.get(name(1), PAGE) == page(1)


def test_a_file_that_somebody_removed_is_a_miss_and_leftovers_go(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    disk.tier.put(name(1), page(1))
    files(tmp_path)[0].unlink()
    assert disk.tier.get(name(1), PAGE) is None
    assert disk.tier.put(name(1), page(1))
    left = files(tmp_path)[0].with_name(".partial-abc")
    left.write_bytes(b"half")
    assert Disk(tmp_path).tier.get(name(1), PAGE) == page(1)
    assert not left.exists()


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(tmp_path)
    disk.tier.put(name(1), page(1))

    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        with pytest.raises(OSError, match="No space left"):
            disk.tier.put(name(2), page(2))
    assert len(files(tmp_path)) == 1
    assert disk.tier.put(name(2), page(2))


# ---------------------------------------------------------------------- Redis


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path) as running:
        yield running


def of_redis(server: RedisServer, ttl_s: float = 60.0, space: bytes = SPACE) -> RedisTier:
    return RedisTier(partial(connect, server.url, 0.2), ttl_s, space)


@needs_redis
def test_nodes_share_pages_in_redis_of_one_model_and_for_a_time(server: RedisServer) -> None:
    with contextlib.closing(of_redis(server)) as one, contextlib.closing(of_redis(server)) as two:
        assert one.get(name(1), PAGE) is None
        assert one.put(name(1), memoryview(page(1)))
        assert not two.put(name(1), page(1)), "it is there"
        found = two.get(name(1), PAGE)
        assert found is not None
        assert bytes(found) == page(1)
        with contextlib.closing(of_redis(server, space=bytes([1] * 32))) as other:
            assert other.get(name(1), PAGE) is None
        with server.client() as client:
            (key,) = client.keys()
            assert 50_000 < client.pttl(key) <= 60_000


@needs_redis
@pytest.mark.parametrize("value", [b"", b"garbage", b"x" * 5_000_000, b"zccppg00" + bytes(1044)])
def test_what_lies_under_a_key_is_not_believed(server: RedisServer, value: bytes) -> None:
    with contextlib.closing(of_redis(server)) as tier, server.client() as client:
        tier.put(name(1), page(1))
        (key,) = client.keys()
        client.set(key, value)
        if value:
            with pytest.raises(DamagedPageError):
                tier.get(name(1), PAGE)
            assert client.exists(key) == 0
        assert tier.get(name(1), PAGE) is None


# ---------------------------------------------------------------------- the thread


class Faulty:
    """A tier that does what it is told."""

    label = "faulty"

    def __init__(self) -> None:
        self.pages: dict[bytes, bytes] = {}
        self.error: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.calls = 0

    def get(self, wanted: bytes, most_bytes: int) -> bytes | None:
        self._call()
        return self.pages.get(wanted)

    def put(self, wanted: bytes, content: bytes) -> bool:
        self._call()
        self.pages[wanted] = bytes(content)
        return True

    def _call(self) -> None:
        self.calls += 1
        self.gate.wait(10)
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        self.gate.set()


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def make_lower():
    made: list[LowerTiers] = []

    def make(*stores, events: Events | None = None, page_bytes: int = PAGE, clock=None) -> LowerTiers:
        made.append(LowerTiers(stores, page_bytes, events or Events(), clock or Clock()))
        return made[-1]

    yield make
    for lower in made:
        lower.close()


def looked(lower: LowerTiers, *numbers: int) -> list[bytes]:
    """What a search for these pages finds."""
    found: list[object] = []
    lower.search([Search(7, tuple(name(number) for number in numbers))])
    wait_for(lambda: found.extend(lower.found()) or found)
    ((number, contents),) = found
    assert number == 7
    return [bytes(content) for content in contents]


def test_what_was_handed_down_is_found_up_to_the_first_gap_in_whichever_tier(make_lower) -> None:
    near, far, events = Faulty(), Faulty(), Events()
    lower = make_lower(near, far, events=events)
    for number in range(5):
        lower.put(name(number), memoryview(page(number)))
    wait_for(lambda: len(far.pages) == 5)
    del near.pages[name(1)], far.pages[name(2)], near.pages[name(3)], far.pages[name(3)]
    assert looked(lower, 0, 1, 2, 3, 4) == [page(0), page(1), page(2)]
    assert (events.count("hit"), events.count("miss"), events.count("saved")) == (3, 3, 10)


def test_a_content_of_another_size_is_a_miss(make_lower) -> None:
    store, events = Faulty(), Events()
    store.pages[name(0)] = b"short"
    assert looked(make_lower(store, events=events), 0) == []
    assert events.count("damaged") == 1


def test_more_than_can_be_written_is_left_out_and_memory_stays_bounded(make_lower) -> None:
    store, events = Faulty(), Events()
    lower = make_lower(store, events=events)
    store.gate.clear()
    for number in range(3 * MAX_WRITES):
        lower.put(name(number), memoryview(page(number)))
    assert len(lower._writes) <= MAX_WRITES
    assert events.count("left_out") >= 2 * MAX_WRITES - 1
    store.gate.set()
    wait_for(lambda: not lower._writes)


def test_a_tier_that_fails_is_left_alone_for_a_while_with_one_line_and_then_asked_again(make_lower) -> None:
    store, events, clock = Faulty(), Events(), Clock()
    store.pages[name(0)] = page(0)
    lower = make_lower(store, events=events, clock=clock)
    store.error = OSError(5, "Input/output error")
    with structlog.testing.capture_logs() as log:
        for _ in range(10):
            assert looked(lower, 0) == []
        assert store.calls == 3
        store.error, clock.now_s = None, 1.5
        assert looked(lower, 0) == [page(0)]
    assert [(line["event"], line.get("cause")) for line in log] == [
        ("a tier does not work; requests go on without it", "Input/output error"),
        ("a tier works again", None),
    ]
    assert (events.count("failed"), events.count("left_out")) == (3, 7)


def test_a_tier_that_is_full_is_still_read(make_lower) -> None:
    class Full(Faulty):
        def put(self, wanted: bytes, content: bytes) -> bool:
            raise OSError(28, "No space left on device")

    store, events = Full(), Events()
    store.pages[name(0)] = page(0)
    lower = make_lower(store, events=events)
    for number in range(8):
        lower.put(name(number), memoryview(page(number)))
        wait_for(lambda: not lower._writes)
    assert looked(lower, 0) == [page(0)]
    assert (events.count("failed"), events.count("left_out")) == (3, 5)


def test_a_search_goes_before_what_is_written(make_lower) -> None:
    store = Faulty()
    lower = make_lower(store)
    store.gate.clear()
    for number in range(8):
        lower.put(name(number), memoryview(page(number)))
    wait_for(lambda: store.calls == 1)
    lower.search([Search(1, (name(100),))])
    store.gate.set()
    found: list[object] = []
    wait_for(lambda: found.extend(lower.found()) or found)
    assert lower._writes or store.calls >= 9


# ---------------------------------------------------------------------- the engine

FORM = PageForm((2, 16), np.int64)


class Prompt(HostMemory):
    """Copies before the next step, so that what is given up unsaved does not depend on how busy the machine is."""

    def save(self, *given) -> None:
        super().save(*given)
        self._copied()

    def store(self, *given) -> None:
        super().store(*given)
        self._copied()

    def fetch(self, *given) -> None:
        super().fetch(*given)
        self._copied()

    def _copied(self) -> None:
        done = threading.Event()
        self._jobs.put(done.set)
        assert done.wait(60)


@pytest.fixture
def make_rig(make_lower):
    made: list[HostMemory] = []

    def make(*stores, events: Events | None = None, host_pages: int = 5) -> EngineRig:
        lower = make_lower(*stores, events=events, page_bytes=FORM.num_bytes)
        made.append(Prompt(host_pages, FORM, np.copy, Moves(), below=lower))
        return EngineRig(num_pages=8, host_pages=host_pages, mover=made[-1], search_s=1000.0)

    yield make
    for memory in made:
        memory.close()


def written(rig: EngineRig) -> None:
    lower = rig.engine._mover._below
    wait_for(lambda: not lower._writes)
    lower.search([Search(10**9, (b"x",))])  # what was taken before it is over
    wait_for(lower.found)


def asked(rig: EngineRig, *salts: int, tenant: str = "t") -> list[int]:
    """Ask with prompts of 5 pages, one after the other; how many of the ids of each were reused."""
    keys: list[int] = []
    for salt in salts:
        keys += rig.submit(prompt(80 + salt % 3, salt), 4, tenant=tenant)
        settle(rig)
        written(rig)
    rig.assert_exact()
    return [rig.gateway.finishes[key].cached_tokens for key in keys]


def test_what_host_memory_gave_up_comes_back_from_disk_even_after_a_restart(make_rig, tmp_path: Path) -> None:
    disk, events = Disk(tmp_path, pages=100), Events()
    assert asked(make_rig(disk.tier, events=events), 0, 1, 2, 3) == [0, 0, 0, 0]
    assert events.count("saved") >= 5
    again = make_rig(Disk(tmp_path, pages=100).tier)
    assert asked(again, 0)[0] >= 64
    assert asked(make_rig(Disk(tmp_path, pages=100).tier), 0, tenant="other") == [0]


def test_damaged_and_vanished_files_cost_computing_and_no_answer(make_rig, tmp_path: Path) -> None:
    asked(make_rig(Disk(tmp_path, pages=100).tier), 0, 1, 2, 3)
    for number, file in enumerate(files(tmp_path)):
        if number % 2:
            file.write_bytes(b"garbage" * number)
        else:
            file.unlink()
    events = Events()
    rig = make_rig(Disk(tmp_path, pages=100).tier, events=events)
    assert sum(asked(rig, 0, 1, 2, 3)) < 4 * 64
    assert rig.gateway.refusals == {}


def test_a_disk_that_does_not_take_or_give_anything_costs_no_answer(make_rig, tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_bytes(b"")
    events = Events()
    rig = make_rig(DiskTier(in_the_way / "pages", 1 << 20, SPACE, lambda: None), events=events)
    assert asked(rig, 0, 1, 2, 3) == [0, 0, 0, 0]
    assert events.count("failed") >= 3


@needs_redis
def test_redis_that_is_killed_and_started_again_under_load_costs_no_answer(make_rig, server: RedisServer) -> None:
    events = Events()
    rig = make_rig(of_redis(server), events=events)
    asked(rig, 0, 1, 2, 3)
    assert asked(make_rig(of_redis(server)), 0)[0] >= 64, "another node"
    keys = [key for salt in range(6) for key in rig.submit(prompt(80, salt), 4)]
    rig.step(2)
    server.kill()
    settle(rig)
    server.start()
    keys += [key for salt in range(6) for key in rig.submit(prompt(80, salt), 4)]
    settle(rig)
    rig.assert_exact(*keys)
    assert events.count("failed") >= 1
