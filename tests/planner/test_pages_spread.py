"""PagePool over several devices: whose turn it is, how long a sequence can be, and random holders against a model."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from planner.pages import PageError, PagePool, fullest


def test_shards_go_round_from_the_home_on():
    pool = PagePool(24, 16, devices=3, shard_pages=2)
    pages = pool.take(7, home=1)
    assert pages == [8, 9, 16, 17, 0, 1, 10]
    assert pool.home_of(pages) == 1
    assert [pool.free_on(device) for device in range(3)] == [6, 5, 6]
    assert pool.homes() == [0, 2, 1]
    assert pool.take(2, home=1, first=7) == [11, 18]
    assert [pool.touches(pages[:n], 0) for n in (2, 4, 5)] == [False, False, True]


def test_one_device_has_everything_and_every_turn():
    pool = PagePool(5, 16)
    assert pool.take(5) == [0, 1, 2, 3, 4]
    assert (pool.homes(), pool.longest, pool.on_devices(0, 2, 3)) == ([0], 5, [3])


@pytest.mark.parametrize(("pages", "devices", "shard"), [(7, 2, 1), (6, 0, 1), (6, 2, 0)])
def test_sizes_that_do_not_fit_are_refused(pages, devices, shard):
    with pytest.raises(PageError, match=f"a pool of {pages} pages on {devices} devices in shards of {shard}"):
        PagePool(pages, 16, devices, shard)


def test_a_full_device_refuses_and_nothing_is_taken():
    pool = PagePool(8, 16, devices=2, shard_pages=2)
    pool.take(2, home=0)
    with pytest.raises(PageError, match="3 pages asked of a pool with 2 free on device 0"):
        pool.take(5, home=0)
    assert pool.num_free == 6


def test_a_page_on_another_device_is_found():
    pool = PagePool(8, 16, devices=2, shard_pages=2)
    with pytest.raises(PageError, match=r"page 5 is on another device than number 1 of \[0, 5\] must be"):
        pool.check([[0, 5]])


SIZES = st.tuples(st.integers(1, 4), st.integers(1, 9), st.integers(1, 5))


@given(SIZES)
def test_the_longest_sequence_fits_and_no_longer_one(sizes):
    devices, on_one, shard = sizes
    pool = PagePool(devices * on_one, 16, devices, shard)
    longest = pool.longest
    assert fullest(longest, shard, devices) <= on_one < fullest(longest + 1, shard, devices)
    for home in range(devices):
        assert len(set(pool.take(longest, home))) == longest
        pool = PagePool(devices * on_one, 16, devices, shard)


@given(SIZES, st.integers(1, 40), st.integers(0, 3), st.integers(0, 40))
def test_counts_by_device_are_those_of_single_pages(sizes, count, home, first):
    devices, on_one, shard = sizes
    pool, home = PagePool(devices * on_one, 16, devices, shard), home % devices
    turns = [pool.device_of(home, index) for index in range(first, first + count)]
    assert pool.on_devices(home, first, count) == [turns.count(device) for device in range(devices)]
    if not first:
        assert fullest(count, shard if devices > 1 else count, devices) == max(pool.on_devices(home, 0, count))


class SpreadMachine(RuleBasedStateMachine):
    """Sequences come, grow a page at a time and go; the model is the set of free pages of each device."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(12, 16, devices=3, shard_pages=2)
        self.holders: list[list[int]] = []

    def _free(self, device: int) -> set[int]:
        held = {page for pages in self.holders for page in pages}
        return set(range(4 * device, 4 * device + 4)) - held

    def _try(self, held: list[int], home: int, count: int) -> list[int] | None:
        turns = [(home + index // 2) % 3 for index in range(len(held), len(held) + count)]
        if any(turns.count(device) > len(self._free(device)) for device in range(3)):
            with pytest.raises(PageError):
                self.pool.take(count, home, len(held))
            return None
        pages = self.pool.take(count, home, len(held))
        assert [page // 4 for page in pages] == turns
        return pages

    @rule(count=st.integers(1, 9), home=st.integers(0, 2))
    def come(self, count: int, home: int) -> None:
        if (pages := self._try([], home, count)) is not None:
            self.holders.append(pages)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        holder += self._try(holder, self.pool.home_of(holder), 1) or []

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def go(self, data: st.DataObject) -> None:
        self.pool.give_back(self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1))))

    @invariant()
    def agrees(self) -> None:
        self.pool.check(self.holders)
        for device in range(3):
            assert self.pool.free_on(device) == len(self._free(device))


TestSpreadMachine = SpreadMachine.TestCase
