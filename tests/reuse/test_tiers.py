"""Host memory for pages: bytes, checksums, the order of ends, faults; and what the engine answers with a tier."""

import threading
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np
import pytest
import structlog

from appliance.engine_ports import Moved
from appliance.reuse.tiers import HostMemory, PageForm
from planner.host_tier import Fetch, Save
from planner.sequence import FinishReason
from tests.support.arithmetic_model import PageOut
from tests.support.engine_rig import EngineRig, prompt

WAIT_S = 10.0


@dataclass
class Moves:
    """What a tier said that it moved."""

    seen: list[tuple[str, int]] = field(default_factory=list)

    def tier_moved(self, direction: str, num_bytes: int) -> None:
        self.seen.append((direction, num_bytes))


@pytest.fixture
def make_memory():
    made: list[HostMemory] = []

    def make(places: int = 4, form: PageForm = PageForm((2, 16), np.int64), to_device=np.copy, **more) -> HostMemory:  # noqa: B008
        made.append(HostMemory(places, form, to_device, more.pop("observer", Moves()), **more))
        return made[-1]

    yield make
    for memory in made:
        memory.close()


def ends(memory: HostMemory, count: int) -> Moved:
    """All that has ended once so many copies have."""
    saved: list[bool] = []
    contents: list[object | None] = []
    while len(saved) + len(contents) < count:
        found = memory.moved(WAIT_S)
        assert found.saved or found.contents, "nothing ends"
        saved += found.saved
        contents += found.contents
    return Moved(saved, contents, [])


# ---------------------------------------------------------------------- bytes


@pytest.mark.parametrize("dtype", [np.float32, np.uint16, np.int32, ml_dtypes.bfloat16])
def test_what_comes_out_is_what_went_in_bit_for_bit(make_memory, dtype):
    form, moves = PageForm((3, 2, 5), dtype), Moves()
    memory = make_memory(2, form, observer=moves)
    bits = np.random.default_rng(1).integers(0, 256, (2, form.num_bytes), np.uint8)  # NaNs among them
    pages = [row.view(dtype).reshape(form.shape) for row in bits]
    memory.save([PageOut(page) for page in pages], [Save(7, 1, b"a"), Save(8, 0, b"b")])
    memory.fetch([Fetch(0, b"b"), Fetch(1, b"a")])
    saved, contents, _ = ends(memory, 4)
    assert saved == [True, True]
    assert [np.asarray(content).tobytes() for content in contents] == [bits[1].tobytes(), bits[0].tobytes()]
    assert np.asarray(contents[0]).dtype == dtype
    assert moves.seen == [("in", form.num_bytes)] * 2 + [("out", form.num_bytes)] * 2


def test_a_content_given_out_does_not_change_when_its_place_is_filled_again(make_memory):
    memory = make_memory(1)
    memory.save([PageOut(np.full((2, 16), 3))], [Save(0, 0, b"a")])
    memory.fetch([Fetch(0, b"a")])
    memory.save([PageOut(np.full((2, 16), 4))], [Save(0, 0, b"b")])
    _, (content,), _ = ends(memory, 3)
    assert np.asarray(content).tolist() == [[3] * 16] * 2


def test_damage_is_noticed_told_as_a_loss_and_logged(make_memory):
    memory = make_memory(2)
    memory.save([PageOut(np.ones((2, 16), np.int64))] * 2, [Save(0, 0, b"a"), Save(0, 1, b"b")])
    ends(memory, 2)
    memory._bytes[0, 77] ^= 1
    with structlog.testing.capture_logs() as log:
        memory.fetch([Fetch(0, b"a"), Fetch(1, b"b")])
        _, (lost, kept), _ = ends(memory, 2)
    assert lost is None
    assert np.asarray(kept).tolist() == [[1] * 16] * 2
    assert [line["event"] for line in log] == ["a page in host memory is damaged; it is forgotten and computed again"]


def test_a_copy_that_fails_is_a_loss_and_the_next_one_goes_on(make_memory):
    class Broken:
        def copy_to_host_async(self) -> None:
            pass

        def __array__(self, dtype=None, copy=None):
            raise RuntimeError("the device is gone")

    asked: list[int] = []

    def to_device(page: np.ndarray) -> np.ndarray:
        asked.append(1)
        if len(asked) == 1:
            raise MemoryError
        return page.copy()

    memory = make_memory(2, to_device=to_device)
    with structlog.testing.capture_logs() as log:
        other_shape = PageOut(np.zeros((2, 17), np.int64))
        memory.save([Broken(), other_shape, PageOut(np.ones((2, 16), np.int64))], [Save(0, n, b"") for n in (0, 1, 1)])
        memory.fetch([Fetch(1, b""), Fetch(1, b"")])
        saved, contents, _ = ends(memory, 5)
    assert saved == [False, False, True]
    assert contents[0] is None
    assert contents[1] is not None
    assert [line["cause"] for line in log] == ["RuntimeError", "ValueError", "MemoryError"]


