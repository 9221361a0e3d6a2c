"""Children that end, hang or cannot start, in a whole node: what clients see, what heals, and what is left behind."""

import json
import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.node import Node, ask, expected, node, text_of, wait_for
from tests.support.serving_children import HANG

CHAT = {"messages": [{"role": "user", "content": "abc"}]}
ENDPOINTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "abc"},
    "/v1/chat/completions": CHAT,
    "/v1/messages": CHAT,
}
TERMINAL = ("[DONE]", "message_stop", '"finish_reason":"', '"stop_reason":"')
"""What only a finished answer holds."""
RESTARTED = "a child process ended; it is started again"


class Client(threading.Thread):
    """Sends one request and keeps all that comes back, up to the end or the break."""

    def __init__(self, url: str, path: str, max_tokens: int, *, streaming: bool) -> None:
        super().__init__(daemon=True)
        self.path, self.streaming = path, streaming
        self.status, self.text, self.broken = 0, "", False
        self._url = url + path
        self._body = {"model": "arithmetic", "max_tokens": max_tokens, "stream": streaming, **ENDPOINTS[path]}
        self._body |= {"temperature": 0} if path == "/v1/messages" else {"temperature": 0, "seed": 1}
        self.start()

    def run(self) -> None:
        try:
            with httpx.stream("POST", self._url, json=self._body, timeout=30) as reply:
                self.status = reply.status_code
                for piece in reply.iter_text():
                    self.text += piece
        except httpx.TransportError:
            self.broken = True

    @property
    def events(self) -> list[str]:
        return [line[6:] for line in self.text.splitlines() if line.startswith("data: ")]


def running_requests(running: Node) -> float:
    return running.metrics().get("zccp_requests_running", 0)


def test_a_killed_worker_loses_its_own_requests_and_is_replaced(tmp_path: Path) -> None:
    with node(tmp_path, delay_ms=3, server={"workers": 2}) as running:
        running.wait_ready()
        running.wait_healed()
        before, children = running.footprint(), running.children()
        clients = [Client(running.url, "/v1/completions", 250, streaming=True) for _ in range(8)]
        wait_for(lambda: all(len(client.events) > 2 for client in clients))
        os.kill(children["worker-0"], signal.SIGKILL)
        for client in clients:
            client.join(30)
        running.wait_healed(workers=1)
        whole = [client for client in clients if not client.broken]
        assert all(text_of(client.events[:-1]) == expected("abc", 250) for client in whole)
        assert all(client.events[-1] == "[DONE]" for client in whole)
        assert not any("[DONE]" in client.text for client in clients if client.broken)
        served = [line for line in running.events("request") if line["process"] == "worker-1" and line["status"] == 200]
        assert len([line for line in served if line["completion_tokens"] == 250]) == len(whole)
        (ended,) = running.events(RESTARTED)
        assert (ended["child"], ended["ended"], ended["pause_s"]) == ("worker-0", "signal SIGKILL", 0.1)
        after = running.children()
        assert after["worker-0"] != children["worker-0"]
        assert {name: after[name] for name in ("worker-1", "engine")} == {
            name: children[name] for name in ("worker-1", "engine")
        }
        assert [ask(running.url, "next", 9).json()["choices"][0]["text"] for _ in range(8)] == [expected("next", 9)] * 8
        wait_for(lambda: running.metrics()["zccp_segments_used"] == 0)
        assert running.metrics()["zccp_kv_pages_used"] == 0
        assert running.footprint() == before
        assert running.end() == 0


def test_a_killed_engine_is_a_typed_error_everywhere_and_serving_resumes(tmp_path: Path) -> None:
    with node(tmp_path, delay_ms=20, server={"workers": 2}) as running:
        running.wait_ready()
        running.wait_healed()
        before, children = running.footprint(), running.children()
        clients = [
            Client(running.url, path, 900, streaming=streaming) for path in ENDPOINTS for streaming in (True, False)
        ]
        wait_for(lambda: running_requests(running) == 6)
        wait_for(lambda: all(len(client.events) > 3 for client in clients if client.streaming))
        os.kill(children["engine"], signal.SIGKILL)
        wait_for(lambda: running.ready().status_code == 503)
        wait_for(lambda: "the engine ended and is started again: signal SIGKILL" in running.ready().json()["reason"])
        refused = ask(running.url, "meanwhile", 3)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
        for client in clients:
            client.join(10)
            assert not client.is_alive()
            assert not client.broken
            assert not any(mark in client.text for mark in (*TERMINAL, '"finish_reason":"stop"', '"length"')), (
                client.text
            )
            last = json.loads(client.events[-1] if client.streaming else client.text)
            assert "engine lost" in last["error"]["message"]
            assert client.status == (200 if client.streaming else 500)
            if client.path == "/v1/messages":
                assert (last["type"], last["error"]["type"]) == ("error", "api_error")
            else:
                assert last["error"]["code"] == "generation_failed"
        running.wait_healed(engines=1)
        assert running.ready().status_code == 200
        after = running.children()
        assert after["engine"] != children["engine"]
        assert (after["worker-0"], after["worker-1"]) == (children["worker-0"], children["worker-1"])
        assert ask(running.url, "next", 9).json()["choices"][0]["text"] == expected("next", 9)
        wait_for(lambda: running.metrics()["zccp_segments_used"] == 0)
        assert running.footprint() == before
        _break_a_step(running)
        running.wait_healed(engines=2)
        assert ask(running.url, "next", 9).json()["choices"][0]["text"] == expected("next", 9)
        assert running.end() == 0


