"""The loop over the arithmetic model: exact ids whatever else happens in the batch."""

from dataclasses import replace

import numpy as np
import pytest

from appliance.engine import IDLE_S, Arrival, Engine, EngineFailedError, ProgramSet
from planner.buckets import Bucket, Lattice, Phase
from planner.pages import PagePool
from planner.schedule import Scheduler, SchedulerSettings
from planner.sequence import FinishReason
from tests.support.arithmetic_model import VOCAB, ArithmeticModel, continuation, next_id
from tests.support.engine_rig import LATTICE, EngineRig, ListGateway


def prompt(length: int, salt: int = 0) -> list[int]:
    return [(7 * i + 13 * salt + i * i) % VOCAB for i in range(length)]


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
    rig = EngineRig(num_pages=3)
    ends = continuation(prompt(14), rig_sampling(rig, 14))
    (first,) = rig.submit(prompt(14), 30, stop_ids=frozenset({ends[1]}))  # its wasted row starts a new page
    (second,) = rig.submit(prompt(30, 3), 12)
    rig.settle()
    assert rig.gateway.finishes[first].reason is FinishReason.STOP
    rig.assert_exact(first, second)


def rig_sampling(rig: EngineRig, length: int):
    other = EngineRig()
    other.submit(prompt(length), 30)
    return other.requests[0].sampling


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


def test_followers_that_find_nobody_compute_for_themselves():
    lattice = Lattice(decode_slots=(1,), prefill_chunks=(64,), prefill_slots=1, widths=(8,))
    rig = EngineRig(lattice=lattice)
    keys = rig.submit(prompt(40), 4, n=3)
    rig.settle()
    rig.assert_exact()
    assert [rig.gateway.finishes[key].cached_tokens for key in keys] == [0, 0, 0]


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


# ---------------------------------------------------------------------- cancel, deadline, drain, failure


@pytest.mark.parametrize("steps", range(8))
def test_cancel_at_any_time_is_idempotent_and_frees_at_the_next_step(steps: int):
    rig = EngineRig()
    (key,) = rig.submit(prompt(70), 40)
    rig.step(steps)
    rig.cancel(key, key)
    rig.cancel(key)
    rig.step()
    assert rig.gateway.finishes[key].reason is FinishReason.CANCELLED
    assert rig.scheduler.pool.num_free == 64
    rig.cancel(key, 999)
    rig.settle()
    assert rig.gateway.ids[key] == rig.expected(key)[: len(rig.gateway.ids[key])]


def test_cancel_in_the_queue():
    rig = EngineRig()
    keys = [rig.submit(prompt(20, salt), 10)[0] for salt in range(6)]
    rig.step()
    rig.cancel(keys[5])
    rig.step()
    finish = rig.gateway.finishes[keys[5]]
    assert (finish.reason, finish.prefill_s, finish.decode_s) == (FinishReason.CANCELLED, 0.0, 0.0)
    rig.settle()
    rig.assert_exact(*keys[:5])


def test_a_key_can_be_used_again_after_its_finish():
    rig = EngineRig()
    (key,) = rig.submit([4, 4], 30)
    rig.step(4)
    rig.cancel(key)
    rig.step()
    told = rig.gateway.finishes.pop(key), rig.gateway.ids.pop(key)
    assert told[0].reason is FinishReason.CANCELLED
    rig.requests.clear()
    (again,) = rig.submit([6, 6], 5)  # while the last row of its predecessor is in flight
    assert again == key
    rig.settle()
    rig.assert_exact(key)


def test_a_live_key_is_refused():
    rig = EngineRig()
    (key,) = rig.submit([4, 4], 30)
    rig.step(2)
    first = rig.requests[key]
    rig.gateway.inbox.append(Arrival((replace(first, ids=[5], prompt_len=1, pages=[]),)))
    rig.step()
    assert rig.gateway.refusals.pop(key)[0] == "stale"
    rig.settle()
    rig.assert_exact(key)


@pytest.mark.parametrize("steps", [0, 1, 3, 6])
def test_deadline_ends_a_sequence_wherever_it_is(steps: int):
    rig = EngineRig()
    (key,) = rig.submit(prompt(70), 40, deadline_s=rig.clock.now_s + 0.01 * steps)
    (other,) = rig.submit(prompt(9, 1), 20)
    rig.settle()
    finish = rig.gateway.finishes[key]
    assert finish.reason is FinishReason.ERROR
    assert finish.error.startswith("deadline of 0.")
    assert "of 40 new ids" in finish.error
    assert rig.gateway.ids.get(key, []) == rig.expected(key)[: len(rig.gateway.ids.get(key, []))]
    rig.assert_exact(other)


