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


def test_parked_ones_are_in_line_only_when_called_and_keep_their_place():
    lines = WaitingLines()
    first, second, third, last = (made(order) for order in range(4))
    for sequence in (first, second, third, last):
        lines.add(sequence)
    lines.admit(first, 10)
    lines.park(second)
    lines.park(third)
    assert (len(lines), lines.num_tokens) == (3, 30)
    assert [s.order for s in lines.in_turn()] == [3]
    assert sorted(s.order for s in lines) == [1, 2, 3]
    lines.call([third])
    lines.call([third, first])  # nobody who is not parked
    assert [s.order for s in lines.in_turn()] == [2, 3]
    lines.call([second])
    assert [s.order for s in lines.in_turn()] == [1, 2, 3]


def test_a_parked_one_that_ends_is_called_in_vain():
    lines = WaitingLines()
    sequence = made(0)
    lines.add(sequence)
    lines.park(sequence)
    lines.remove(sequence)
    lines.call([sequence])
    assert (len(lines), lines.num_tokens, list(lines), list(lines.in_turn())) == (0, 0, [], [])


def test_those_who_are_parked_while_looked_at_hide_nobody():
    lines = WaitingLines()
    for order in range(3 * LOOK_AHEAD):
        lines.add(made(order))
    seen = []
    for sequence in lines.in_turn():
        seen.append(sequence.order)
        if sequence.order < 2 * LOOK_AHEAD:
            lines.park(sequence)
    assert seen == list(range(3 * LOOK_AHEAD))
