"""Both halves of the gateway over a real socket: ids, logprobs, refusals, cancels, lost engines, dead workers."""

import asyncio
from pathlib import Path

import pytest

from api.errors import BadRequestError, ContextLengthError, NotReadyError, OverloadedError
from api.ports import Finished, TokenLogprob, Tokens
from appliance.assignment import write_cause
from appliance.gateway_engine import EngineGateway
from appliance.gateway_worker import lost_after_s
from appliance.host.segments import SegmentFile
from tests.support.engine_loop import EngineLoop
from tests.support.gateway_pair import STRIDE, Clock, pair, request, rest, run

ENGINE = {"queue_s": 0.1, "prefill_s": 0.2, "decode_s": 0.3}
"""What the engine of these tests says of every sequence that it ends."""


def test_tokens_pass_through_the_segment_and_it_is_free_again(tmp_path: Path) -> None:
    async def body() -> None:
        async with pair(tmp_path) as both:
            generation = await both.together(both.worker.submit(request(10, 11, 12)))
            (sequence,) = both.engine.sequences.values()
            assert sequence.ids[:].tolist() == [10, 11, 12]
            assert (sequence.prompt_len, sequence.request_id, sequence.tenant) == (3, "r1", "t")
            assert sequence.sampling.stop_ids == {2}
            assert both.worker.free_segments == 7
            both.engine.emit(sequence.key, (20, 21))
            assert both.segments.read_ids(sequence.key, 0, 5) == [10, 11, 12, 20, 21]
            assert await anext(generation) == Tokens(0, (20, 21))
            both.engine.emit(sequence.key, (22,))
            both.engine.emit(sequence.key, (23,), finish="stop", stop_id=2, cached_tokens=1)
            await both.until(lambda: both.worker.free_segments == 8)
            events = await rest(generation)
            assert [event.ids for event in events[:-1]] == [(22, 23)]
            assert events[-1] == Finished(0, "stop", stop_token_id=2, cached_tokens=1, **ENGINE)
            assert both.worker.outstanding == 0
            assert both.engine.gateway.live_keys == frozenset()

    run(body)


def test_every_sampling_parameter_reaches_the_engine(tmp_path: Path) -> None:
    async def body() -> None:
        async with pair(tmp_path) as both:
            await both.together(
                both.worker.submit(
                    request(
                        1,
                        max_tokens=9,
                        temperature=0.5,
                        top_k=3,
                        top_p=0.25,
                        min_p=0.125,
                        repetition_penalty=1.5,
                        presence_penalty=0.75,
                        frequency_penalty=-0.5,
                        logit_bias=((4, 2.0), (5, -100.0)),
                        seed=-1,
                        min_tokens=2,
                        ignore_eos=True,
                        stop_token_ids=(7, 8),
                        top_logprobs=20,
                    )
                )
            )
            (sequence,) = both.engine.sequences.values()
            sampling = sequence.sampling
            assert sampling.max_tokens == 9
            assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 3, 0.25, 0.125)
            assert (sampling.repetition_penalty, sampling.presence_penalty) == (1.5, 0.75)
            assert sampling.frequency_penalty == -0.5
            assert sampling.logit_bias == ((4, 2.0), (5, -100.0))
            assert sampling.seed == 2**64 - 1
            assert sampling.min_tokens == 2
            assert sampling.stop_ids == {7, 8}
            assert sampling.top_logprobs == 20

    run(body)


def test_choices_have_their_own_seeds(tmp_path: Path) -> None:
    async def body() -> None:
        async with pair(tmp_path) as both:
            generation = await both.together(both.worker.submit(request(1, 2, choices=3)))
            first, second, third = both.engine.sequences.values()
            assert len({s.sampling.seed for s in (first, second, third)}) == 3
            assert first.sampling.seed == 5
            for sequence, token in ((third, 30), (first, 10), (second, 20)):
                both.engine.emit(sequence.key, (token,), finish="length")
            await both.until(lambda: both.worker.free_segments == 8)
            events = await rest(generation)
            tokens = {event.choice: event.ids for event in events if isinstance(event, Tokens)}
            assert tokens == {0: (10,), 1: (20,), 2: (30,)}
            ends = sorted(event.choice for event in events if isinstance(event, Finished))
            assert ends == [0, 1, 2]

    run(body)