def _break_a_step(running: Node) -> None:
    """Let a step fail as a device does, under a stream, and look at what the client and the log are told."""
    client = Client(running.url, "/v1/messages", 900, streaming=True)
    wait_for(lambda: len(client.events) > 3)
    os.kill(running.children()["engine"], signal.SIGUSR2)
    client.join(20)
    assert "MemoryError: out of device memory" in json.loads(client.events[-1])["error"]["message"]
    assert "message_stop" not in client.text
    wait_for(lambda: len(running.events(RESTARTED)) == 2)
    assert running.events(RESTARTED)[-1]["ended"] == (
        "exit code 1: a step of the engine failed: MemoryError: out of device memory"
    )


def test_restarts_leave_nothing_behind_and_counters_never_fall(tmp_path: Path) -> None:
    with node(tmp_path) as running:
        running.wait_ready()
        footprints = list[Any]()
        for turn in (1, 2):
            answers = [ask(running.url, f"turn {turn}", 20) for _ in range(2)]
            assert [answer.json()["choices"][0]["text"] for answer in answers] == [expected(f"turn {turn}", 20)] * 2
            found = running.metrics()
            assert found["zccp_generated_tokens_total"] == turn * 40
            assert found["zccp_time_to_first_token_seconds_count"] == turn * 2
            series = set(found)
            for name in ("engine", "worker-0"):
                os.kill(running.children()[name], signal.SIGKILL)
            running.wait_healed(engines=turn, workers=turn)
            footprints.append(running.footprint())
        assert set(running.metrics()) == series
        assert footprints[0] == footprints[1]
        assert running.end() == 0


class Manager(threading.Thread):
    """A service manager: keeps what it is told until it hears of the end."""

    def __init__(self, path: Path) -> None:
        super().__init__(daemon=True)
        self.heard: list[str] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self.start()

    def run(self) -> None:
        with self._socket:
            while not any("STOPPING=1" in message for message in self.heard):
                self.heard.append(self._socket.recv(1000).decode())


def test_an_engine_that_cannot_start_again_is_tried_until_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason, manager = tmp_path / "reason", Manager(tmp_path / "notify")
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    monkeypatch.setenv("WATCHDOG_USEC", "200000")
    with node(tmp_path, engine=("engine-unless", str(reason))) as running:
        running.wait_ready()
        worker = running.children()["worker-0"]
        reason.write_text("the weights are damaged")
        os.kill(running.children()["engine"], signal.SIGKILL)
        said = "the engine ended and is started again: exit code 1: the weights are damaged"
        wait_for(lambda: said in running.ready().json()["reason"])
        wait_for(lambda: len(running.events(RESTARTED)) == 3)
        ended = running.events(RESTARTED)
        assert [line["pause_s"] for line in ended] == [0.1, 0.2, 0.4]
        assert [line["ended"] for line in ended] == ["signal SIGKILL", *["exit code 1: the weights are damaged"] * 2]
        assert running.metrics()["zccp_engine_ready"] == 0
        reason.unlink()
        running.wait_healed(engines=3)
        assert running.ready().status_code == 200
        assert running.children()["worker-0"] == worker
        reason.write_text("the disk is gone")
        os.kill(running.children()["engine"], signal.SIGKILL)
        wait_for(lambda: "the disk is gone" in running.events(RESTARTED)[-1]["ended"])
        assert running.end(within_s=8) == 0
        assert list((tmp_path / "run").iterdir()) == []
    manager.join(10)
    states = [message.partition("STATUS=")[2] for message in manager.heard if "STATUS=" in message]
    serving = states[0]
    assert serving.startswith("serving on port ")
    assert states == [serving, "recovering", serving, "recovering", "draining"]
    recovering = manager.heard.index("STATUS=recovering")
    assert "WATCHDOG=1" in manager.heard[recovering : manager.heard.index(f"STATUS={serving}", recovering)]


def test_a_worker_that_cannot_start_again_is_tried_until_it_can(tmp_path: Path) -> None:
    with node(tmp_path) as running:
        running.wait_ready()
        damaged = tmp_path / "home" / "keys.json"
        damaged.write_text("x")
        os.kill(running.children()["worker-0"], signal.SIGKILL)
        wait_for(lambda: len(running.events(RESTARTED)) == 3)
        last = running.events(RESTARTED)[-1]
        assert last["ended"].startswith(f"exit code 1: keys file {damaged} is damaged")
        damaged.unlink()
        running.wait_healed(workers=3)
        assert ask(running.url, "next", 9).json()["choices"][0]["text"] == expected("next", 9)
        assert running.end() == 0


