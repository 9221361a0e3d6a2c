"""The loop over the arithmetic model: exact ids whatever else happens in the batch."""

import pytest

from planner.buckets import Lattice
from planner.prefixes import PrefixSettings
from planner.sequence import FinishReason
from tests.support.arithmetic_model import VOCAB, next_id
from tests.support.engine_rig import EngineRig, prompt


def test_one_sequence_gives_the_ids_of_the_formula():
    rig = EngineRig()
    (key,) = rig.submit([3, 1, 4], 5)
    rig.settle()
    ids = [3, 1, 4]
    for _ in range(5):
        ids.append(next_id(ids, rig.requests[key].sampling, 3))
    assert rig.gateway.ids[key] == ids[3:]
    finish = rig.gateway.finishes[key]
    assert (finish.reason, finish.stop_id, finish.error, finish.prompt_len) == (FinishReason.LENGTH, None, "", 3)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 64, 100])
def test_prompt_lengths_around_pages_and_chunks(length: int):
    rig = EngineRig()
    rig.submit(prompt(length), 20)
    rig.settle()
    rig.assert_exact()


def test_a_step_is_dispatched_before_the_ids_of_the_last_are_read():
    rig = EngineRig()
    rig.submit([1, 2], 4)
    rig.settle()
    assert rig.model.events == [
        ("launch", 0),
        ("launch", 1),
        ("read", 0),
        ("launch", 2),
        ("read", 1),
        ("launch", 3),
        ("read", 2),
        ("read", 3),
    ]


def test_the_host_never_runs_ahead_of_a_long_prompt():
    rig = EngineRig()
    rig.submit(prompt(100), 1)
    rig.settle()
    unread = 0
    for event, _ in rig.model.events:
        unread += 1 if event == "launch" else -1
        assert unread <= 2


def test_neighbours_change_nothing():
    alone = EngineRig()
    alone.submit(prompt(20), 12, seed=42, temperature=0.9)
    alone.settle()
    crowd = EngineRig()
    (key,) = crowd.submit(prompt(20), 12, seed=42, temperature=0.9)
    for salt in range(7):
        crowd.submit(prompt(5 + 9 * salt, salt), 3 + salt, seed=salt, temperature=0.1 * salt)
        crowd.step(salt % 3)
    crowd.settle()
    assert crowd.gateway.ids[key] == alone.gateway.ids[0]
    crowd.assert_exact()


def test_seed_has_64_bits():
    rig = EngineRig()
    seeds = (0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 1 << 32, (1 << 64) - 1)
    for seed in seeds:
        rig.submit([1], 4, seed=seed)
    rig.settle()
    rig.assert_exact()


def test_stop_id_ends_without_being_published_and_wastes_one_row():
    rig = EngineRig()
    rig.submit([9, 9], 30)
    rig.settle()
    third = rig.gateway.ids[0][2]
    launches = rig.model.launches
    (key,) = rig.submit([9, 9], 30, stop_ids=frozenset({third}))
    rig.settle()
    assert rig.gateway.ids[key] == rig.gateway.ids[0][: rig.gateway.ids[0].index(third)]
    finish = rig.gateway.finishes[key]
    assert (finish.reason, finish.stop_id) == (FinishReason.STOP, third)
    # one launch an id, the stop id among them, and the one dispatched before the stop id was read
    assert rig.model.launches - launches == len(rig.gateway.ids[key]) + 2


def test_the_page_of_a_wasted_row_goes_to_somebody_else_unharmed():
    free = EngineRig()
    free.submit(prompt(14), 30)
    free.settle()
    stop = free.gateway.ids[0][2]
    assert stop not in free.gateway.ids[0][:2]
    rig = EngineRig(num_pages=3)
    (first,) = rig.submit(prompt(14), 30, stop_ids=frozenset({stop}))
    (second,) = rig.submit(prompt(30, 3), 12)  # needs the whole pool
    rig.step(3)
    assert len(rig.requests[first].pages) == 1
    rig.step()  # feeds the stop id, not yet read, at position 16: a new page
    assert rig.gateway.finishes[first].reason is FinishReason.STOP
    assert rig.gateway.reports[-2].free_pages == 2
    assert 16 in rig.engine._state.page_positions  # the wasted row has written
    rig.settle()
    rig.assert_exact(first, second)


