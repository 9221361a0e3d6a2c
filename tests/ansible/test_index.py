"""The role that makes an index: what it refuses, and a real cluster that it makes, leaves alone and lets grow."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.ansible.playing import ANSIBLE, document, play
from tests.support.front import write_certificate
from tests.support.redis_server import RedisServer, needs_redis, redis_cluster, whole

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


@needs_redis
@pytest.mark.skipif(
    not Path("/usr/bin/redis-cli").exists(), reason="redis-cli is not in /usr/bin (Debian: redis-tools)"
)
def test_a_cluster_is_made_left_alone_and_grows(tmp_path: Path) -> None:
    write_certificate(tmp_path)
    (tmp_path / "ca.pem").write_bytes((tmp_path / "cert.pem").read_bytes())
    with redis_cluster(tmp_path, 4, password=PASSWORD, tls=tmp_path) as servers:
        three = hosts_of(servers[:3], tmp_path)
        assert made_one(three, tmp_path) == {"index1": 1, "index2": 0, "index3": 0}
        assert all(whole(server) for server in servers[:3])
        assert not whole(servers[3])
        four = hosts_of(servers, tmp_path)
        assert made_one(four, tmp_path) == {"index1": 1, "index2": 0, "index3": 0, "index4": 1}
        shares = servers[0].client().execute_command("CLUSTER SLOTS")
        assert {server.port for server in servers} == ports(shares)
        assert all(whole(server) for server in servers)
        assert set(made_one(four, tmp_path).values()) == {0}


def ports(shares: Any) -> set[int]:
    """The ports of the servers that hold slots; the client's form of the answer has a row for each range."""
    rows = shares.values() if isinstance(shares, dict) else shares
    return {int(row["primary"][1]) if isinstance(row, dict) else int(row[2][1]) for row in rows}
