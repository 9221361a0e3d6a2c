"""Reloads in a whole node: no client loses an answer, what changes takes effect, what is wrong changes nothing."""

import json
import os
import re
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from appliance.config import build
from appliance.config_reference import reference
from appliance.reload import APPLIED, ReloadRefusedError, accept, merge
from tests.support.front import Front, needs_nginx, write_certificate
from tests.support.front_node import fronted_node
from tests.support.http2_client import Http2Client
from tests.support.node import ask, expected, node, stream, text_of, wait_for

REFUSED = "reload refused; everything goes on as before"
GIVEN_UP = "reload given up: a worker with the new settings cannot start; the others go on"
WAITS = "a changed setting waits; restart the appliance for it to take effect"
BODY = {"model": "arithmetic", "max_tokens": 5, "temperature": 0, "seed": 1}


class Load:
    """Clients of several kinds in a loop; every answer must be whole and right."""

    def __init__(self) -> None:
        self.answers: dict[str, int] = {}
        self.errors: list[str] = []
        self.clients: list[Any] = []
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []

    def add(self, name: str, once: Callable[[int], tuple[object, object]]) -> None:
        """Ask with ``once`` again and again; it gives what came and what was to come."""

        def loop() -> None:
            turn = 0
            while not self._ended.is_set() and len(self.errors) < 20:
                turn += 1
                try:
                    found, wanted = once(turn)
                    if found != wanted:
                        self.errors.append(f"{name}: {found!r} instead of {wanted!r}")
                except Exception as error:  # noqa: BLE001 - any error is one that a client would have seen
                    self.errors.append(f"{name}: {type(error).__name__}: {error}")
                self.answers[name] = turn

        self._threads.append(threading.Thread(target=loop, name=name, daemon=True))

    @contextmanager
    def running(self) -> Iterator[None]:
        for thread in self._threads:
            thread.start()
        try:
            wait_for(lambda: len(self.answers) == len(self._threads), 60.0)
            yield
        finally:
            self._ended.set()
            for thread in self._threads:
                thread.join(60)
            for client in self.clients:
                client.close()


def load_on(url: str) -> Load:
    """Every kind of client that a port has."""
    load, port = Load(), int(url.rsplit(":", 1)[1])
    kept, paused, second = httpx.Client(timeout=30), httpx.Client(timeout=30), Http2Client(port)

    load.clients += [kept, paused, second]

    def over(client: httpx.Client) -> Callable[[int], tuple[object, object]]:
        def once(turn: int) -> tuple[object, object]:
            prompt = f"kept {turn}"
            reply = client.post(f"{url}/v1/completions", json={**BODY, "prompt": prompt})
            return reply.json()["choices"][0]["text"], expected(prompt, 5)

        return once

    def anew(turn: int) -> tuple[object, object]:
        prompt = f"anew {turn}"
        return ask(url, prompt, 5).json()["choices"][0]["text"], expected(prompt, 5)

    def streamed(turn: int) -> tuple[object, object]:
        prompt = f"stream {turn}"
        with stream(url, prompt, 200) as events:
            *pieces, last = events
        return (text_of(pieces), last), (expected(prompt, 200), "[DONE]")

    def multiplexed(turn: int) -> tuple[object, object]:
        prompt = f"second {turn}"
        answer = json.loads(second.post("/v1/completions", {**BODY, "prompt": prompt}))
        return answer["choices"][0]["text"], expected(prompt, 5)

    def slow(turn: int) -> tuple[object, object]:
        time.sleep(0.4)
        return over(paused)(turn)

    load.add("keep-alive", over(kept))
    load.add("keep-alive with pauses", slow)
    load.add("a connection a request", anew)
    load.add("stream", streamed)
    load.add("HTTP/2", multiplexed)
    return load


def test_no_client_loses_an_answer_over_reloads(tmp_path: Path) -> None:
    with node(tmp_path, delay_ms=1, server={"http2": True, "drain_s": 60}) as running:
        running.wait_ready()
        load, engine = load_on(running.url), running.children()["engine"]
        with load.running():
            for times, limit in ((1, 0.001), (2, 1.0)):
                running.reload(server={"max_body_mb": limit})
                running.wait_reloaded(times)
                answer = ask(running.url, "x" * 2000, 5)
                assert answer.status_code == (413 if limit < 1 else 400)
        assert load.errors == []
        assert all(load.answers.values())
        workers = [name for name in running.children() if name.startswith("worker")]
        assert workers == ["worker-0"]
        assert running.children()["engine"] == engine
        turns = [(line["worker"], line["instead_of"]) for line in running.events("a worker takes over")]
        assert turns == [("worker-1", "worker-0"), ("worker-0", "worker-1")]
        assert [line["answers_cut"] for line in running.events("worker ends")] == [False, False]
        wait_for(lambda: running.metrics()["zccp_segments_used"] == 0)
        assert running.end() == 0


