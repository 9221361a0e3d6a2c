"""The whole node: a real main process, a real worker with real HTTP, a real engine loop over the arithmetic model."""

import json
import resource
import signal
import socket
import time
from pathlib import Path

import httpx
import pytest

from appliance.host.process import ending
from appliance.reservation import StartError, listen_at_port, reserve_port
from tests.support.node import ask, expected, node, stream, text_of, wait_for


def test_requests_metrics_and_a_clean_end(tmp_path: Path) -> None:
    with node(tmp_path, server={"workers": 2}) as running:
        running.wait_ready()
        assert httpx.get(f"{running.url}/health/ready").status_code == 200
        for prompt in ("hello", "the quick brown fox", "x" * 200):
            answer = ask(running.url, prompt, 40)
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-request-id"]
            assert answer.json()["choices"][0]["text"] == expected(prompt, 40)
        metrics = httpx.get(f"{running.url}/metrics").text
        assert "zccp_generated_tokens_total 120.0" in metrics
        assert "zccp_kv_pages_used 0.0" in metrics
        segments = list(Path("/dev/shm").glob(f"zccp-{running.process.pid}-*.segments"))
        assert len(segments) == 1
        assert running.end() == 0
        assert not segments[0].exists()
        assert list((tmp_path / "run").iterdir()) == []
        requests = [line for line in running.lines() if line["event"] == "request"]
        assert [line["completion_tokens"] for line in requests] == [40, 40, 40]
        assert all(line["request_id"] for line in requests)


def test_bc_180_sigterm_lets_a_running_stream_end(tmp_path: Path) -> None:
    with node(tmp_path, delay_ms=3) as running:
        running.wait_ready()
        idle = socket.create_connection(("127.0.0.1", int(running.url.rsplit(":", 1)[1])))
        with stream(running.url, "abc", 300) as events:
            seen = [next(events)]
            running.process.send_signal(signal.SIGTERM)
            for _ in range(200):
                ready = httpx.get(f"{running.url}/health/ready")
                if ready.status_code == 503:
                    break
                time.sleep(0.01)
            assert ready.status_code == 503
            refused = ask(running.url, "late", 5)
            assert refused.status_code == 503
            assert refused.headers["retry-after"]
            assert "error" in refused.json()
            seen += list(events)
        assert seen[-1] == "[DONE]"
        assert text_of(seen[:-1]) == expected("abc", 300)
        assert running.process.wait(20) == 0
        idle.close()


def test_bc_092_a_client_that_leaves_frees_its_pages_streaming_or_not(tmp_path: Path) -> None:
    with node(tmp_path, delay_ms=10) as running:
        running.wait_ready()
        for streaming in (True, False):
            with socket.create_connection(("127.0.0.1", int(running.url.rsplit(":", 1)[1]))) as client:
                body = json.dumps({"model": "arithmetic", "prompt": "a", "max_tokens": 900, "stream": streaming})
                head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
                client.sendall(f"{head}Content-Type: application/json\r\n\r\n{body}".encode())
                wait_for(lambda: httpx.get(f"{running.url}/health").json()["running"] == 1)
            wait_for(lambda: httpx.get(f"{running.url}/health").json()["free_pages"] == 256)
        assert ask(running.url, "next", 3).json()["choices"][0]["text"] == expected("next", 3)
        assert running.end() == 0
        requests = [line for line in running.lines() if line["event"] == "request"]
        assert [line["status"] for line in requests] == [499, 499, 200]


def test_the_end_of_the_drain_is_a_typed_error_and_not_a_clean_finish(tmp_path: Path) -> None:
    with node(tmp_path, delay_ms=20, server={"drain_s": 0.3}) as running:
        running.wait_ready()
        with stream(running.url, "abc", 900) as events:
            seen = [next(events)]
            running.process.send_signal(signal.SIGTERM)
            seen += list(events)
        assert "[DONE]" not in seen
        error = json.loads(seen[-1])["error"]
        assert "shutting down" in error["message"]
        assert running.process.wait(20) == 0


def test_a_second_signal_cuts_the_drain_short(tmp_path: Path) -> None:
    with node(tmp_path, delay_ms=20, server={"drain_s": 60}) as running:
        running.wait_ready()
        with stream(running.url, "abc", 900) as events:
            next(events)
            running.process.send_signal(signal.SIGINT)
            while not any(line["event"] == "draining" for line in running.lines()):
                time.sleep(0.02)
            running.process.send_signal(signal.SIGINT)
            assert json.loads(list(events)[-1])["error"]
        assert running.process.wait(20) == 0