def test_a_whole_answer_is_told_once_at_its_end(tmp_path: Path) -> None:
    async def body() -> None:
        async with pair(tmp_path) as both:
            generation = await both.together(both.worker.submit(request(1, 2, choices=2, whole=True)))
            told = await both.together(both.worker.submit(request(3)))
            first, second, other = both.engine.sequences
            for token in (10, 11, 12):
                both.engine.emit(first, (token,))
            both.engine.emit(other, (5,))
            assert await anext(told) == Tokens(0, (5,))  # on the same connection, after what was not told
            assert [choice.take(both.segments) for choice in generation.choices] == [None, None]
            assert generation.unread == 3
            both.engine.emit(first, (13,), finish="length")
            assert await anext(generation) == Tokens(0, (10, 11, 12, 13))
            both.engine.emit(second, (20,))
            generation.cancel(1)
            assert generation.unread == 0
            both.engine.emit(second, (), finish="cancelled")
            assert [type(event) for event in await rest(generation)] == [Finished, Finished]

    run(body)


def test_log_probabilities_of_a_whole_answer_come_on_the_way(tmp_path: Path) -> None:
    async def body() -> None:
        async with pair(tmp_path) as both:
            generation = await both.together(both.worker.submit(request(1, whole=True, top_logprobs=0)))
            (key,) = both.engine.sequences
            both.engine.emit(key, (20,), (((20, -0.5),),))
            assert await anext(generation) == Tokens(0, (20,), (TokenLogprob(20, -0.5),))

    run(body)


def test_without_a_seed_each_request_gets_a_fresh_one(tmp_path: Path) -> None:
    async def body() -> None:
        async with pair(tmp_path) as both:
            for _ in range(2):
                await both.together(both.worker.submit(request(1, seed=None)))
            one, other = (sequence.sampling.seed for sequence in both.engine.sequences.values())
            assert one != other

    run(body)


def test_logprobs_arrive_with_their_ids(tmp_path: Path) -> None:
    async def body() -> None:
        async with pair(tmp_path) as both:
            generation = await both.together(both.worker.submit(request(1, top_logprobs=1)))
            (key,) = both.engine.sequences
            record = ((20, -0.5), (21, -0.25))
            both.engine.emit(key, (20,), (record,))
            assert await anext(generation) == Tokens(0, (20,), (TokenLogprob(20, -0.5, ((21, -0.25),)),))
            both.engine.emit(key, (21, 22), (((21, -1.0), (21, -1.0)), ((22, -2.0), (9, -0.125))), finish="length")
            await both.until(lambda: both.worker.free_segments == 8)
            events = await rest(generation)
            expected = (TokenLogprob(21, -1.0, ((21, -1.0),)), TokenLogprob(22, -2.0, ((9, -0.125),)))
            assert events == [Tokens(0, (21, 22), expected), Finished(0, "length", **ENGINE)]

    run(body)


def test_logprobs_beyond_one_packet_are_split(tmp_path: Path) -> None:
    async def body() -> None:
        async with pair(tmp_path) as both:
            generation = await both.together(both.worker.submit(request(1, top_logprobs=20, max_tokens=3000)))
            (key,) = both.engine.sequences
            ids = tuple(range(3, 903)) * 3
            records = tuple(
                ((token, -float(n)), *(((token + n) % 1000, 0.5) for _ in range(20))) for n, token in enumerate(ids)
            )
            both.engine.emit(key, ids, records, finish="length")
            await both.until(lambda: both.worker.free_segments == 8)
            events = await rest(generation)
            tokens = [event for event in events if isinstance(event, Tokens)]
            assert tuple(token for event in tokens for token in event.ids) == ids
            logprobs = [record for event in tokens for record in event.logprobs]
            assert [record.logprob for record in logprobs] == [-float(n) for n in range(len(ids))]
            assert logprobs[100].top == ((203, 0.5),) * 20

    run(body)