@needs_nginx
def test_nobody_behind_nginx_loses_an_answer_over_reloads_of_both(tmp_path: Path) -> None:
    with fronted_node(tmp_path, delay_ms=1, tls=True, drain_s=60) as (running, front):
        load = load_through(front)
        old = ssl.get_server_certificate(("127.0.0.1", front.port))
        with load.running():
            running.reload(server={"max_body_mb": 1})
            wait_for(lambda: running.events("a worker takes over"))
            write_certificate(front.folder)
            front.process.send_signal(signal.SIGHUP)
            wait_for(lambda: ssl.get_server_certificate(("127.0.0.1", front.port)) != old)
            running.wait_reloaded(1)
            done = dict(load.answers)
            wait_for(lambda: all(load.answers[name] > done[name] for name in done))
        assert load.errors == []
        served = ssl.get_server_certificate(("127.0.0.1", front.port))
        assert served.strip() == Path(front.certificate).read_text().strip()
        (told,) = [line for line in running.lines() if line["event"].startswith("nginx's configuration changes too")]
        assert told["level"] == "warning"
        turns = [(line["worker"], line["instead_of"], line["door"]) for line in running.events("a worker takes over")]
        assert turns == [("worker-2", "worker-0", 0), ("worker-0", "worker-1", 1)]
        assert [line["answers_cut"] for line in running.events("worker ends")] == [False, False]
        assert running.end() == 0
        assert front.bodies() == []


def load_through(front: Front) -> Load:
    """Every kind of client that nginx has; which certificate it shows is looked at elsewhere."""
    load, trust = Load(), ssl.create_default_context()
    trust.check_hostname, trust.verify_mode = False, ssl.CERT_NONE
    kept = httpx.Client(timeout=30, verify=trust)
    load.clients.append(kept)
    url = f"{front.url}/v1/completions"

    def one(client: httpx.Client, prompt: str) -> tuple[object, object]:
        reply = client.post(url, json={**BODY, "prompt": prompt})
        return reply.json()["choices"][0]["text"], expected(prompt, 5)

    def anew(turn: int) -> tuple[object, object]:
        with httpx.Client(timeout=30, verify=trust) as client:
            return one(client, f"anew {turn}")

    def streamed(turn: int) -> tuple[object, object]:
        prompt = f"stream {turn}"
        body = {**BODY, "prompt": prompt, "max_tokens": 200, "stream": True}
        with kept.stream("POST", url, json=body) as reply:
            *pieces, last = [line[6:] for line in reply.iter_lines() if line.startswith("data: ")]
        return (text_of(pieces), last), (expected(prompt, 200), "[DONE]")

    def second(turn: int) -> tuple[object, object]:
        prompt = f"second {turn}"
        done = front.curl(
            "/v1/completions", "--insecure", "--http2", data=json.dumps({**BODY, "prompt": prompt}).encode()
        )
        return json.loads(done.stdout)["choices"][0]["text"], expected(prompt, 5)

    load.add("keep-alive", lambda turn: one(kept, f"kept {turn}"))
    load.add("a connection a request", anew)
    load.add("stream", streamed)
    load.add("HTTP/2", second)
    return load


def test_a_stream_outlives_the_reload_of_its_worker_and_a_connection_is_told_to_go(tmp_path: Path) -> None:
    patient = httpx.Limits(keepalive_expiry=60)
    with node(tmp_path, delay_ms=20, server={"drain_s": 60}) as running, httpx.Client(limits=patient) as client:
        running.wait_ready()
        assert "connection" not in client.get(f"{running.url}/health/live").headers
        with stream(running.url, "abc", 400) as events:
            seen = [next(events)]
            running.reload()
            wait_for(lambda: running.events("another worker takes over"))
            reply = client.get(f"{running.url}/health/live")
            assert (reply.status_code, reply.headers["connection"]) == (200, "close")
            assert "connection" not in client.get(f"{running.url}/health/live").headers
            assert set(running.children()) == {"engine", "worker-0", "worker-1"}
            seen += list(events)
        assert (text_of(seen[:-1]), seen[-1]) == (expected("abc", 400), "[DONE]")
        running.wait_reloaded(1)
        assert running.end() == 0


def test_a_worker_that_gives_way_and_stops_is_killed_at_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(20)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        with node(tmp_path, server={"drain_s": 1}) as running:
            running.wait_ready()
            old = running.children()["worker-0"]
            running.reload()
            wait_for(lambda: running.events("another worker takes over"))
            os.kill(old, signal.SIGSTOP)
            running.wait_reloaded(1)
            (late,) = running.events("a worker that gave way did not end in time and is killed")
            assert late["child"] == "worker-0"
            assert set(running.children()) == {"engine", "worker-1"}
            assert ask(running.url, "abc", 5).json()["choices"][0]["text"] == expected("abc", 5)
            heard: list[str] = []
            while not (heard and heard[-1].startswith("RELOADING=1")):
                heard.append(manager.recv(1000).decode())
            assert re.fullmatch(r"RELOADING=1\nMONOTONIC_USEC=\d+\nSTATUS=reloading", heard[-1])
            while not heard[-1].startswith("READY=1"):
                heard.append(manager.recv(1000).decode())
            assert running.end() == 0