def test_a_stopped_engine_counts_as_hung_and_is_replaced_and_an_idle_one_does_not(tmp_path: Path) -> None:
    with node(tmp_path, delay_ms=20, step_timeout_s=2.0) as running:
        running.wait_ready()
        children = running.children()
        time.sleep(4)
        assert running.events("the engine is ended") == []
        client = Client(running.url, "/v1/completions", 900, streaming=True)
        wait_for(lambda: len(client.events) > 3)
        os.kill(children["engine"], signal.SIGSTOP)
        client.join(20)
        assert "engine lost" in json.loads(client.events[-1])["error"]["message"]
        running.wait_healed(engines=1)
        (line,) = running.events("the engine is ended")
        assert line["cause"] in [f"no sign of life for {silent} s, engine.step_timeout_s is 2" for silent in (2, 3, 4)]
        (ended,) = running.events(RESTARTED)
        assert ended["ended"] == f"signal SIGKILL: {line['cause']}"
        assert running.children()["worker-0"] == children["worker-0"]
        assert ask(running.url, "next", 9).json()["choices"][0]["text"] == expected("next", 9)
        assert running.end() == 0


def test_a_worker_whose_loop_hangs_is_replaced_and_the_others_go_on(tmp_path: Path) -> None:
    server = {"workers": 2, "worker_timeout_s": 2.0}
    with node(tmp_path, delay_ms=20, server=server) as running:
        running.wait_ready()
        running.wait_healed()
        children = running.children()
        clients = [Client(running.url, "/v1/completions", 250, streaming=True) for _ in range(6)]
        wait_for(lambda: all(len(client.events) > 2 for client in clients))
        with pytest.raises(httpx.TransportError):
            ask(running.url, HANG, 5)
        for client in clients:
            client.join(30)
        assert not any(client.is_alive() for client in clients)
        running.wait_healed(workers=1)
        (line,) = running.events("the worker is ended")
        assert line["cause"] in [
            f"no sign of life for {silent} s, server.worker_timeout_s is 2" for silent in (2, 3, 4)
        ]
        (ended,) = running.events(RESTARTED)
        assert (ended["child"], ended["ended"]) == (line["child"], f"signal SIGKILL: {line['cause']}")
        assert 'serving_children.py", line' in running.log.read_text()
        assert HANG not in running.log.read_text()
        after = running.children()
        assert {name for name in children if after[name] != children[name]} == {line["child"]}
        assert not any("[DONE]" in client.text for client in clients if client.broken)
        assert all(text_of(client.events[:-1]) == expected("abc", 250) for client in clients if not client.broken)
        assert ask(running.url, "next", 9).json()["choices"][0]["text"] == expected("next", 9)
        wait_for(lambda: running.metrics()["zccp_segments_used"] == 0)
        assert running.end() == 0


def test_a_step_that_hangs_says_where(tmp_path: Path) -> None:
    with node(tmp_path, delay_ms=1e6, step_timeout_s=2.0) as running:
        running.wait_ready()
        answer = ask(running.url, "never", 5)
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "generation_failed")
        running.wait_healed(engines=1)
        log = running.log.read_text()
        assert "Current thread" in log
        assert 'arithmetic_model.py", line' in log
        assert "never" not in log
        assert running.end() == 0


def test_an_error_of_a_card_replaces_the_engine(tmp_path: Path) -> None:
    pipe = tmp_path / "kmsg"
    os.mkfifo(pipe)
    with node(tmp_path, delay_ms=20, kernel_log=str(pipe)) as running:
        running.wait_ready()
        worker = running.children()["worker-0"]
        client = Client(running.url, "/v1/chat/completions", 900, streaming=True)
        wait_for(lambda: len(client.events) > 3)
        pipe.write_text("6,1,1,-;NVRM: Xid (PCI:0000:07:00): 63, pid=1, Row Remapper: New row marked for remapping\n")
        time.sleep(0.5)
        assert running.events("the engine is ended") == []
        pipe.write_text("3,2,2,-;NVRM: Xid (PCI:0000:07:00): 79, pid=1, name=python, GPU has fallen off the bus.\n")
        client.join(20)
        assert "engine lost" in json.loads(client.events[-1])["error"]["message"]
        running.wait_healed(engines=1)
        cause = "card 0000:07:00 reported Xid 79: the card fell off the bus; the host must be restarted"
        (line,) = running.events("the engine is ended")
        assert line["cause"] == cause
        (ended,) = running.events(RESTARTED)
        assert ended["ended"] == f"signal SIGKILL: {cause}"
        assert running.children()["worker-0"] == worker
        assert running.end() == 0