def test_a_slow_reader_gets_everything_in_bounded_pieces(tmp_path: Path) -> None:
    async def body() -> None:
        async with pair(tmp_path) as both:
            generation = await both.together(both.worker.submit(request(1, max_tokens=3000)))
            (key,) = both.engine.sequences
            for start in range(0, 1200, 100):
                both.engine.emit(key, tuple((start + n) % 1000 for n in range(100)))
                both.engine.turn()
            both.engine.emit(key, (), finish="length")
            await both.until(lambda: both.worker.free_segments == 8)
            events = await rest(generation)
            assert [len(event.ids) for event in events[:-1]] == [512, 512, 176]
            assert [token for event in events[:-1] for token in event.ids] == [n % 1000 for n in range(1200)]

    run(body)


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("overloaded", OverloadedError),
        ("draining", NotReadyError),
        ("too_long", ContextLengthError),
        ("stale", NotReadyError),
        ("invalid", BadRequestError),
    ],
)
def test_refusals_are_typed_and_free_their_segments(tmp_path: Path, kind: str, error: type[Exception]) -> None:
    async def body() -> None:
        async with pair(tmp_path) as both:
            both.engine.refuse = (kind, "the reason", 3.5)
            with pytest.raises(error, match="the reason") as caught:
                await both.together(both.worker.submit(request(1, choices=2)))
            if kind == "overloaded":
                assert caught.value.retry_after_s == 3.5
            assert both.worker.free_segments == 8
            assert both.engine.gateway.live_keys == frozenset()
            both.engine.refuse = None
            await both.together(both.worker.submit(request(1)))

    run(body)


@pytest.mark.parametrize(
    ("prompt", "sampling", "error", "match"),
    [
        ((1000,), {}, BadRequestError, "token id 1000 is outside the vocabulary of 1000"),
        ((-1,), {}, BadRequestError, "token id -1 is outside"),
        ((1,), {"max_tokens": 0}, BadRequestError, "max_tokens is 0; it must be at least 1"),
        ((1, 2), {"max_tokens": 4095}, ContextLengthError, "2 prompt ids and max_tokens 4095 pass the context of 4096"),
        ((1,), {"top_logprobs": 21}, BadRequestError, "top_logprobs is 21; at most 20"),
        ((1,), {"min_tokens": 1, "stop_token_ids": tuple(range(10, 18))}, BadRequestError, "9 stop ids; at most 8"),
        ((1,), {"logit_bias": ((1000, 1.0),)}, BadRequestError, "token id 1000"),
        ((1,), {"logit_bias": tuple((n, 1.5) for n in range(20_000))}, BadRequestError, "passes the bound of 163840"),
    ],
)
def test_what_the_model_cannot_do_is_refused_by_name(
    tmp_path: Path, prompt: tuple[int, ...], sampling: dict, error: type[Exception], match: str
) -> None:
    async def body() -> None:
        async with pair(tmp_path) as both:
            with pytest.raises(error, match=match):
                await both.together(both.worker.submit(request(*prompt, **sampling)))
            assert both.worker.free_segments == 8
            assert both.engine.sequences == {}

    run(body)


def test_exhausted_segments_are_overload(tmp_path: Path) -> None:
    async def body() -> None:
        async with pair(tmp_path, count=2) as both:
            await both.together(both.worker.submit(request(1, choices=2)))
            with pytest.raises(OverloadedError, match="1 segments wanted, 0 of 2 free") as caught:
                await both.worker.submit(request(1))
            assert caught.value.retry_after_s == 1.0

    run(body)