def test_nothing_is_waited_for_but_when_asked(make_memory):
    held = threading.Event()

    def to_device(page: np.ndarray) -> np.ndarray:
        held.wait(WAIT_S)
        return page.copy()

    memory = make_memory(1, to_device=to_device)
    memory.save([PageOut(np.ones((2, 16), np.int64))], [Save(0, 0, b"a")])
    ends(memory, 1)
    memory.fetch([Fetch(0, b"a")])
    assert memory.moved(0.0) == ([], [], [])
    assert memory.moved(0.01) == ([], [], [])
    held.set()
    assert len(ends(memory, 1).contents) == 1


def test_the_memory_is_locked_once_and_whole(make_memory):
    locked: list[int] = []
    make_memory(3, lock=lambda memory: locked.append(memory.nbytes))
    assert locked == [3 * 2 * 16 * 8]


def test_more_than_the_system_gives_is_refused():
    with pytest.raises(MemoryError, match=r"the system gives no .* bytes for pages .*; lower cache.host_tier_mb"):
        HostMemory(1 << 30, PageForm((1 << 20,), np.int64), np.copy, Moves())


# ---------------------------------------------------------------------- the engine


@pytest.fixture
def make_rig(make_memory):
    def make(num_pages: int = 8, host_pages: int = 32, **more: object) -> EngineRig:
        memory = make_memory(host_pages)
        return EngineRig(num_pages=num_pages, host_pages=host_pages, mover=memory, **more)

    return make


def settle(rig: EngineRig) -> None:
    """Step until there is nothing left to do and to save."""
    rig.settle(20_000)
    tier = rig.scheduler._tier
    while True:
        rig.step()
        if not tier._filling:
            return
        rig.engine._mover._news.wait(WAIT_S)


def test_answers_are_those_of_sequences_that_run_alone(make_rig):
    rig = make_rig()
    prompts = [prompt(50), prompt(100, 1), prompt(50), prompt(33, 2), prompt(100, 1), prompt(60), prompt(50)]
    for ids in prompts:
        rig.submit(ids, 9)
        settle(rig)
    rig.assert_exact()
    tier = rig.scheduler.reuse.tier
    assert tier.hits >= 6
    assert [rig.gateway.finishes[key].cached_tokens for key in range(7)][2::2] == [48, 96, 48]


def test_answers_are_exact_when_many_come_at_once(make_rig):
    rig = make_rig(num_pages=12)
    for salt in range(12):
        rig.submit(prompt(40 + 5 * salt, salt % 3), 12, temperature=0.5, repetition_penalty=1.5)
        rig.step()
    settle(rig)
    for salt in range(12):
        rig.submit(prompt(40 + 5 * salt, salt % 3), 6)
    settle(rig)
    rig.assert_exact()
    assert rig.scheduler.reuse.tier.hits > 0


def test_damage_costs_computing_and_no_answer(make_rig):
    rig = make_rig()
    (first,) = rig.submit(prompt(60), 4)
    settle(rig)
    rig.submit(prompt(110, 1), 4)
    settle(rig)
    rig.engine._mover._bytes[:, 5] ^= 255
    (again,) = rig.submit(prompt(60), 4)
    settle(rig)
    assert rig.gateway.ids[first] == rig.gateway.ids[again]
    assert rig.gateway.finishes[again].cached_tokens == 0
    assert rig.scheduler.reuse.tier.damaged >= 1


def test_an_engine_that_stops_while_pages_are_loaded_tells_everybody(make_rig):
    rig = make_rig()
    rig.submit(prompt(60), 4)
    settle(rig)
    rig.submit(prompt(110, 1), 4)
    settle(rig)
    (again,) = rig.submit(prompt(60), 4)
    while not rig.scheduler.num_loading:
        rig.step()
    rig.engine.run(lambda: True)
    assert rig.gateway.finishes[again].reason is FinishReason.ERROR
    assert "the engine was stopped" in rig.gateway.finishes[again].error


def test_a_tier_without_programs_or_without_anybody_who_copies_is_refused(make_memory):
    with pytest.raises(ValueError, match=r"the scheduler's tier moves 2 pages at once, .* nobody copies them"):
        EngineRig(host_pages=4)
