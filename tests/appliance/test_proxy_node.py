"""A whole node behind a real nginx: killed workers, answers that break off, what ``zccp doctor`` says."""

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from appliance import doctor
from appliance.config import build
from tests.support.front import names, needs_nginx, proxy_sections, shared_folder, wait_for
from tests.support.front_node import fronted_node
from tests.support.node import Node, ask, expected, node

pytestmark = needs_nginx


def worker_of(running: Node) -> int:
    """The process of the first worker."""
    pid = running.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return next(int(child) for child in children if b"\0worker\0" in Path(f"/proc/{child}/cmdline").read_bytes())


def test_a_node_answers_through_nginx_and_leaves_nothing(tmp_path: Path) -> None:
    with fronted_node(tmp_path) as (running, front):
        sockets = front.config.proxy.sockets
        assert names(sockets) == ["lock", "worker-0.sock", "worker-1.sock"]
        for _ in range(4):
            answer = ask(front.url, "hello", 20)
            assert answer.json()["choices"][0]["text"] == expected("hello", 20)
        assert "zccp_generated_tokens_total 80.0" in httpx.get(f"{front.url}/metrics").text
        left = front.config.proxy.bodies / "4000000000"
        left.touch()
        os.utime(left, (0, 0))
        wait_for(lambda: not left.exists())
        logged = {line["request_id"] for line in running.lines() if line["event"] == "request"}
        assert answer.headers["x-request-id"] in logged
        assert running.end() == 0
        assert [line["answers_cut"] for line in running.lines() if line["event"] == "worker ends"] == [False, False]
        assert names(sockets) == ["lock"]
        assert front.bodies() == []
        late = ask(front.url, "late", 5)
        assert (late.status_code, late.json()["error"]["code"]) == (503, "not_ready")  # since nobody has taken it


def test_a_killed_worker_gives_502_before_headers_and_no_clean_end_after_them(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "a"}]}
    asks = {"/v1/completions": {"prompt": "a"}, "/v1/messages": chat}
    common = {"model": "arithmetic", "max_tokens": 900}
    with fronted_node(tmp_path, delay_ms=20, workers=1) as (running, front), ExitStack() as open_streams:
        client = open_streams.enter_context(httpx.Client(timeout=30))
        streams: dict[str, Iterator[str]] = {}
        for path, body in asks.items():
            sent = client.stream("POST", front.url + path, json={**common, **body, "stream": True})
            streams[path] = open_streams.enter_context(sent).iter_lines()
        seen = {path: [next(lines)] for path, lines in streams.items()}
        whole = json.dumps({**common, "prompt": "a"}).encode()
        with ThreadPoolExecutor(1) as pool:
            options = ("--include", "-H", "x-request-id: cut")
            waiting = pool.submit(front.curl, "/v1/completions", *options, data=whole)
            wait_for(lambda: httpx.get(f"{running.url}/health").json()["running"] == 3)
            os.kill(worker_of(running), signal.SIGKILL)
            head, _, answer = waiting.result().stdout.decode().partition("\r\n\r\n")
        for path, lines in streams.items():
            with pytest.raises(httpx.RemoteProtocolError):
                seen[path].extend(lines)
            assert len(seen[path]) > 1
            for last in ("[DONE]", "message_stop", '"finish_reason":"', '"stop_reason":"'):
                assert not any(last in line for line in seen[path])
        assert head.startswith("HTTP/1.1 502 ")
        assert "x-request-id: cut" in head.lower()
        assert json.loads(answer)["error"]["code"] == "worker_lost"
        assert json.loads(answer)["request_id"] == "cut"
        wait_for(lambda: front.bodies() == [])
        wait_for(lambda: ask(front.url, "again", 3).status_code == 200, 30.0)
        assert ask(front.url, "again", 3).json()["choices"][0]["text"] == expected("again", 3)


def test_the_doctor_sees_whether_nginx_and_the_workers_meet(tmp_path: Path) -> None:
    with fronted_node(tmp_path) as (running, front):
        proxy = front.config.proxy

        def found() -> doctor.Finding:
            return doctor._proxy(front.config)

        assert doctor._port(front.config).evidence == f"an appliance answers at {running.url}"
        assert found().state == "ok"
        assert found().evidence == (
            f"2 sockets in {proxy.directory}, bodies in {proxy.body_directory}, nginx answers at {front.url}"
        )
        proxy.bodies.chmod(0o755)
        assert (found().state, found().remedy) == ("failed", f"chmod 700 {proxy.bodies}")
        proxy.bodies.chmod(0o700)
        proxy.socket_of(1).rename(proxy.sockets / "away")
        assert found().evidence == f"{proxy.socket_of(1)} is missing"
        (proxy.sockets / "away").rename(proxy.socket_of(1))
        front.process.terminate()
        front.process.wait(20)
        assert (found().state, found().remedy) == (
            "failed",
            "start nginx with what `zccp config --nginx` prints, and see its error.log",
        )
        assert running.end() == 0
        assert found().state == "not checked"
        assert doctor._proxy(build({}, {})).evidence == "no nginx in front: proxy.directory is empty"


def test_a_taken_directory_ends_the_start_with_its_cause(tmp_path: Path) -> None:
    with shared_folder() as folder:
        proxy = proxy_sections(folder, tls=False)
        (tmp_path / "second").mkdir()
        with node(tmp_path, proxy=proxy) as first:
            first.wait_ready()
            with node(tmp_path / "second", proxy=proxy) as second:
                assert second.process.wait(20) == 1
            assert "another appliance serves at the sockets in" in second.log.read_text()
            assert first.end() == 0