def test_every_setting_is_applied_or_waits() -> None:
    assert {row.path for row in reference()} >= APPLIED
    running = build({}, {})
    elsewhere = {"home": "/elsewhere", "run": running.paths.run}
    fresh = build({"log": {"level": "debug"}, "engine": {"slots": 4}, "paths": elsewhere}, {})
    change = merge(running, fresh)
    assert (change.applied, change.waiting) == (("log.level",), ("engine.slots", "paths.home"))
    assert change.config == build({"log": {"level": "debug"}}, {})  # the keys stay where the state is
    own = merge(running, build({"auth": {"keys_file": "/elsewhere/keys.json"}}, {}))
    assert (own.applied, own.config.keys_file) == (("auth.keys_file",), Path("/elsewhere/keys.json"))


def test_what_would_break_a_rule_after_the_merge_is_refused() -> None:
    running = build({}, {})
    with pytest.raises(ReloadRefusedError, match="no such file"):
        accept(running, lambda: (_ for _ in ()).throw(OSError("no such file")))
    fresh = build({"auth": {"keys_file": "/elsewhere/keys.json"}}, {})
    assert accept(running, lambda: fresh).applied == ("auth.keys_file",)
    outside = build({"server": {"host": "10.0.0.1"}, "auth": {"allow_unauthenticated_non_loopback": True}}, {})
    with pytest.raises(ReloadRefusedError, match="reachable from other machines and there is no API key"):
        accept(outside, lambda: build({"server": {"host": "10.0.0.1"}}, {}))


def test_what_is_wrong_or_needs_a_restart_changes_nothing(tmp_path: Path) -> None:
    with node(tmp_path, server={"drain_s": 1}) as running:
        running.wait_ready()
        before = running.children()
        good = running.config.read_text()
        for wrong, rule in (
            ({"server": {"max_body_mb": -1}}, "server.max_body_mb is -1; it must be between 0.001 and 1024"),
            ({"server": {"max_bodies": 1}}, "server.max_bodies is not a key of the configuration"),
            ({"telemetry": {"otlp_endpoint": "nowhere"}}, "telemetry.otlp_endpoint is 'nowhere'"),
        ):
            seen = len(running.events(REFUSED))
            running.reload(**wrong)
            wait_for(lambda: len(running.events(REFUSED)) > seen)  # noqa: B023
            assert rule in running.events(REFUSED)[-1]["cause"]
            running.config.write_text(good)
        assert running.children() == before
        running.reload(
            shared_memory={"segment_count": 32}, server={"workers": 2, "cors_origins": ["https://a.example"]}
        )
        running.wait_reloaded(1)
        waiting = running.events(WAITS)
        assert [line["setting"] for line in waiting] == ["server.workers", "shared_memory.segment_count"]
        assert running.events("reloading")[0]["settings"] == ["server.cors_origins"]
        assert set(running.children()) == {"engine", "worker-1"}
        reply = httpx.get(f"{running.url}/health/live", headers={"origin": "https://a.example"})
        assert reply.headers["access-control-allow-origin"] == "https://a.example"
        assert running.end() == 0


def test_a_worker_that_cannot_start_ends_the_reload_and_nothing_else(tmp_path: Path) -> None:
    with node(tmp_path, server={"drain_s": 1}) as running:
        running.wait_ready()
        before, footprint = running.children(), running.footprint()
        damaged = tmp_path / "home" / "keys.json"
        damaged.write_text("x")
        running.reload(server={"cors_origins": ["*"]})
        wait_for(lambda: running.events(GIVEN_UP))
        (line,) = running.events(GIVEN_UP)
        assert line["ended"].startswith(f"exit code 1: keys file {damaged} is damaged")
        damaged.unlink()
        assert running.children() == before
        assert ask(running.url, "abc", 5).json()["choices"][0]["text"] == expected("abc", 5)
        assert (
            "access-control-allow-origin"
            not in httpx.get(f"{running.url}/health/live", headers={"origin": "x"}).headers
        )
        assert running.footprint()[2] == footprint[2]
        running.reload()
        running.wait_reloaded(1)
        reply = httpx.get(f"{running.url}/health/live", headers={"origin": "https://a.example"})
        assert reply.headers["access-control-allow-origin"] == "*"
        os.kill(running.children()["worker-1"], 9)
        running.wait_healed(workers=1)
        assert ask(running.url, "abc", 5).json()["choices"][0]["text"] == expected("abc", 5)
        assert running.end() == 0
