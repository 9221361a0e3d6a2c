"""The segment is the sequence: a real program reads the prompt where the worker wrote it, and nothing is rewritten."""

import os
import socket
from pathlib import Path

import jax
import numpy as np
import pytest

from appliance.engine import Engine
from appliance.engine_ports import ProgramSet
from appliance.gateway_engine import EngineGateway
from appliance.host import wire
from appliance.host.segments import SEGMENT_TOKENS, SegmentFile
from appliance.submission import ModelLimits
from appliance.wiring import lend_to, program_set
from planner.architecture import ModelArchitecture
from planner.build import compile_all
from planner.formats import KvFormat, WeightForm
from planner.pages import PagePool
from planner.plan import make_plan
from planner.program import empty_state
from planner.schedule import Scheduler
from planner.schedule_values import SchedulerSettings
from planner.weights import weight_specs
from tests.support.engine_rig import EngineRig, prompt

STRIDE = 528_384
VOCAB = 80
PROMPT = [(7 * i + 3) % VOCAB for i in range(40)]


@pytest.fixture(scope="module")
def served():
    architecture = ModelArchitecture(
        family="llama", layers=2, embed=32, ffw=48, q_heads=4, kv_heads=2, head_dim=16, vocab=VOCAB, context=256,
        norm_eps=1e-6, rope_theta=10_000.0, query_scale=0.25, tied_embeddings=True,
    )  # fmt: skip
    plan = make_plan(
        architecture, target="cpu_native", weight_form=WeightForm.FLOAT32, kv_format=KvFormat.FLOAT32, context=0,
        slots=2, prefill_chunk=32, prefill_slots=2, page_size=16, kv_bytes=0, implementation="xla",
    )  # fmt: skip
    rng = np.random.default_rng(0)
    weights = {
        n: rng.standard_normal(s.shape, np.float32) for n, s in weight_specs(architecture, WeightForm.FLOAT32).items()
    }
    return plan, jax.device_put(weights), compile_all(plan, lambda *_: None, 2)


class Node:
    """One worker's end of a socket, and the engine on the other, stepped by hand."""

    def __init__(self, served, folder: Path, segments: SegmentFile, *, lend: bool) -> None:
        plan, weights, programs = served
        self.given: list[object] = []
        self.gateway = EngineGateway(folder / "engine.sock", segments, 1)
        self.gateway.open(ModelLimits(VOCAB, plan.context, frozenset()))
        found = program_set(programs)
        noted = {bucket: self._noting(program) for bucket, program in found.prefill.items()}
        self.engine = Engine(
            weights, empty_state(programs), ProgramSet(found.decode, noted, found.set_slot),
            Scheduler(plan.lattice, PagePool(plan.num_pages, plan.page_size), SchedulerSettings(plan.prefill_budget)),
            self.gateway, vocab=VOCAB, lend=lend_to(plan) if lend else None,
        )  # fmt: skip
        self.peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.peer.connect(str(folder / "engine.sock"))
        self.peer.settimeout(0)
        self.peer.send(wire.encode(wire.Attach(0, os.getpid(), 0, segments.count)))
        self.engine.step()

    def _noting(self, program):
        def call(weights, state, tokens, ints, floats):
            self.given.append(tokens)
            return program(weights, state, tokens, ints, floats)

        return call

    def submit(self, *keys: int) -> None:
        sampling = wire.WireSampling(
            6, 0.0, 0, 1.0, 0.0, 1.0, 0.0, 0.0, (), 1, 0, ignore_eos=True, stop_token_ids=(), top_logprobs=-1
        )
        self.peer.send(wire.encode(wire.Submit(keys, 1, os.getpid(), "r", "t", sampling, 0, 0, "")))

    def finished(self) -> set[int]:
        """Step to the end; the segments that came back."""
        self.engine.step()
        while not self.engine.idle:
            self.engine.step()
        found: set[int] = set()
        while True:
            try:
                message = wire.decode_to_worker(self.peer.recv(wire.MAX_PACKET_BYTES))
            except BlockingIOError:
                return found
            if isinstance(message, wire.Finish):
                assert (message.reason, message.completion_len) == ("length", 6)
                found.add(message.segment)

    def close(self) -> None:
        self.peer.close()
        self.gateway.close(flush_s=0.0)