def test_a_taken_port_is_named_with_the_remedy(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with node(tmp_path, server={"port": port}) as running:
            assert running.process.wait(20) == 1
        message = running.log.read_text()
    assert f"StartError: cannot listen on 127.0.0.1 port {port}: Address already in use" in message
    assert "choose another with --port or server.port" in message


def test_a_reserved_port_is_kept_from_others_and_free_afterwards() -> None:
    reservation = reserve_port("127.0.0.1", 0)
    port = reservation.getsockname()[1]
    with pytest.raises(StartError, match=f"port {port}"), reserve_port("127.0.0.1", port):
        pass
    reservation.close()
    reserve_port("127.0.0.1", port).close()


def test_a_port_is_free_again_at_once_after_connections_that_this_side_ended() -> None:
    with reserve_port("127.0.0.1", 0) as reservation, listen_at_port(reservation) as listener:
        port = reservation.getsockname()[1]
        listener.settimeout(10)
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", port)) as client:
                listener.accept()[0].close()
                assert client.recv(1) == b""
        with pytest.raises(StartError, match=f"port {port}"), reserve_port("127.0.0.1", port):
            pass
    with reserve_port("127.0.0.1", port) as reservation, listen_at_port(reservation):
        assert reservation.getsockname()[1] == port


def test_an_address_of_another_machine_is_named() -> None:
    with pytest.raises(StartError, match=r"cannot listen on 192\.0\.2\.1 port 0"):
        reserve_port("192.0.2.1", 0)


def test_a_load_failure_ends_with_its_cause(tmp_path: Path) -> None:
    with node(tmp_path, engine=("broken-engine", "the weights are damaged")) as running:
        assert running.process.wait(20) == 1
        (ended,) = [line for line in running.lines() if line["event"] == "a child process ended; the appliance stops"]
    assert ended["child"] == "engine"
    assert ended["ended"] == "exit code 1: the weights are damaged"


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        (
            "keys.json",
            "keys file {} is damaged: JSON is malformed: invalid character (byte 0); restore it from a backup",
        ),
        ("usage.bin", "{} is no usage file of version 1; move it away to start a new one"),
    ],
)
def test_a_damaged_file_of_a_worker_ends_the_node_with_its_cause_alone(tmp_path: Path, name: str, cause: str) -> None:
    damaged = tmp_path / "home" / name
    damaged.parent.mkdir()
    damaged.write_text("x")
    with node(tmp_path) as running:
        assert running.process.wait(20) == 1
        (ended,) = [line for line in running.lines() if line["event"] == "a child process ended; the appliance stops"]
    assert (ended["child"], ended["ended"]) == ("worker-0", f"exit code 1: {cause.format(damaged)}")
    assert "Traceback" not in running.log.read_text()


def test_a_killed_main_process_takes_its_children_along_and_the_next_start_cleans_up(tmp_path: Path) -> None:
    with node(tmp_path) as running:
        running.wait_ready()
        ask(running.url, "x", 1)
        pid = running.process.pid
        children = [int(line) for line in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        assert len(children) == 2
        running.process.kill()
        running.process.wait()
        deadline = time.monotonic() + 10
        while any(_is_running(child) for child in children) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not any(_is_running(child) for child in children)
    (left,) = Path("/dev/shm").glob(f"zccp-{pid}-*.segments")
    with node(tmp_path) as running:
        running.wait_ready()
        assert not left.exists()
        assert len(list((tmp_path / "run").iterdir())) == 1
        assert running.end() == 0


def test_bc_111_no_secret_and_no_prompt_in_the_log_or_the_metrics(tmp_path: Path) -> None:
    secret, prompt = "sk-test-CANARY-123", "CANARY-PROMPT"
    with node(tmp_path) as running:
        running.wait_ready()
        headers = {"authorization": f"Bearer {secret}", "x-api-key": secret}
        body = {"model": "arithmetic", "prompt": prompt, "max_tokens": 3}
        for path, content in (
            ("/v1/completions", json.dumps(body)),
            (f"/v1/completions?key={secret}", json.dumps({**body, "max_tokens": -1})),
            ("/v1/completions", f"{{{secret} {prompt}"),
            (f"/nowhere/{secret}", "{}"),
        ):
            httpx.post(running.url + path, content=content, headers={**headers, "content-type": "application/json"})
        metrics = httpx.get(f"{running.url}/metrics", headers=headers).text
        assert running.end() == 0
        assert "CANARY" not in running.log.read_text()
        assert "CANARY" not in metrics
        assert len([line for line in running.lines() if line["event"] == "request"]) == 4


def test_workers_may_open_as_many_files_as_the_system_allows(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        with node(tmp_path, server={"max_connections": 300}) as running:
            running.wait_ready()
            pids = running.process.pid, running.children()["worker-0"]
            assert [resource.prlimit(pid, resource.RLIMIT_NOFILE) for pid in pids] == [(512, hard), (hard, hard)]
            assert running.end() == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_systemd_hears_ready_and_stopping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(10)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.setenv("WATCHDOG_USEC", "200000")
        with node(tmp_path) as running:
            heard: list[str] = []
            while not any(message.startswith("READY=1") for message in heard):
                heard.append(manager.recv(1000).decode())
            running.wait_ready()
            running.process.send_signal(signal.SIGTERM)
            while not any(message.startswith("STOPPING=1") for message in heard):
                heard.append(manager.recv(1000).decode())
            assert running.process.wait(20) == 0
    assert "WATCHDOG=1" in heard


def test_how_a_child_ended_in_words() -> None:
    assert ending(0) == "exit code 0"
    assert ending(-9) == "signal SIGKILL"
    assert ending(-99) == "signal 99"


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