def test_cancel_holds_the_segment_until_the_engine_has_finished(tmp_path: Path) -> None:
    async def body() -> None:
        async with pair(tmp_path) as both:
            generation = await both.together(both.worker.submit(request(1, choices=2)))
            first, second = both.engine.sequences
            both.engine.emit(first, (50,))
            generation.cancel(0)
            generation.cancel(0)
            await asyncio.sleep(0.01)
            assert both.worker.free_segments == 6
            await both.until(lambda: both.worker.free_segments == 7)
            assert both.engine.cancelled == [first]
            assert await anext(generation) == Finished(0, "cancelled", **ENGINE)
            both.engine.emit(second, (60,), finish="length")
            await both.until(lambda: both.worker.free_segments == 8)
            assert await rest(generation) == [Tokens(1, (60,)), Finished(1, "length", **ENGINE)]
            generation.cancel()
            await asyncio.sleep(0.01)
            both.engine.turn()
            assert both.engine.cancelled == [first]

    run(body)


def test_a_client_that_leaves_before_admission_cancels(tmp_path: Path) -> None:
    async def body() -> None:
        async with pair(tmp_path) as both:
            task = asyncio.ensure_future(both.worker.submit(request(1)))
            await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert both.worker.free_segments == 7
            await both.until(lambda: both.worker.free_segments == 8)
            assert len(both.engine.cancelled) == 1

    run(body)


def test_starting_then_ready_then_draining(tmp_path: Path) -> None:
    async def body() -> None:
        async with pair(tmp_path, connect=False) as both:
            await asyncio.sleep(0.01)
            assert both.worker.status().state == "starting"
            assert both.worker.status().reason == f"no engine at {both.path.name}: No such file or directory"
            with pytest.raises(NotReadyError, match="the engine is starting"):
                await both.worker.submit(request(1))
            gateway = EngineGateway(both.path, both.segments, 4, both.clock.seconds)
            gateway.announce("restoring weights")
            for _ in range(50):
                await asyncio.sleep(0.001)
                gateway.announce("restoring weights")
            assert both.worker.status().reason == "restoring weights"
            both.clock.ns += 60_000_000_000
            await asyncio.sleep(0.01)
            assert both.worker.status().state == "starting"
            gateway.close(flush_s=0.0)
            both.engine = EngineLoop(both.path, both.segments, epoch=5, clock=both.clock.seconds)
            await both.until(lambda: both.worker.status().state == "ready")
            both.engine.report("draining", "shutting down")
            await both.until(lambda: both.worker.status().state == "draining")
            with pytest.raises(NotReadyError, match="the engine is draining: shutting down"):
                await both.worker.submit(request(1))

    run(body)


def test_the_main_process_says_why_there_is_no_engine(tmp_path: Path) -> None:
    async def body() -> None:
        async with pair(tmp_path) as both:
            write_cause(both.path, "the engine ended and is started again: signal SIGKILL")
            both.engine.gateway.close(flush_s=0.0)
            both.engine = None
            await both.until(lambda: "signal SIGKILL" in both.worker.status().reason)
            assert both.worker.status().state == "lost"
            gateway = EngineGateway(both.path, both.segments, 2, both.clock.seconds)
            for _ in range(50):
                await asyncio.sleep(0.001)
                gateway.announce("restoring weights")
            assert both.worker.status().state == "starting"
            assert both.worker.status().reason == (
                "restoring weights; the engine ended and is started again: signal SIGKILL"
            )
            gateway.close(flush_s=0.0)
            write_cause(both.path, "")
            both.engine = EngineLoop(both.path, both.segments, epoch=2, clock=both.clock.seconds)
            await both.until(lambda: both.worker.status().state == "ready")
            assert both.worker.status().reason == ""

    run(body)


def test_the_engine_gives_a_sign_of_life_while_it_turns(tmp_path: Path) -> None:
    clock, pulses = Clock(), list[float]()
    with SegmentFile.create("pulse", 8, STRIDE, tmp_path) as segments:
        gateway = EngineGateway(
            tmp_path / "engine.sock", segments, 1, clock.seconds, pulse=lambda: pulses.append(clock.seconds())
        )
        gateway.announce("loading is no sign of a turning loop")
        for _ in range(10):
            clock.ns += 100_000_000
            gateway.receive(0.0)
        gateway.close(flush_s=0.0)
    assert pulses == pytest.approx([1.5, 2.0])