@pytest.mark.parametrize("min_tokens", [1, 4, 9])
def test_min_tokens_suppresses_stop_ids_until_then(min_tokens: int):
    free = EngineRig()
    free.submit([5, 6], 12)
    free.settle()
    stops = frozenset(free.gateway.ids[0][:8])
    rig = EngineRig()
    (key,) = rig.submit([5, 6], 12, stop_ids=stops, min_tokens=min_tokens)
    rig.settle()
    rig.assert_exact()
    assert len(rig.gateway.ids[key]) >= min_tokens
    assert not stops & set(rig.gateway.ids[key])


def test_ids_may_end_by_stop_at_the_first_id():
    rig = EngineRig()
    (key,) = rig.submit([8], 6, stop_ids=frozenset(range(VOCAB)))
    rig.settle()
    assert rig.gateway.ids[key] == []
    assert rig.gateway.finishes[key].reason is FinishReason.STOP
    assert rig.gateway.finishes[key].stop_id == next_id([8], rig.requests[key].sampling, 1)


def test_penalties_and_bias_follow_the_sequence_into_its_slot():
    rig = EngineRig()
    for salt in range(10):
        rig.submit(
            prompt(3 + salt, salt),
            6 + salt,
            presence_penalty=0.5 if salt % 2 else 0.0,
            logit_bias=((salt, 3.0), (salt + 1, -2.0)) if salt % 3 else (),
        )
    rig.settle()
    rig.assert_exact()


def test_logprobs_chosen_first_then_the_asked_number():
    rig = EngineRig()
    rig.submit([1, 2], 3, top_logprobs=2)
    rig.submit([1, 2], 3, top_logprobs=0)
    rig.submit([1, 2], 3)
    rig.settle()
    ids = rig.gateway.ids[0]
    assert rig.gateway.logprobs[0] == [((i, -i / 8), (i, 0.0), (i + 1, -0.25)) for i in ids]
    assert rig.gateway.logprobs[1] == [((i, -i / 8),) for i in rig.gateway.ids[1]]
    assert rig.gateway.logprobs[2] == []


# ---------------------------------------------------------------------- several choices


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 33, 48, 49])
@pytest.mark.parametrize("n", [2, 3, 4])
def test_choices_share_the_full_prompt_pages_and_differ(length: int, n: int):
    rig = EngineRig()
    keys = rig.submit(prompt(length), 10, n=n, temperature=1.0)
    rig.settle()
    rig.assert_exact()
    shared = (length - 1) // 16 * 16
    cached = [rig.gateway.finishes[key].cached_tokens for key in keys]
    assert cached == [0] + [shared] * (n - 1)
    assert all(count <= length - 1 for count in cached)
    assert rig.tally.prompt_tokens == length + (n - 1) * (length - shared)
    assert len({tuple(rig.gateway.ids[key]) for key in keys}) == n


def test_choices_hold_the_shared_pages_once():
    rig = EngineRig()
    rig.submit(prompt(65), 3, n=4)
    rig.step(3)  # three chunks of the leader
    rig.step(1)
    assert rig.scheduler.num_running == 4
    assert rig.scheduler.pool.num_pages - rig.scheduler.pool.num_free == 4 + 4


def test_choices_compute_the_prompt_each_where_nothing_is_reused():
    rig = EngineRig(prefixes=PrefixSettings(reuse=False))
    keys = rig.submit(prompt(49), 10, n=3, temperature=1.0)
    rig.settle()
    rig.assert_exact()
    assert [rig.gateway.finishes[key].cached_tokens for key in keys] == [0, 0, 0]
    assert rig.tally.prompt_tokens == 3 * 49


def test_leader_of_one_id_still_shares():
    rig = EngineRig()
    keys = rig.submit(prompt(40), 1, n=3)
    rig.settle()
    rig.assert_exact()
    assert [rig.gateway.finishes[key].cached_tokens for key in keys] == [0, 32, 32]


@pytest.mark.parametrize("steps", range(6))
def test_a_cancelled_leader_hands_over(steps: int):
    rig = EngineRig()
    keys = rig.submit(prompt(60), 5, n=3)
    rig.step(steps)
    rig.cancel(keys[0])
    rig.settle()
    rig.assert_exact(*keys[1:])
    assert rig.gateway.finishes[keys[0]].reason is FinishReason.CANCELLED
    assert [rig.gateway.finishes[key].reason for key in keys[1:]] == [FinishReason.LENGTH] * 2


