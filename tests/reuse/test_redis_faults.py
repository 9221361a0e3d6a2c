"""Redis down, killed, frozen, full, locked, flushed, lying: each costs a miss, a count and one line, and it heals."""

import json
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs

from appliance.reuse.breaker import Breaker
from appliance.reuse.index import MAX_VALUE_BYTES, SCHEMA, Candidate
from appliance.reuse.redis_index import RedisIndex, connect
from tests.reuse.test_fingerprint_index import SPACE, Heard, entry, fingerprint
from tests.support.front import write_certificate
from tests.support.live_server import free_port
from tests.support.redis_server import RedisServer, needs_redis, redis_server

pytestmark = needs_redis
OWN = fingerprint()


class Rig:
    """An index with a clock that tests move, and what it reported."""

    def __init__(self, url: str, *, timeout_s: float = 2.0, cluster: bool = False, slow_s: float = 5.0) -> None:
        self.now_s = 0.0
        self.heard = Heard()
        self.index = RedisIndex(
            partial(connect, url, timeout_s, cluster=cluster), 60.0, slow_s, self.heard,
            lambda: time.monotonic() + self.now_s,
        )  # fmt: skip

    def works(self) -> bool:
        """Whether an entry that is published now is found."""
        return self.index.publish(SPACE, OWN, entry()) and self.index.propose(SPACE, OWN) == (Candidate(entry(), 12),)

    def fails(self, times: int = 3) -> None:
        for _ in range(times):
            assert self.index.propose(SPACE, OWN) == ()

    def outcomes(self) -> list[str]:
        found = [outcome for _, outcome in self.heard.calls]
        self.heard.calls.clear()
        return found


@contextmanager
def rig(server: RedisServer, **settings: float) -> Iterator[Rig]:
    made = Rig(server.url, **settings)
    try:
        yield made
    finally:
        made.index.close()


