"""Host time of a step: null programs with the arguments of real ones, a watch that changes nothing, a true client."""

import itertools
from dataclasses import replace

import jax
import numpy as np
import pytest

from appliance.bench import step, step_client, step_programs
from appliance.bench.runner import BenchContext, BenchError
from appliance.bench.step_client import MixClient
from appliance.bench.step_forecast import learned_forecast
from appliance.bench.step_programs import SAMPLED_ID, null_device
from appliance.bench.step_watch import PHASES, Step, Watch, WatchedGateway, WatchedScheduler, watched_programs
from appliance.config import ApplianceConfig
from appliance.engine import Engine
from appliance.engine_ports import NoMetrics
from appliance.host.segments import MIN_STRIDE_BYTES, SegmentFile
from planner.architecture import ModelArchitecture
from planner.buckets import Phase
from planner.formats import KvFormat, WeightForm
from planner.history import CAPACITY
from planner.pages import PagePool
from planner.plan import Plan, make_plan
from planner.program import idle_arguments, lower_program, state_shapes, weight_shapes
from planner.schedule_values import SchedulerSettings
from planner.sequence import Sampling, Sequence
from tests.support.arithmetic_model import VOCAB, ArithmeticModel, continuation
from tests.support.engine_loop import EngineLoop
from tests.support.engine_rig import LATTICE, EngineRig, prompt

TINY = ModelArchitecture(
    family="llama", layers=2, embed=32, ffw=48, q_heads=4, kv_heads=2, head_dim=64, vocab=80, context=256,
    norm_eps=1e-6, rope_theta=10_000.0, query_scale=0.125, tied_embeddings=True,
)  # fmt: skip


def tiny_plan(kv_format: KvFormat = KvFormat.FLOAT32, form: WeightForm = WeightForm.FLOAT32) -> Plan:
    return make_plan(
        TINY, target="cpu_native", weight_form=form, kv_format=kv_format, context=0, slots=2, prefill_chunk=32,
        prefill_slots=2, page_size=128, kv_bytes=0, implementation="xla",
    )  # fmt: skip


# ---------------------------------------------------------------------- null programs


@pytest.mark.parametrize("kv_format", [KvFormat.FLOAT32, KvFormat.INT8, KvFormat.BMQ4])
def test_null_programs_take_what_real_ones_take(kv_format: KvFormat) -> None:
    plan = tiny_plan(kv_format, WeightForm.INT8)
    device = null_device(plan, lambda *_: None)
    wanted = weight_shapes(plan), state_shapes(plan)
    held = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (device.weights, device.state))
    assert jax.tree.structure(held) == jax.tree.structure(wanted)
    assert jax.tree.leaves(held) == jax.tree.leaves(wanted), "nothing is so large that it is shortened"
    assert (device.shortened, device.aliased) == (0, True)
    bucket = next(bucket for bucket in plan.buckets() if bucket.phase is Phase.DECODE)
    assert device.num_arguments == len(jax.tree.leaves(lower_program(plan, bucket).args_info))
    assert device.programs.missing(plan.lattice) == []


def test_null_programs_donate_the_state_and_sample_one_id() -> None:
    plan = tiny_plan()
    device = null_device(plan, lambda *_: None)
    state = device.state
    for bucket in plan.buckets():
        if bucket.phase in (Phase.EMPTY, Phase.READ_PAGES, Phase.WRITE_PAGES):
            continue
        arguments = idle_arguments(plan, bucket)
        before = jax.tree.leaves(state)
        if bucket.phase is Phase.SET_SLOT:
            state = device.programs.set_slot(state, *arguments)
        else:
            programs = device.programs.decode if bucket.phase is Phase.DECODE else device.programs.prefill
            state, out = programs[bucket](device.weights, state, *arguments)
            assert np.asarray(out.ids).tolist() == [SAMPLED_ID] * bucket.slots
            assert np.asarray(out.top_ids).shape == (bucket.slots, 20)
        assert all(leaf.is_deleted() for leaf in before), f"{bucket.name} takes the state"
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(device.weights)), "weights stay"
    program, wrong = next(iter(device.programs.decode.values())), np.zeros((1, 1), np.int32)
    with pytest.raises(TypeError):
        program(device.weights, state, wrong, np.zeros((1, 6), np.float32))


