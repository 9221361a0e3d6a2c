"""PagePool against a naive model: a list of holders."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from planner.pages import PageError, PagePool


def test_ids_start_at_the_lowest_and_the_unused_id_is_one_past():
    pool = PagePool(4, 16)
    assert pool.take(3) == [0, 1, 2]
    assert (pool.num_free, pool.unused) == (1, 4)


@pytest.mark.parametrize(("positions", "pages"), [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_pages_for(positions: int, pages: int):
    assert PagePool(4, 16).pages_for(positions) == pages


@pytest.mark.parametrize(("num_pages", "page_size"), [(0, 16), (4, 0), (-1, 16)])
def test_empty_pool_is_refused(num_pages: int, page_size: int):
    with pytest.raises(PageError, match=f"a pool of {num_pages} pages of {page_size} positions; both must be above 0"):
        PagePool(num_pages, page_size)


def test_taking_too_many_takes_nothing():
    pool = PagePool(2, 16)
    with pytest.raises(PageError, match="3 pages asked of a pool with 2 free"):
        pool.take(3)
    assert pool.num_free == 2


def test_giving_back_twice_is_an_error():
    pool = PagePool(2, 16)
    pages = pool.take(1)
    pool.give_back(pages)
    with pytest.raises(PageError, match="cannot give back page 0: it is free"):
        pool.give_back(pages)


@pytest.mark.parametrize("page", [-1, 2, 1])
def test_sharing_what_nobody_holds_changes_nothing(page: int):
    pool = PagePool(2, 16)
    held = pool.take(1)
    with pytest.raises(PageError, match=f"cannot share page {page}"):
        pool.share([*held, page])
    pool.check([held])


def test_check_finds_each_fault():
    pool = PagePool(3, 16)
    held = pool.take(2)
    with pytest.raises(PageError, match="page 1 has 1 references and 0 holders"):
        pool.check([held[:1]])
    with pytest.raises(PageError, match="page 0 has 1 references and 2 holders"):
        pool.check([held, held[:1]])
    with pytest.raises(PageError, match="twice in one table"):
        pool.check([[0, 1, 1]])
    with pytest.raises(PageError, match=r"pages \[7\] are held and outside"):
        pool.check([held, [7]])


class PoolMachine(RuleBasedStateMachine):
    """Holders take, share and give back at random."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(7, 16)
        self.holders: list[list[int]] = []

    @rule(count=st.integers(0, 7))
    def take(self, count: int) -> None:
        free = set(range(7)) - {page for pages in self.holders for page in pages}
        if count > len(free):
            with pytest.raises(PageError):
                self.pool.take(count)
            return
        pages = self.pool.take(count)
        assert len(pages) == count
        assert set(pages) <= free
        self.holders.append(pages)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        source = data.draw(st.sampled_from(self.holders))
        part = source[: data.draw(st.integers(0, len(source)))]
        self.pool.share(part)
        self.holders.append(list(part))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        self.pool.give_back(self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1))))

    @invariant()
    def agrees(self) -> None:
        self.pool.check(self.holders)
        held = [page for pages in self.holders for page in pages]
        assert self.pool.num_free == 7 - len(set(held))
        assert [self.pool.references(page) for page in range(7)] == [held.count(page) for page in range(7)]


TestPoolMachine = PoolMachine.TestCase
