"""Reloads in a whole node: no client loses an answer, what changes takes effect, what is wrong changes nothing."""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

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
            wait_for(lambda: len(self.answers) == len(self._threads))
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
    with node(tmp_path, delay_ms=1, server={"http2": True, "drain_s": 6}) as running:
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


def test_a_stream_outlives_the_reload_of_its_worker_and_a_connection_is_told_to_go(tmp_path: Path) -> None:
    with node(tmp_path, delay_ms=20, server={"drain_s": 60}) as running, httpx.Client() as client:
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
