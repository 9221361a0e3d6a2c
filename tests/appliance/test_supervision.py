"""The decisions of supervision: pauses between lives, silence, and how long healing counts as health."""

import pytest

from appliance.supervision import (
    CALM_S,
    HEALING_S,
    MAX_TURN_S,
    RETRY_FIRST_S,
    RETRY_MOST_S,
    Backoff,
    Healing,
    Silence,
)


def test_pauses_double_up_to_the_longest() -> None:
    backoff = Backoff()
    assert [backoff.pause_s(0.0) for _ in range(8)] == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0])


@pytest.mark.parametrize(("ready_for_s", "pause_s"), [(CALM_S, RETRY_FIRST_S), (CALM_S - 0.1, 0.4), (0.0, 0.4)])
def test_a_calm_life_forgives(ready_for_s: float, pause_s: float) -> None:
    backoff = Backoff()
    backoff.pause_s(0.0)
    backoff.pause_s(0.0)
    assert backoff.pause_s(ready_for_s) == pytest.approx(pause_s)


def test_after_a_calm_life_pauses_grow_anew() -> None:
    backoff = Backoff()
    for _ in range(10):
        backoff.pause_s(0.0)
    assert [backoff.pause_s(CALM_S), backoff.pause_s(0.0), backoff.pause_s(CALM_S)] == [0.1, 0.2, 0.1]
    assert RETRY_MOST_S == 5.0


def test_silence_adds_up_until_something_is_heard() -> None:
    silence = Silence()
    assert silence.turn(100.0, heard=False) == 0.0
    assert silence.turn(101.0, heard=False) == 1.0
    assert silence.turn(102.5, heard=False) == 2.5
    assert silence.turn(102.6, heard=True) == 0.0
    assert silence.turn(103.6, heard=False) == 1.0


def test_a_listener_that_was_stopped_has_not_heard_silence() -> None:
    silence = Silence()
    silence.turn(0.0, heard=True)
    assert silence.turn(3600.0, heard=False) == MAX_TURN_S


def test_healing_is_health_for_a_while() -> None:
    healing = Healing()
    assert healing.is_well(0.0, serving=True)
    assert healing.is_well(10.0, serving=False)
    assert healing.is_well(10.0 + HEALING_S - 1, serving=False)
    assert not healing.is_well(10.0 + HEALING_S, serving=False)
    assert healing.is_well(20.0 + HEALING_S, serving=True)
    assert healing.is_well(30.0 + HEALING_S, serving=False)
