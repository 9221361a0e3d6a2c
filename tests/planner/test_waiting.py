"""Whose turn it is."""

from planner.sequence import Sampling, Sequence
from planner.waiting import LOOK_AHEAD, WaitingLines


def made(order: int, tenant: str = "a", length: int = 10) -> Sequence:
    sequence = Sequence(order, f"r{order}", tenant, [1] * length, length, Sampling(max_tokens=4), 0.0)
    sequence.order = order
    return sequence


def admit_all(lines: WaitingLines, tokens: int | None = None) -> list[int]:
    """Admit one after the other, as if one slot came free at a time."""
    given = []
    while len(lines):
        sequence = next(iter(lines.in_turn()))
        lines.admit(sequence, len(sequence.ids) if tokens is None else tokens)
        given.append(sequence.order)
    return given


def test_oldest_first_within_a_tenant_whatever_the_order_of_coming():
    lines = WaitingLines()
    for order in (4, 2, 9, 3):
        lines.add(made(order))
    assert admit_all(lines) == [2, 3, 4, 9]
    assert (len(lines), lines.num_tokens) == (0, 0)


def test_tenants_take_turns_by_tokens():
    lines = WaitingLines()
    for order in range(4):
        lines.add(made(order, "a", length=30))
    for order in range(4, 12):
        lines.add(made(order, "b", length=10))
    assert admit_all(lines) == [0, 4, 5, 6, 1, 7, 8, 9, 2, 10, 11, 3]


def test_served_ids_count_as_well():
    lines = WaitingLines()
    lines.add(made(0, "a"))
    lines.add(made(1, "b"))
    lines.add(made(2, "a"))
    lines.add(made(3, "b"))
    lines.charge("a", 100)
    assert admit_all(lines) == [1, 3, 0, 2]


def test_a_pause_saves_nothing_up():
    lines = WaitingLines()
    lines.add(made(0, "busy"))
    lines.add(made(1, "late"))
    assert admit_all(lines) == [0, 1]
    for order in range(2, 50):
        lines.add(made(order, "busy"))
        assert admit_all(lines) == [order]
    for order in range(50, 54):
        lines.add(made(order, "busy"))
    for order in range(54, 58):
        lines.add(made(order, "late"))
    # without the level, all of the late tenant's would come first
    assert admit_all(lines) in ([54, 50, 55, 51, 56, 52, 57, 53], [54, 55, 50, 56, 51, 57, 52, 53])


def test_a_new_tenant_cannot_starve_an_old_one():
    lines = WaitingLines()
    lines.add(made(0, "old", length=100_000))
    admit_all(lines)
    lines.add(made(1, "old"))
    lines.add(made(2, "older", length=100_000))
    assert admit_all(lines) == [2, 1]
    for order in range(3, 23):
        lines.add(made(order, "new"))
    lines.add(made(23, "old"))
    assert admit_all(lines).index(23) <= 2


def test_in_turn_looks_past_those_that_do_not_fit_but_not_for_ever():
    lines = WaitingLines()
    for order in range(30):
        lines.add(made(order, "a"))
    for order in range(30, 33):
        lines.add(made(order, "b"))
    assert [s.order for s in lines.in_turn()] == [*range(LOOK_AHEAD), 30, 31, 32]
    seen = []
    for sequence in lines.in_turn():
        seen.append(sequence.order)
        if sequence.order % 2:
            lines.admit(sequence, 10)
    assert seen[:6] == [0, 1, 30, 31, 2, 3]


def test_parked_followers_are_in_line_only_when_opened():
    lines = WaitingLines()
    leader, *followers = (made(order) for order in range(3))
    lines.add(leader)
    for follower in followers:
        lines.park(follower, leader)
    lines.add(made(3))
    assert (len(lines), lines.num_tokens) == (4, 40)
    assert [s.order for s in lines.in_turn()] == [0, 3]
    assert sorted(s.order for s in lines) == [0, 1, 2, 3]
    lines.admit(leader, 10)
    assert lines.leads(leader)
    lines.open(leader)
    lines.open(leader)
    assert [s.order for s in lines.in_turn()] == [1, 2, 3]
    assert sorted(s.order for s in lines) == [1, 2, 3]
    lines.admit(followers[0], 10)
    lines.remove(followers[1])
    assert not lines.leads(leader)
    assert (len(lines), lines.num_tokens) == (1, 10)


def test_regroup_without_an_heir_lets_the_oldest_lead():
    lines = WaitingLines()
    leader, first, second, third = (made(order) for order in range(4))
    lines.add(leader)
    for follower in (first, second, third):
        lines.park(follower, leader)
    lines.admit(leader, 10)
    lines.open(leader)
    lines.regroup(leader)
    assert [s.order for s in lines.in_turn()] == [1]
    assert (first.leader, second.leader, third.leader) == (None, first, first)
    assert lines.leads(first)
    lines.remove(first)
    lines.regroup(first)
    assert (second.leader, third.leader) == (None, second)
    lines.remove(third)
    assert not lines.leads(second)
    lines.regroup(second)
    assert [s.order for s in lines.in_turn()] == [2]


def test_regroup_with_an_heir_keeps_everybody_in_line():
    lines = WaitingLines()
    leader, heir, waiting = (made(order) for order in range(3))
    lines.add(leader)
    lines.park(heir, leader)
    lines.park(waiting, leader)
    lines.admit(leader, 10)
    lines.open(leader)
    lines.admit(heir, 10)
    lines.regroup(leader, heir)
    assert waiting.leader is heir
    assert [s.order for s in lines.in_turn()] == [2]
    assert lines.leads(heir)