@contextmanager
def slow_way(to_port: int, delay_s: Callable[[], float]) -> Iterator[int]:
    """A port that passes everything on, answers after a delay."""
    listener = socket.create_server(("127.0.0.1", 0))
    ended = threading.Event()

    def carry(client: socket.socket) -> None:
        with client, socket.create_connection(("127.0.0.1", to_port)) as server:
            while not ended.is_set():
                asked = client.recv(65536)
                if not asked:
                    return
                server.sendall(asked)
                answer = server.recv(65536)
                time.sleep(delay_s())
                try:
                    client.sendall(answer)
                except OSError:
                    return

    def accept() -> None:
        while not ended.is_set():
            try:
                client, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=carry, args=(client,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield listener.getsockname()[1]
    finally:
        ended.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def test_down_at_the_start_then_up(tmp_path: Path) -> None:
    with redis_server(tmp_path, start=False) as server, rig(server) as made, capture_logs() as lines:
        made.fails(10)
        assert made.outcomes() == ["error"] * 3 + ["skipped"] * 7
        assert not made.index.publish(SPACE, OWN, entry())
        assert [line["event"] for line in lines] == ["the fingerprint index does not answer; requests go on without it"]
        assert "ConnectionError" in lines[0]["cause"]
        assert made.heard.down == [True]
        made.now_s += 1.1
        made.fails(5)
        assert made.outcomes() == ["skipped", "error"] + ["skipped"] * 4
        server.start()
        made.fails(1)  # still within the second pause, of two seconds
        made.now_s += 2.1
        assert made.works()
        assert made.heard.down == [True, False]
        assert [line["log_level"] for line in lines] == ["warning", "info"]


def test_killed_and_started_again_under_load(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server, rig(server) as made, capture_logs() as lines:
        assert made.works()
        stopped = threading.Event()

        def restart() -> None:
            for _ in range(3):
                server.kill()
                server.start()
                time.sleep(0.1)
            stopped.set()

        thread = threading.Thread(target=restart)
        thread.start()
        hits = 0
        while not stopped.is_set():
            hits += made.index.publish(SPACE, OWN, entry())
            made.index.propose(SPACE, OWN)
            made.now_s += 0.2
        thread.join()
        made.now_s += 60
        assert made.works()
        assert hits
        assert made.heard.down[-1:] in ([], [False])
        assert len(lines) == len(made.heard.down)
        assert "error" in made.outcomes()


def test_frozen(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server, rig(server, timeout_s=0.2) as made:
        assert made.works()
        server.send(signal.SIGSTOP)
        began_s = time.monotonic()
        made.fails(50)
        assert time.monotonic() - began_s < 5.0
        assert made.heard.down == [True]
        server.send(signal.SIGCONT)
        made.now_s += 2
        assert made.works()


def test_busy_for_longer_than_an_answer_may_take(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server, rig(server, timeout_s=0.2) as made:
        assert made.works()
        sleeping = threading.Thread(target=lambda: server.client().execute_command("DEBUG", "SLEEP", "1"))
        sleeping.start()
        time.sleep(0.1)
        made.fails(3)
        assert made.outcomes()[-3:] == ["error"] * 3
        sleeping.join()
        made.now_s += 2
        assert made.works()


def test_a_slow_answer_is_used_and_counts_as_a_failure(tmp_path: Path) -> None:
    delay = [0.0]
    with redis_server(tmp_path) as server, slow_way(server.port, lambda: delay[0]) as port, capture_logs() as lines:
        made = Rig(f"redis://127.0.0.1:{port}", slow_s=0.5)
        assert made.works()
        delay[0] = 0.6
        assert [len(made.index.propose(SPACE, OWN)) for _ in range(4)] == [1, 1, 1, 0]
        assert made.outcomes()[-4:] == ["slow"] * 3 + ["skipped"]
        assert "an answer took" in lines[0]["cause"]
        made.index.close()


def test_a_late_answer_never_belongs_to_another_question(tmp_path: Path) -> None:
    delay = [0.0]
    with redis_server(tmp_path) as server, slow_way(server.port, lambda: delay[0]) as port:
        made = Rig(f"redis://127.0.0.1:{port}", timeout_s=0.2)
        others = [fingerprint(f"{number} other words {number} in each of these texts {number}") for number in range(16)]
        for number, other in enumerate(others):
            assert made.index.publish(SPACE, other, entry(f"node-{number}"))
        right = 0
        for number, other in enumerate(others):
            delay[0] = 2.0 if number % 2 else 0.0
            made.now_s += 60
            found = made.index.propose(SPACE, other)
            assert {one.entry.node for one in found} <= {f"node-{number}"}
            right += bool(found)
        assert 4 <= right <= 8
        made.index.close()


def test_full(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server, rig(server) as made, capture_logs() as lines:
        assert made.works()
        client = server.client()
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", 1)
        for _ in range(5):
            assert not made.index.publish(SPACE, OWN, entry("new"))
            assert made.index.propose(SPACE, OWN) == (Candidate(entry(), 12),)
        assert made.outcomes().count("refused") == 1
        assert [line["cause"] for line in lines] == [
            "Redis is full: raise its maxmemory, or set maxmemory-policy allkeys-lru"
        ]
        assert made.heard.down == []
        client.config_set("maxmemory", 0)
        made.now_s += 2
        assert made.index.publish(SPACE, OWN, entry("new"))
        assert lines[1]["event"] == "the fingerprint index takes entries again"


def test_a_read_only_replica_is_read(tmp_path: Path) -> None:
    (tmp_path / "replica").mkdir()
    at_once = ("--repl-diskless-sync-delay", "0")
    with (
        redis_server(tmp_path, *at_once) as server,
        redis_server(tmp_path / "replica") as replica,
        capture_logs() as lines,
    ):
        with rig(server) as writer:
            assert writer.works()
        replica.client().execute_command("REPLICAOF", "127.0.0.1", str(server.port))
        with rig(replica) as made:
            deadline_s = time.monotonic() + 20
            while not made.index.propose(SPACE, OWN):
                assert time.monotonic() < deadline_s
                made.now_s += 60
                time.sleep(0.05)
            lines.clear()
            assert not made.index.publish(SPACE, OWN, entry())
            assert lines[0]["cause"] == "Redis is a read-only replica: cache.redis_url must name the primary"


@pytest.mark.parametrize("password", ["CANARY-wrong", ""])
def test_a_wrong_password_is_one_clear_line_without_it(tmp_path: Path, password: str) -> None:
    with redis_server(tmp_path, password="CANARY-right") as server, capture_logs() as lines:
        made = Rig(f"redis://{f':{password}@' if password else ''}127.0.0.1:{server.port}")
        made.fails(20)
        assert made.outcomes() == ["error"] + ["skipped"] * 19
        assert [line["cause"] for line in lines] == ["Redis refuses the user or the password of cache.redis_url"]
        assert "CANARY" not in json.dumps(lines)
        server.client().config_set("requirepass", password)
        made.now_s += 2
        server.password = password
        assert made.works()
        made.index.close()


def test_flushed_between_two_questions(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server, rig(server) as made:
        assert made.works()
        server.client().flushall()
        assert made.index.propose(SPACE, OWN) == ()
        server.client().script_flush()
        assert made.works()
        assert set(made.outcomes()) == {"ok"}


def test_garbage_under_the_keys_is_a_miss_that_is_counted(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server, rig(server) as made:
        assert made.works()
        client = server.client()
        names = sorted(client.scan_iter())
        other_version = msgspec.msgpack.encode((SCHEMA + 1, entry()))
        client.mset(dict.fromkeys(names, other_version))
        made.outcomes()
        assert made.index.propose(SPACE, OWN) == ()
        assert made.outcomes() == ["ok", "garbage"]
        client.set(names[0], b"\xff" * 100)
        client.set(names[1], b"")
        client.set(names[2], b"x" * 10_000_000)
        client.delete(*names[3:6])
        client.lpush(names[3], "a list")
        client.sadd(names[4], "a set")
        client.hset(names[5], "a", "hash")
        client.set(names[6], msgspec.msgpack.encode((SCHEMA, entry("good"))))
        read = client.info("stats")["total_net_output_bytes"]
        assert made.index.propose(SPACE, OWN) == (Candidate(entry("good"), 1),)
        assert client.info("stats")["total_net_output_bytes"] - read < 20 * MAX_VALUE_BYTES
        assert made.outcomes() == ["ok", "garbage"]
        assert made.works()
        assert made.heard.down == []


def test_something_else_at_the_address(tmp_path: Path) -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            with client:
                client.recv(1000)
                client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    threading.Thread(target=answer, daemon=True).start()
    made = Rig(f"redis://127.0.0.1:{listener.getsockname()[1]}")
    made.fails(4)
    assert made.outcomes() == ["error"] * 3 + ["skipped"]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


@pytest.mark.parametrize("host", ["no-such-host.invalid", "127.0.0.1"])
def test_nobody_at_the_address(host: str) -> None:
    made = Rig(f"redis://{host}:{free_port()}")
    made.fails(4)
    assert made.outcomes() == ["error"] * 3 + ["skipped"]


def test_over_tls_with_a_checked_certificate(tmp_path: Path) -> None:
    write_certificate(tmp_path)
    port = free_port()
    files = ["--tls-cert-file", str(tmp_path / "cert.pem"), "--tls-key-file", str(tmp_path / "key.pem")]
    with redis_server(tmp_path, *files, "--tls-port", str(port), "--tls-auth-clients", "no"):
        made = Rig(f"rediss://localhost:{port}/0?ssl_ca_certs={tmp_path / 'cert.pem'}")
        assert made.works()
        made.index.close()
        untrusted = Rig(f"rediss://localhost:{port}/0")
        untrusted.fails(1)
        assert untrusted.outcomes() == ["error"]


def test_in_a_cluster_and_without_saying_so(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    options = ("--cluster-enabled", "yes", "--cluster-require-full-coverage", "yes", "--cluster-port")
    ports = [str(free_port()) for _ in range(2)]
    with (
        redis_server(tmp_path / "a", *options, ports[0]) as one,
        redis_server(tmp_path / "b", *options, ports[1]) as two,
    ):
        one.client().execute_command("CLUSTER ADDSLOTSRANGE", 0, 8191)
        two.client().execute_command("CLUSTER ADDSLOTSRANGE", 8192, 16383)
        one.client().execute_command("CLUSTER MEET", "127.0.0.1", two.port, ports[1])
        deadline_s = time.monotonic() + 20
        while [server.client().execute_command("CLUSTER INFO")["cluster_state"] for server in (one, two)] != [
            "ok",
            "ok",
        ]:
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        made = Rig(one.url, cluster=True)
        spaces = [bytes([number]) * 16 for number in range(8)]
        for space in spaces:
            assert made.index.publish(space, OWN, entry())
            assert made.index.propose(space, OWN)
        assert one.client().dbsize() > 0
        assert two.client().dbsize() > 0
        with capture_logs() as lines:
            plain = Rig(one.url)
            moved = sum(not plain.index.propose(space, OWN) for space in spaces * 3)
            assert moved
            assert lines[0]["cause"] == "Redis is part of a cluster: set cache.redis_cluster"
        two.kill()
        found = [len(made.index.propose(space, OWN)) for space in spaces]
        assert set(found) <= {0, 1}
        made.index.close()
        plain.index.close()


def test_a_breaker_waits_longer_each_time_and_forgets_with_a_success() -> None:
    now = [0.0]
    breaker = Breaker(lambda: now[0], failures=2, first_s=1.0, most_s=3.0)
    assert [breaker.allows(), breaker.failed(), breaker.allows(), breaker.failed()] == [True, False, True, True]
    for pause_s in (1.0, 2.0, 3.0, 3.0):
        now[0] += pause_s - 0.01
        assert not breaker.allows()
        now[0] += 0.02
        assert breaker.allows()
        assert not breaker.failed()
    now[0] += 3.1
    assert breaker.succeeded()
    assert not breaker.succeeded()
    assert breaker.allows()
    assert breaker.failed(certain=True)
    now[0] += 1.01
    assert breaker.allows()