def test_deadline_of_a_waiting_sequence():
    rig = EngineRig()
    running = [rig.submit(prompt(5, salt), 30)[0] for salt in range(4)]
    (key,) = rig.submit(prompt(5), 5, deadline_s=rig.clock.now_s + 0.05)
    rig.settle()
    assert rig.gateway.finishes[key].queue_s == pytest.approx(0.05)
    assert rig.gateway.finishes[key].reason is FinishReason.ERROR
    rig.assert_exact(*running)


def test_drain_refuses_finishes_and_then_errors_the_rest():
    rig = EngineRig()
    (short,) = rig.submit([1, 2], 4)
    (long,) = rig.submit([3, 4], 100)
    rig.step(2)
    rig.engine.drain(rig.clock.now_s + 0.2)
    (late,) = rig.submit([5], 4)
    rig.step()
    assert rig.gateway.refusals[late][0] == "draining"
    assert rig.gateway.reports[-1].state == "draining"
    assert not rig.engine.drained
    rig.settle()
    assert rig.engine.drained
    rig.assert_exact(short)
    finish = rig.gateway.finishes[long]
    assert finish.reason is FinishReason.ERROR
    assert "shut down" in finish.error
    assert rig.gateway.ids[long] == rig.expected(long)[: len(rig.gateway.ids[long])]


def test_drain_lets_those_in_the_queue_finish_too():
    rig = EngineRig()
    keys = [rig.submit(prompt(9, salt), 6)[0] for salt in range(9)]
    rig.step()
    rig.engine.drain(rig.clock.now_s + 60)
    rig.settle()
    rig.assert_exact(*keys)


def test_run_ends_when_drained_and_waits_only_when_idle():
    rig = EngineRig()
    rig.submit([1, 2], 3)
    rig.engine.drain(rig.clock.now_s + 60)  # refused: it is drained at once
    rig.engine.run()
    assert rig.gateway.waits == []
    rig = EngineRig()
    turns = iter(range(20))
    rig.submit([1, 2], 3)
    rig.engine.run(lambda: next(turns) == 12)
    assert rig.gateway.waits[0] == IDLE_S  # nothing known yet
    assert rig.gateway.waits[1:5] == [0.0, 0.0, 0.0, IDLE_S]
    rig.assert_exact()


def test_stopping_tells_everybody():
    rig = EngineRig()
    (key,) = rig.submit([1, 2], 300)
    turns = iter(range(20))
    rig.engine.run(lambda: next(turns) == 5)
    assert rig.gateway.finishes[key].reason is FinishReason.ERROR
    assert "stopped" in rig.gateway.finishes[key].error
    rig.assert_empty()


def test_a_failing_program_ends_everybody_with_its_cause():
    rig = EngineRig()
    keys = [rig.submit(prompt(9, salt), 20)[0] for salt in range(7)]
    rig.step(3)
    rig.model.fault = MemoryError("out of device memory")
    with pytest.raises(EngineFailedError, match="MemoryError: out of device memory") as caught:
        rig.step()
    assert isinstance(caught.value.__cause__, MemoryError)
    for key in keys:
        finish = rig.gateway.finishes[key]
        assert finish.reason is FinishReason.ERROR
        assert "MemoryError: out of device memory" in finish.error
    assert rig.gateway.reports[-1].state == "lost"
    rig.assert_empty()
    with pytest.raises(EngineFailedError, match="out of device memory"):
        rig.engine.step()


def test_a_missing_program_is_refused_by_name():
    model = ArithmeticModel(LATTICE, 8, 16)
    programs = model.programs()
    gone = Bucket(Phase.DECODE, 4, 1, 2)
    fewer = ProgramSet({b: p for b, p in programs.decode.items() if b != gone}, programs.prefill, programs.set_slot)
    scheduler = Scheduler(LATTICE, PagePool(8, 16), SchedulerSettings(prefill_budget=32))
    with pytest.raises(ValueError, match="decode-s4-c1-w2"):
        Engine("weights", model.state(), fewer, scheduler, ListGateway(), vocab=VOCAB)


# ---------------------------------------------------------------------- load, limits, figures


def test_overload_is_refused_with_a_time_to_come_back():
    rig = EngineRig(max_waiting=3)
    keys = [rig.submit(prompt(30, salt), 12)[0] for salt in range(9)]
    rig.step()
    refused = sorted(rig.gateway.refusals)
    assert refused == keys[3:]
    assert {rig.gateway.refusals[key][0] for key in refused} == {"overloaded"}
    assert all(1.0 <= rig.gateway.refusals[key][2] <= 60.0 for key in refused)
    assert "3 may" in rig.gateway.refusals[refused[0]][1]
    rig.settle()
    rig.assert_exact(*keys[:3])
    rig.submit([1], 2)
    rig.settle()
    rig.assert_exact(9)


