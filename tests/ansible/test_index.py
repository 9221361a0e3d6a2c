"""The role that makes an index: what it refuses, and a real cluster that it makes, leaves alone and lets grow."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.ansible.playing import ANSIBLE, document, play
from tests.support.front import wait_for, write_certificate
from tests.support.redis_server import BUS, RedisServer, needs_redis, redis_cluster, whole

PASSWORD = "p" * 24
GOOD: dict[str, object] = {
    "redis_password": PASSWORD,
    "redis_address": "10.0.0.1",
    "redis_certificate": "/c.pem",
    "redis_certificate_key": "/k.pem",
    "redis_authority": "/a.pem",
}
REFUSED = {
    "good": ({}, ""),
    "private": ({"redis_tls": False}, ""),
    "named": ({"redis_address": "index.example"}, "it must be an IP address"),
    "bare": ({"redis_authority": ""}, "a shared index speaks TLS: give redis_certificate"),
    "open": ({"redis_tls": False, "redis_address": "192.0.2.1"}, "which is no private address"),
    "copies": ({"redis_replicas": 2}, "redis_replicas is 2; a cluster takes three hosts for each copy"),
}


def test_an_index_that_others_could_read_is_refused(tmp_path: Path) -> None:
    defaults = document(ANSIBLE / "roles/redis/defaults/main.yml")
    hosts = {name: {**defaults, **GOOD, "redis_group": "all", **given} for name, (given, _) in REFUSED.items()}
    tasks = [{"name": "Refuse", "ansible.builtin.include_tasks": str(ANSIBLE / "roles/redis/tasks/refuse.yml")}]
    text = re.sub(r"\s+", " ", play(tasks, hosts, tmp_path).stdout)
    for name, (_, words) in REFUSED.items():
        failed = re.search(rf"{name} : ok=\d+ changed=\d+ unreachable=\d+ failed=(\d)", text)
        assert failed is not None, text[-3000:]
        assert failed[1] == str(int(bool(words))), name
        assert words in text


def hosts_of(servers: list[RedisServer], tls: Path) -> dict[str, dict[str, object]]:
    """An inventory of servers on this machine."""
    return {
        f"index{number}": {
            "redis_port": server.node_port,
            "redis_address": "127.0.0.1",
            "redis_password": PASSWORD,
            "redis_group": "all",
            "redis_tls_directory": str(tls),
        }
        for number, server in enumerate(servers, 1)
    }


def made_one(hosts: Mapping[str, Mapping[str, object]], folder: Path) -> dict[str, int]:
    """Run the tasks that make one cluster; how many of them changed something, by host."""
    role: dict[str, Any] = {"name": "redis", "tasks_from": "cluster.yml"}
    done = play([{"name": "One", "ansible.builtin.include_role": role}], hosts, folder)
    assert done.returncode == 0, done.stdout[-4000:]
    assert PASSWORD not in done.stdout
    return {name: int(count) for name, count in re.findall(r"(\w+) +: ok=\d+ +changed=(\d+)", done.stdout)}


needs_cli = pytest.mark.skipif(
    not Path("/usr/bin/redis-cli").exists(), reason="redis-cli is not in /usr/bin (Debian: redis-tools)"
)


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[RedisServer]]:
    """Four servers that speak TLS to each other; each knows itself alone."""
    write_certificate(tmp_path)
    (tmp_path / "ca.pem").write_bytes((tmp_path / "cert.pem").read_bytes())
    with redis_cluster(tmp_path, 4, password=PASSWORD, tls=tmp_path) as four:
        yield four


@needs_redis
@needs_cli
def test_a_cluster_is_made_left_alone_and_grows(servers: list[RedisServer], tmp_path: Path) -> None:
    assert made_one(hosts_of(servers[:3], tmp_path), tmp_path) == {"index1": 1, "index2": 0, "index3": 0}
    assert all(whole(server) for server in servers[:3])
    assert not whole(servers[3])
    four = hosts_of(servers, tmp_path)
    assert made_one(four, tmp_path) == {"index1": 1, "index2": 0, "index3": 0, "index4": 1}
    assert {server.port for server in servers} == {share.port for share in shares(servers[0])}
    assert all(whole(server) for server in servers)
    assert set(made_one(four, tmp_path).values()) == {0}


@needs_redis
@needs_cli
def test_a_run_that_was_broken_off_is_ended_by_the_next(servers: list[RedisServer], tmp_path: Path) -> None:
    four = hosts_of(servers, tmp_path)
    made_one(dict(list(four.items())[:3]), tmp_path)
    first, second, _, new = servers
    # What is left of a run that took the new host in and ended within its first move.
    at_bus = f"{new.node_port} {new.node_port + BUS}"
    assert ask(first, f"CLUSTER MEET 127.0.0.1 {at_bus}") == b"OK"
    wait_for(lambda: all(ask(server, "CLUSTER INFO")["cluster_known_nodes"] == "4" for server in servers))
    slot = next(share.first for share in shares(first) if share.port == first.port)
    assert ask(second, f"CLUSTER SETSLOT {slot} IMPORTING {ask(first, 'CLUSTER MYID').decode()}") == b"OK"
    assert made_one(four, tmp_path) == {"index1": 2, "index2": 0, "index3": 0, "index4": 0}
    assert {server.port for server in servers} == {share.port for share in shares(first)}
    assert set(made_one(four, tmp_path).values()) == {0}


class Share(NamedTuple):
    """A range of slots: its first, and the port of the server that holds it."""

    first: int
    port: int


def ask(server: RedisServer, command: str) -> Any:
    """What a server answers."""
    with server.client() as client:
        return client.execute_command(command)


def shares(server: RedisServer) -> list[Share]:
    """The ranges of slots; the client's form of the answer has a row for each."""
    rows = ask(server, "CLUSTER SLOTS")
    if isinstance(rows, dict):
        return [Share(int(first), int(row["primary"][1])) for (first, _), row in rows.items()]
    return [Share(int(row[0]), int(row[2][1])) for row in rows]