def test_arrays_that_do_not_fit_keep_their_rank(monkeypatch) -> None:
    monkeypatch.setattr(step_programs, "LARGEST_BYTES", 4 * 2 * 2 * 128 * 64)
    plan = tiny_plan()
    device = null_device(plan, lambda *_: None)
    pages = jax.tree.leaves(device.state)[0]
    whole = jax.tree.leaves(state_shapes(plan))[0]
    assert pages.shape == (1, 1, *whole.shape[2:])
    assert device.shortened == 1
    assert device.aliased


def test_null_programs_stand_for_one_device() -> None:
    with pytest.raises(ValueError, match="null programs stand for one device; the plan has 2"):
        null_device(replace(tiny_plan(), devices=2), lambda *_: None)


# ---------------------------------------------------------------------- the watch


class Ticks:
    """A clock that is a second further at every look."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s


def test_a_watched_engine_gives_the_same_ids_and_every_moment_has_a_phase() -> None:
    rig, clock = EngineRig(), Ticks()
    watch = Watch(clock, lambda: 0.0)
    scheduler = WatchedScheduler(LATTICE, PagePool(64, 16), SchedulerSettings(prefill_budget=32))
    scheduler.watch = watch
    model = ArithmeticModel(LATTICE, 64, 16)
    engine = Engine(
        "weights", model.state(), watched_programs(model.programs(), watch), scheduler,
        WatchedGateway(rig.gateway, watch), vocab=VOCAB, metrics=NoMetrics(), clock=rig.clock,
    )  # fmt: skip
    long, short = prompt(40), prompt(9, 1)
    keys = rig.submit(long, 6, top_logprobs=2, repetition_penalty=1.5), rig.submit(short, 5)
    steps: list[Step] = []
    while not steps or not engine.idle:
        began_s = clock.now_s + 1
        watch.begin()
        engine.step()
        steps.append(watch.end())
        assert steps[-1].seconds == clock.now_s - began_s, "no moment is lost or counted twice"
    assert rig.gateway.ids[keys[0][0]] == continuation(long, rig.requests[0].sampling)
    assert rig.gateway.ids[keys[1][0]] == continuation(short, rig.requests[1].sampling)
    assert [found.prefilled for found in steps[:3]] == [True, True, False]
    assert max(found.decoded for found in steps) == 2
    assert all(sum(found.phases[phase] for found in steps) > 0 for phase in PHASES)


def test_a_watch_gives_time_to_the_phase_that_is_named() -> None:
    times = iter([10.0, 10.5, 12.0, 12.25])
    cpu = iter([1.0, 2.5])
    watch = Watch(lambda: next(times), lambda: next(cpu))
    watch.begin()
    watch.give("pack")
    watch.give("dispatch")
    found = watch.end()
    assert {phase: seconds for phase, seconds in found.phases.items() if seconds} == {
        "pack": 0.5, "dispatch": 1.5, "count": 0.25,
    }  # fmt: skip
    assert (found.seconds, found.cpu_s) == (2.25, 1.5)


# ---------------------------------------------------------------------- the client


@pytest.fixture
def loop(tmp_path):
    with SegmentFile.create("step-test", 4, MIN_STRIDE_BYTES, tmp_path) as segments:
        made = EngineLoop(tmp_path / "s", segments)
        yield made, segments, tmp_path / "s"
        made.gateway.close(flush_s=0.0)


def test_the_client_sends_the_next_request_when_one_has_ended(loop) -> None:
    engine, segments, path = loop
    client = MixClient(path, segments, [(3, 2), (5, 1)], 1000, in_flight=2)
    for _ in range(3):
        engine.turn()
        client.turn()
    engine.turn()
    assert [(len(s.ids), s.sampling.max_tokens) for s in engine.sequences.values()] == [(3, 2), (5, 1)]
    first, second = engine.sequences
    assert engine.sequences[first].sampling.top_logprobs == step_client.NUM_LOGPROBS
    assert engine.sequences[second].sampling.penalised
    engine.emit(second, (7,), finish="length")
    client.turn()
    engine.turn()
    assert client.finished == 1
    assert [len(s.ids) for s in engine.sequences.values()] == [3, 3], "the mix begins again"
    client.close()


@pytest.mark.parametrize("kind", ["refused", "short"])
def test_a_request_that_does_not_end_as_it_should_ends_the_bench(loop, kind: str) -> None:
    engine, segments, path = loop
    client = MixClient(path, segments, [(3, 2)], 1000, in_flight=1)
    if kind == "refused":
        engine.refuse = ("overloaded", "too much", 0.0)
    for _ in range(2):
        engine.turn()
        client.turn()
    engine.turn()
    if kind == "short":
        engine.emit(next(iter(engine.sequences)), (7,), finish="length")
    wanted = {"refused": "refused as overloaded: too much", "short": "a request for 2 ids ended with 1 by length"}
    with pytest.raises(BenchError, match=wanted[kind]):
        client.turn()
    client.close()


# ---------------------------------------------------------------------- the bench


def made_step(ms: float, *, prefilled: bool = False) -> Step:
    return Step({**dict.fromkeys(PHASES, 0.0), "pack": ms / 1e3}, ms / 2e3, 60, prefilled)


def test_results_have_the_median_of_all_steps_and_a_target_at_64_slots() -> None:
    timed = [made_step(float(ms)) for ms in range(1, 101)]
    median, tail = step.step_results(timed, 64)
    assert (median.name, median.value, median.repeats, median.target, median.met) == (
        "host_ms_median_64", pytest.approx(50.0), 5, 1.0, False,
    )  # fmt: skip
    assert median.spread == (pytest.approx(10.0), pytest.approx(90.0))
    assert (tail.name, tail.value, tail.target) == ("host_ms_p99_64", pytest.approx(99.0), None)
    assert [result.met for result in step.step_results([made_step(0.5)] * 50, 64)] == [True, None]
    assert [result.target for result in step.step_results(timed, 8)] == [None, None]


def test_notes_say_where_the_time_goes() -> None:
    notes = step.step_notes([made_step(1.0)] * 3 + [made_step(4.0, prefilled=True)])
    assert "pack 1.000 / 4.000" in notes[0]
    assert notes[1:] == (
        "steps that only decode: 75%, median / p99 1.000 / 1.000 ms",
        "steps with a prefill launch: 25%, median / p99 4.000 / 4.000 ms",
        "rows that decode in a step: 60.0 on average",
        "time on a CPU of a step: median / p99 0.500 / 2.000 ms",
    )


def test_a_learned_forecast_knows_as_much_as_it_can_keep(tmp_path) -> None:
    class Told:
        def __init__(self) -> None:
            self.sources: list[str] = []

        def predicted(self, source: str) -> None:
            self.sources.append(source)

        def scored(self, *_: float, use_lstm: bool) -> None:
            assert use_lstm

        def trained(self, outcome: str) -> None:
            raise AssertionError(outcome)

    told = Told()
    forecast = learned_forecast(tmp_path / "s", [(10, 20)], told)
    asked = Sequence(1, "r", "t", [1] * 10, 10, Sampling(max_tokens=50), arrival_s=0.0)
    assert forecast.expect([asked]) == pytest.approx(20.0, rel=1e-6)
    assert told.sources == ["lstm"]
    assert len(forecast._keeper.records) == CAPACITY


def test_the_bench_runs_with_few_slots(monkeypatch) -> None:
    rates = itertools.count(1.0)
    monkeypatch.setattr(step, "decisions_per_s", lambda *_: 1e6 * next(rates))
    seen: list[str] = []
    context = BenchContext(ApplianceConfig(), lambda what, _done, _total: seen.append(what))
    found = step.run(context, slots=4, steps=50)
    assert [(result.name, result.met) for result in found.results] == [
        ("host_ms_median_4", None), ("host_ms_p99_4", None), ("decisions_per_s", True),
    ]  # fmt: skip
    assert found.results[2].value == 3e6
    assert [len(values) for values in found.samples.values()] == [50]
    assert "4 slots, " in found.notes[0]
    assert "of 201 arrays" in found.notes[0]
    assert list(dict.fromkeys(seen)) == ["compiling null programs", "filling slots", "timing steps", "deciding"]