def test_refusals_leave_no_trace():
    rig = EngineRig(num_pages=8, max_waiting_tokens=100)
    streams = [rig.submit(prompt(10, salt), 40)[0] for salt in range(3)]
    rig.step(3)
    for _ in range(20):
        rig.submit(prompt(129), 4)
        rig.submit(prompt(1290), 4)
        rig.step()
    assert len(rig.gateway.refusals) == 40
    assert (rig.scheduler.num_running, rig.scheduler.num_waiting) == (3, 0)
    (last,) = rig.submit(prompt(6), 4)
    rig.settle()
    rig.assert_exact(*streams, last)


def test_metrics_count_every_prompt_and_new_id_once():
    rig = EngineRig()
    for salt in range(6):
        rig.submit(prompt(21 + salt, salt), 7)
    rig.settle()
    assert rig.tally.prompt_tokens == sum(21 + salt for salt in range(6))
    assert rig.tally.generated_tokens == 42
    for bucket, rows, tokens in rig.tally.launches:
        assert 0 < rows <= bucket.slots
        assert bucket.phase is Phase.DECODE or tokens <= bucket.chunk
    assert [bucket for bucket, _, _ in rig.tally.launches] == rig.model.buckets


def test_decode_rows_bound_the_prefill_of_the_same_step():
    rig = EngineRig(prefill_budget=20)
    rig.submit([1, 2], 60)
    rig.step(3)
    rig.submit(prompt(90), 2)
    rig.settle()
    mixed = [tokens for bucket, _, tokens in rig.tally.launches[2:] if bucket.phase is Phase.PREFILL]
    assert mixed == [16, 16, 16, 16, 16, 10]
    rig.assert_exact()


def test_narrow_buckets_serve_short_contexts():
    rig = EngineRig()
    rig.submit(prompt(100), 2)
    rig.settle()
    assert [(b.phase, b.chunk, b.width) for b in rig.model.buckets] == [
        (Phase.PREFILL, 32, 2),
        (Phase.PREFILL, 32, 4),
        (Phase.PREFILL, 32, 8),
        (Phase.PREFILL, 16, 8),
        (Phase.DECODE, 1, 8),
    ]


def test_timings_add_up():
    rig = EngineRig()
    (key,) = rig.submit(prompt(40), 4)
    arrival = rig.clock.now_s
    rig.step(2)
    rig.settle()
    finish = rig.gateway.finishes[key]
    assert finish.queue_s == 0.0
    assert finish.prefill_s == pytest.approx(0.02)  # two chunks, read one step later
    assert finish.queue_s + finish.prefill_s + finish.decode_s <= rig.clock.now_s - arrival
    assert finish.decode_s == pytest.approx(0.03)


def test_reports_follow_the_state():
    rig = EngineRig(num_pages=10)
    rig.submit(prompt(33), 3)
    rig.step()
    report = rig.gateway.reports[-1]
    assert (report.state, report.reason, report.running, report.waiting) == ("ready", "", 1, 0)
    assert (report.free_pages, report.total_pages, report.last_step_s) == (7, 10, 100.0)


def test_many_random_requests_leave_nothing_behind():
    random = np.random.default_rng(7)
    rig = EngineRig(num_pages=10, max_waiting=40)
    cancelled: set[int] = set()
    for _ in range(250):
        length, n = int(random.integers(1, 60)), int(random.choice([1, 1, 1, 2, 3]))
        keys = rig.submit(
            random.integers(0, VOCAB, length).tolist(),
            int(random.integers(1, 90)),
            n=n,
            tenant=str(random.integers(3)),
            seed=int(random.integers(1 << 30)),
            stop_ids=frozenset(random.integers(0, VOCAB, 1).tolist()),
            min_tokens=int(random.integers(0, 2)),
            frequency_penalty=float(random.choice([0.0, 0.5])),
        )
        if random.random() < 0.1:
            rig.step(int(random.integers(0, 6)))
            rig.cancel(*keys)
            cancelled |= set(keys)
        rig.step(int(random.integers(0, 25)))
    rig.settle()
    assert rig.tally.preemptions > 20
    done = [key for key, finish in rig.gateway.finishes.items() if finish.reason is not FinishReason.CANCELLED]
    assert len(done) > 200
    rig.assert_exact(*done)
    for key in set(rig.gateway.finishes) - set(done):
        assert key in cancelled
        assert rig.gateway.ids[key] == rig.expected(key)[: len(rig.gateway.ids[key])]
