"""The engine half of the gateway against workers that die, lie, lag or come late."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from appliance.gateway_engine import EngineGateway, GatewayError
from appliance.host import wire
from appliance.host.channel import connect
from appliance.host.segments import SegmentFile
from tests.support.engine_loop import EngineLoop
from tests.support.gateway_pair import STRIDE

WORKER = """
import asyncio, os, sys
from pathlib import Path
from api.ports import GenerationRequest, SamplingParams
from appliance.gateway_worker import LinkSettings, WorkerGateway
from appliance.host.segments import SegmentFile, SegmentRange

async def main():
    segments = SegmentFile.attach(Path(sys.argv[2]), 4, 528384)
    link = LinkSettings(worker=1, pid=os.getpid(), socket=Path(sys.argv[1]), owned=SegmentRange(2, 2))
    gateway = WorkerGateway(link, segments)
    gateway.start()
    while gateway.status().state != "ready":
        await asyncio.sleep(0.005)
    params = SamplingParams(max_tokens=5)
    request = GenerationRequest(request_id="r", model="m", tenant="t", prompt_ids=[1], sampling=params, num_choices=2)
    await gateway.submit(request)
    print("submitted", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_killed_worker_frees_its_sequences_and_its_successor_waits_for_that(tmp_path: Path) -> None:
    path = tmp_path / "engine.sock"
    with SegmentFile.create("kill", 4, STRIDE, tmp_path) as segments:
        engine = EngineLoop(path, segments)
        arguments = [sys.executable, "-c", WORKER, str(path), str(segments.path)]
        with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
            while len(engine.sequences) < 2:
                engine.turn()
            assert process.stdout is not None
            assert process.stdout.readline() == "submitted\n"
            assert set(engine.sequences) == {2, 3}
            held = dict(engine.sequences)
            process.kill()
            process.wait()
        messages = engine.gateway.receive(0.1) or engine.gateway.receive(0.1)
        assert [message.keys for message in messages] == [(2, 3)]
        successor = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        successor.settimeout(2.0)
        successor.connect(str(path))
        successor.send(wire.encode(wire.Attach(1, os.getpid(), 2, 2)))
        engine.turn()
        engine.turn()
        successor.settimeout(0)
        seen = _messages(successor)
        assert not any(isinstance(message, wire.Welcome) for message in seen)
        engine.emit(2, (40,))
        assert segments.completion_len(2) == 0
        for key in (2, 3):
            engine.sequences[key] = held[key]
            engine.emit(key, (), finish="cancelled")
        assert any(isinstance(message, wire.Welcome) for message in _messages(successor))
        assert engine.gateway.live_keys == frozenset()
        successor.close()
        engine.gateway.close(flush_s=0.0)


def _messages(peer: socket.socket) -> list[object]:
    messages: list[object] = []
    while True:
        try:
            packet = peer.recv(wire.MAX_PACKET_BYTES)
        except BlockingIOError:
            return messages
        if not packet:
            return [*messages, None]
        messages.append(wire.decode_to_worker(packet))


def _attached(engine: EngineLoop, path: Path, first: int = 0, count: int = 2) -> socket.socket:
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    peer.connect(str(path))
    peer.settimeout(0)
    peer.send(wire.encode(wire.Attach(0, os.getpid(), first, count)))
    for _ in range(3):
        engine.turn()
    return peer


def _submit(*segments: int, epoch: int = 1) -> bytes:
    return wire.encode(wire.Submit(segments, epoch, 1, "r", "t", _sampling(9), 0, 0, ""))


def _sampling(max_tokens: int, top_logprobs: int = -1) -> wire.WireSampling:
    return wire.WireSampling(
        max_tokens, 0.0, 0, 1.0, 0.0, 1.0, 0.0, 0.0, (), 1, 0, ignore_eos=False, stop_token_ids=(),
        top_logprobs=top_logprobs,
    )  # fmt: skip


def _bad_packets() -> dict[str, bytes]:
    return {
        "garbage": b"\xff\xffgarbage",
        "foreign segment": _submit(3),
        "no segment": _submit(),
        "twice the same": _submit(1, 1),
        "second attach": wire.encode(wire.Attach(0, 1, 0, 2)),
    }


@pytest.mark.parametrize("case", _bad_packets())
def test_a_worker_that_breaks_the_protocol_is_cut_off_and_the_engine_goes_on(tmp_path: Path, case: str) -> None:
    path = tmp_path / "engine.sock"
    with SegmentFile.create("bad", 4, STRIDE, tmp_path) as segments:
        segments.write_prompt(3, [1], 0, 0)
        segments.write_prompt(1, [1], 0, 0)
        engine = EngineLoop(path, segments)
        peer = _attached(engine, path)
        assert isinstance(_messages(peer)[0], wire.Welcome)
        peer.send(_bad_packets()[case])
        engine.turn()
        assert _messages(peer)[-1] is None
        assert engine.gateway.live_keys == frozenset()
        fresh = _attached(engine, path)
        assert isinstance(_messages(fresh)[0], wire.Welcome)
        peer.close()
        fresh.close()
        engine.gateway.close(flush_s=0.0)


@pytest.mark.parametrize(("first", "count"), [(-1, 2), (0, 0), (3, 2), (0, 5)])
def test_attach_outside_the_file_is_cut_off(tmp_path: Path, first: int, count: int) -> None:
    path = tmp_path / "engine.sock"
    with SegmentFile.create("range", 4, STRIDE, tmp_path) as segments:
        engine = EngineLoop(path, segments)
        peer = _attached(engine, path, first, count)
        assert _messages(peer) == [None]
        peer.close()
        engine.gateway.close(flush_s=0.0)


def test_a_stale_epoch_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "engine.sock"
    with SegmentFile.create("stale", 4, STRIDE, tmp_path) as segments:
        segments.write_prompt(0, [1], 0, 0)
        engine = EngineLoop(path, segments, epoch=7)
        peer = _attached(engine, path)
        _messages(peer)
        peer.send(_submit(0, epoch=6))
        engine.turn()
        assert _messages(peer) == [wire.Refused(0, "stale", "epoch 6 is over, now is 7", 0.0)]
        peer.close()
        engine.gateway.close(flush_s=0.0)


def test_a_worker_that_does_not_read_never_blocks_the_engine(tmp_path: Path) -> None:
    path = tmp_path / "engine.sock"
    with SegmentFile.create("slow", 4, STRIDE, tmp_path) as segments:
        segments.write_prompt(0, [1], 0, 0)
        segments.write_prompt(1, [1], 0, 0)
        engine = EngineLoop(path, segments)
        peer = _attached(engine, path)
        peer.send(_submit(0))
        peer.send(_submit(1))
        engine.turn()
        for step in range(3000):
            engine.emit(0, (step % 1000,))
            engine.emit(1, (step % 1000,))
        engine.emit(0, (), finish="length")
        packets = 0
        ends: list[object] = []
        lengths: list[int] = []
        while not ends:
            seen = _messages(peer)
            packets += len(seen)
            ends += [message for message in seen if isinstance(message, wire.Finish)]
            lengths += [
                i.completion_len for m in seen if isinstance(m, wire.Advance) for i in m.items if i.segment == 0
            ]
            engine.turn()
        assert ends[0].completion_len == 3000
        assert lengths == sorted(lengths)
        assert packets < 3000
        assert segments.completion_len(1) == 3000
        peer.close()
        engine.gateway.close(flush_s=0.0)


def test_unread_logprobs_are_bounded(tmp_path: Path) -> None:
    path = tmp_path / "engine.sock"
    with SegmentFile.create("bound", 4, STRIDE, tmp_path) as segments:
        segments.write_prompt(0, [1], 0, 0)
        engine = EngineLoop(path, segments)
        peer = _attached(engine, path)
        peer.send(wire.encode(wire.Submit((0,), 1, 1, "r", "t", _sampling(4000, 20), 0, 0, "")))
        engine.turn()
        record = tuple((n, -1.0) for n in range(21))
        block = (tuple([5] * 1000), tuple([record] * 1000))
        for _ in range(60):
            if 0 not in engine.sequences:
                break
            engine.emit(0, *block)
            engine.turn()
        assert engine.cancelled == [0]
        peer.close()
        engine.gateway.close(flush_s=0.0)


def test_a_run_directory_may_be_deeper_than_a_socket_address_is_long(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 120) / ("y" * 120)
    folder.mkdir(parents=True)
    with SegmentFile.create("long", 1, STRIDE, tmp_path) as segments:
        gateway = EngineGateway(folder / "engine.sock", segments, 1)
        connect(folder / "engine.sock").close()
        gateway.close()
        assert list(folder.iterdir()) == []


def test_a_socket_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    with (
        SegmentFile.create("none", 1, STRIDE, tmp_path) as segments,
        pytest.raises(GatewayError, match=r"engine socket .*/none/engine.sock: No such file.*choose another paths.run"),
    ):
        EngineGateway(tmp_path / "none" / "engine.sock", segments, 1)


def test_the_socket_is_private(tmp_path: Path) -> None:
    with SegmentFile.create("mode", 1, STRIDE, tmp_path) as segments:
        engine = EngineLoop(tmp_path / "engine.sock", segments)
        assert (tmp_path / "engine.sock").stat().st_mode & 0o777 == 0o600
        engine.gateway.close()
        assert not (tmp_path / "engine.sock").exists()