def test_status_carries_the_engines_counts(tmp_path: Path) -> None:
    async def body() -> None:
        async with pair(tmp_path) as both:
            both.engine.report(
                "ready", "", running=3, waiting=2, free_pages=4, cached_pages=3, prompt_tokens=8, reused_tokens=2
            )
            both.clock.ns += 1_000_000_000
            await both.until(lambda: both.worker.status().running == 3)
            status = both.worker.status()
            assert (status.waiting, status.free_pages, status.total_pages) == (2, 4, 10)
            assert (status.cached_pages, status.hit_rate) == (3, 0.25)
            assert status.last_step_age_s == 1.0

    run(body)


def test_lost_engine_ends_everything_with_a_typed_error_and_a_new_one_is_welcome(tmp_path: Path) -> None:
    async def body() -> None:
        async with pair(tmp_path) as both:
            generation = await both.together(both.worker.submit(request(1, choices=2)))
            waiting = asyncio.ensure_future(both.worker.submit(request(2)))
            await asyncio.sleep(0.005)
            engine, both.engine = both.engine, None
            engine.gateway.close(flush_s=0.0)
            events = await rest(generation)
            assert [event.reason for event in events] == ["error", "error"]
            assert "engine lost: " in events[0].error
            with pytest.raises(NotReadyError, match="engine lost"):
                await waiting
            assert both.worker.status().state == "lost"
            with pytest.raises(NotReadyError, match="the engine is lost"):
                await both.worker.submit(request(1))
            assert both.worker.free_segments == 5
            both.engine = EngineLoop(both.path, both.segments, epoch=2, clock=both.clock.seconds)
            await both.until(lambda: both.worker.status().state == "ready")
            assert both.worker.free_segments == 8
            await both.together(both.worker.submit(request(3)))

    run(body)


@pytest.mark.parametrize(("step_s", "lost_s"), [(0.0, 10.0), (30.0, 10.0), (60.0, 10.0), (600.0, 100.0)])
def test_where_steps_may_take_long_silence_may_too(step_s: float, lost_s: float) -> None:
    assert lost_after_s(step_s) == lost_s


def test_a_silent_engine_counts_as_lost(tmp_path: Path) -> None:
    async def body() -> None:
        async with pair(tmp_path, lost_after_s=5.0) as both:
            generation = await both.together(both.worker.submit(request(1)))
            both.engine.turn()
            await asyncio.sleep(0.01)
            both.clock.ns += 6_000_000_000
            events = await rest(generation)
            assert events == [
                Finished(
                    0, "error",
                    error="engine lost: no sign of life for 6.0 s, the bound is 5 s; send the request again",
                )
            ]  # fmt: skip
            await both.until(lambda: both.worker.status().state == "ready")
            assert both.worker.free_segments == 8

    run(body)


def test_giving_up_ends_choices_at_once_and_frees_segments_when_the_engine_says_so(tmp_path: Path) -> None:
    async def body() -> None:
        async with pair(tmp_path) as both:
            generation = await both.together(both.worker.submit(request(1)))
            both.worker.drain("shutting down")
            assert both.worker.status().state == "draining"
            both.worker.give_up("too late")
            assert await rest(generation) == [Finished(0, "cancelled", error="too late")]
            assert (both.worker.outstanding, both.worker.free_segments) == (0, 7)
            await both.until(lambda: both.worker.free_segments == 8)

    run(body)


def test_deadlines_are_absolute_on_the_shared_clock(tmp_path: Path) -> None:
    async def body() -> None:
        async with pair(tmp_path, request_timeout_s=30.0) as both:
            await both.together(both.worker.submit(request(1)))
            (sequence,) = both.engine.sequences.values()
            assert sequence.deadline_s == both.clock.seconds() + 30.0

    run(body)