def address(segments: SegmentFile, segment: int) -> int:
    return np.frombuffer(segments.tokens(segment), np.int32).ctypes.data


def test_a_prefill_of_one_sequence_takes_the_segments_own_memory(served, tmp_path):
    answers = []
    for lend in (True, False):
        with SegmentFile.create(f"lent-{lend}", 2, STRIDE, tmp_path) as segments:
            node = Node(served, tmp_path, segments, lend=lend)
            segments.write_prompt(1, PROMPT, 0, 0)
            node.submit(1)
            assert node.finished() == {1}
            if lend:
                places = [array.unsafe_buffer_pointer() for array in node.given]
                assert places == [address(segments, 1), address(segments, 1) + 4 * 32]
                assert [array.shape for array in node.given] == [(32,), (32,)]
            answers.append(segments.read_ids(1, 0, len(PROMPT) + 6))
            assert segments.completion_len(1) == 6
            node.given.clear()
            node.close()
    assert answers[0] == answers[1]
    assert answers[0][: len(PROMPT)] == PROMPT


def test_prompts_of_several_sequences_are_put_together(served, tmp_path):
    with SegmentFile.create("several", 3, STRIDE, tmp_path) as segments:
        node = Node(served, tmp_path, segments, lend=True)
        for key in (0, 2):
            segments.write_prompt(key, PROMPT[:10], 0, 0)
            node.submit(key)
        assert node.finished() == {0, 2}
        assert isinstance(node.given[0], np.ndarray)
        assert node.given[0][:20].tolist() == 2 * PROMPT[:10]
        one, two = (segments.read_ids(key, 0, 16) for key in (0, 2))
        assert one == two
        node.close()


def test_a_segment_that_ends_before_the_chunk_does_is_copied():
    from planner.ids import IdBuffer

    buffer = IdBuffer(memoryview(bytearray(4 * SEGMENT_TOKENS)).cast("i"), SEGMENT_TOKENS)
    assert buffer.padded(SEGMENT_TOKENS - 16, 16) is not None
    assert buffer.padded(SEGMENT_TOKENS - 16, 32) is None


class TestNothingIsRewrittenTooEarly:
    """A worker may write to a segment again once it is told of the end; every program that reads it has run by then."""

    def reads_and_finishes(self, rig, act):
        """The order of what happens: launches dispatched, launches read, finishes told."""
        events = []
        dispatch, commit, publish = rig.engine._dispatch, rig.engine._commit, rig.gateway.publish

        def dispatched(batch):
            launches = dispatch(batch)
            events.extend(("dispatched", id(launch.out)) for launch in launches)
            return launches

        def committed(launches):
            events.extend(("read", id(launch.out)) for launch in launches)
            return commit(launches)

        def published(emissions):
            events.extend(("finish", e.key) for e in emissions if e.finish is not None)
            publish(emissions)

        rig.engine._dispatch, rig.engine._commit, rig.gateway.publish = dispatched, committed, published
        act()
        return events

    def test_a_cancelled_prompt(self):
        rig = EngineRig()
        (key,) = rig.submit(prompt(70), 4)

        def act():
            rig.step(2)
            rig.cancel(key)
            rig.step(3)

        events = self.reads_and_finishes(rig, act)
        finish = events.index(("finish", key))
        open_launches = {out for kind, out in events[:finish] if kind == "dispatched"}
        assert open_launches == {out for kind, out in events[:finish] if kind == "read"}
        assert open_launches

    def test_the_end_of_the_engine(self):
        rig = EngineRig()
        rig.submit(prompt(70), 4)
        rig.step(1)
        (launch,) = rig.engine._in_flight
        reads, told = [], []
        launch.out.ids._read = lambda: reads.append(len(told))
        publish = rig.gateway.publish
        rig.gateway.publish = lambda emissions: (told.extend(emissions), publish(emissions))
        rig.engine.run(stop=lambda: True)
        assert reads == [0]
        assert told