def test_followers_that_find_no_slot_share_with_whoever_still_runs():
    rig = EngineRig()
    keys = rig.submit(prompt(40), 10, n=5)
    rig.step(5)
    assert (rig.scheduler.num_running, rig.scheduler.num_waiting) == (4, 1)
    rig.cancel(keys[0])
    rig.settle()
    rig.assert_exact(*keys[1:])
    assert [rig.gateway.finishes[key].cached_tokens for key in keys] == [0] + [32] * 4


def test_choices_that_run_one_after_the_other_share_what_the_first_left():
    lattice = Lattice(decode_slots=(1,), prefill_chunks=(64,), prefill_slots=1, widths=(8,))
    rig = EngineRig(lattice=lattice)
    keys = rig.submit(prompt(40), 4, n=3)
    rig.settle()
    rig.assert_exact()
    assert [rig.gateway.finishes[key].cached_tokens for key in keys] == [0, 32, 32]


# ---------------------------------------------------------------------- pages run out


def test_preempted_and_resumed_is_uninterrupted():
    rig = EngineRig(num_pages=6)
    for salt in range(8):
        rig.submit(prompt(17 + salt, salt), 50, seed=salt, repetition_penalty=1.1 if salt % 2 else 1.0)
    rig.settle()
    rig.assert_exact()
    assert rig.tally.preemptions == sum(request.preemptions for request in rig.requests.values()) > 0
    assert {finish.prompt_len for finish in rig.gateway.finishes.values()} == set(range(17, 25))


def test_preempted_sequence_ends_by_the_id_in_flight():
    """The newest is preempted while its stop id is in flight: it ends where it waits."""
    free = EngineRig()
    free.submit(prompt(4, 1), 40)
    free.submit(prompt(2, 2), 40)
    free.settle()
    stop = free.gateway.ids[1][13]
    cut = free.gateway.ids[1].index(stop)
    rig = EngineRig(num_pages=2)
    rig.submit(prompt(4, 1), 28)
    (key,) = rig.submit(prompt(2, 2), 40, stop_ids=frozenset({stop}))
    rig.settle()
    assert rig.gateway.ids[key] == free.gateway.ids[1][:cut]
    assert rig.gateway.finishes[key].reason is FinishReason.STOP


def test_two_large_sequences_do_not_push_each_other_out_forever():
    rig = EngineRig(num_pages=8)
    rig.submit(prompt(30, 1), 60)  # 90 ids of 128
    rig.submit(prompt(30, 2), 60)
    rig.submit(prompt(60, 3), 55)  # 115 ids of 128
    rig.settle(most=400)
    rig.assert_exact()
    assert rig.requests[0].preemptions == 0
    assert max(rig.requests[key].preemptions for key in range(3)) <= 2


def test_one_that_can_never_fit_is_refused_with_both_numbers_and_nobody_waits():
    rig = EngineRig(num_pages=3)
    rig.submit(prompt(10), 5)
    (never,) = rig.submit(prompt(48), 5)
    (last,) = rig.submit(prompt(47), 5)
    others = [rig.submit(prompt(4, salt), 4)[0] for salt in range(5)]
    rig.settle()
    kind, message, retry_after_s = rig.gateway.refusals[never]
    assert (kind, retry_after_s) == ("too_long", 0.0)
    assert "48 ids" in message
    assert "48 positions" in message
    assert never not in rig.gateway.finishes
    rig.assert_exact(last, *others)


def test_one_that_outgrows_the_pool_ends_with_length():
    rig = EngineRig(num_pages=3)
    (key,) = rig.submit(prompt(20), 1000)
    (other,) = rig.submit(prompt(5, 1), 4)
    rig.settle()
    assert len(rig.gateway.ids[key]) == 48 - 20
    assert rig.gateway.finishes[key].reason is FinishReason.LENGTH
    rig.assert_exact(key, other)


def test_the_longest_page_table_bounds_a_sequence_as_well():
    rig = EngineRig(num_pages=64)
    (key,) = rig.submit(prompt(20), 1000)
    rig.settle()
    assert 20 + len(rig.gateway.ids[key]) == 8 * 16
    rig.assert_exact()
