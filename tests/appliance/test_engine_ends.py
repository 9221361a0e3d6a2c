"""The loop's ways out: cancellation, deadlines, drain, failure and overload; and what it counts."""

from dataclasses import replace

import numpy as np
import pytest

from appliance.engine import IDLE_S, Engine, EngineFailedError
from appliance.engine_ports import Arrival, ProgramSet
from planner.buckets import Bucket, Phase
from planner.pages import PagePool
from planner.schedule import Scheduler
from planner.schedule_values import SchedulerSettings
from planner.sequence import FinishReason
from tests.support.arithmetic_model import VOCAB, ArithmeticModel
from tests.support.engine_rig import LATTICE, EngineRig, ListGateway, prompt

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
