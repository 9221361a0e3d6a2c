"""The index in a real cluster of three: slots that move, a node that goes and comes back, TLS, several hosts named."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from redis import Redis
from redis.crc import key_slot
from structlog.testing import capture_logs

from appliance.reuse.index import Candidate
from appliance.reuse.redis_index import _names
from tests.reuse.test_fingerprint_index import entry
from tests.reuse.test_redis_faults import OWN, Rig
from tests.support.front import wait_for, write_certificate
from tests.support.live_server import free_port
from tests.support.redis_server import RedisServer, joined, needs_redis, redis_cluster, whole

pytestmark = needs_redis
PASSWORD = "p" * 24
SPACES = [bytes([number]) * 16 for number in range(12)]


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RedisServer]]:
    with redis_cluster(tmp_path_factory.mktemp("cluster"), 3, password=PASSWORD) as servers:
        joined(servers)
        yield servers


@contextmanager
def rig(*servers: RedisServer, timeout_s: float = 2.0) -> Iterator[Rig]:
    """An index whose URL names these servers."""
    hosts = ",".join(f"127.0.0.1:{server.port}" for server in servers)
    made = Rig(f"redis://:{PASSWORD}@{hosts}", cluster=True, timeout_s=timeout_s)
    try:
        yield made
    finally:
        made.index.close()


def fill(made: Rig) -> None:
    for space in SPACES:
        assert made.index.publish(space, OWN, entry(space.hex()))


def found(made: Rig, spaces: list[bytes]) -> list[bool]:
    """Whether the entry of each space is found, under all of its band keys."""
    return [made.index.propose(space, OWN) == (Candidate(entry(space.hex()), 12),) for space in spaces]


def slot_of(space: bytes) -> int:
    (slot,) = {key_slot(name.encode()) for name in _names(space, OWN)}
    return slot


def holder(servers: list[RedisServer], space: bytes) -> RedisServer:
    """The server that has the keys of a space."""
    (server,) = [one for one in servers if one.client().execute_command("CLUSTER COUNTKEYSINSLOT", slot_of(space))]
    return server


def test_entries_are_spread_and_any_node_leads_to_all(three: list[RedisServer]) -> None:
    for server in three:
        with rig(server) as made:
            fill(made)
            assert found(made, SPACES) == [True] * len(SPACES)
            assert set(made.outcomes()) == {"ok"}
            assert made.heard.down == []
    assert {holder(three, space).port for space in SPACES} == {server.port for server in three}


def test_a_slot_that_moves_is_followed_without_a_miss(three: list[RedisServer]) -> None:
    with rig(three[0]) as made:
        fill(made)
        space = SPACES[0]
        old = holder(three, space)
        new = next(server for server in three if server is not old)
        names = _names(space, OWN)
        with old.client() as source, new.client() as target:
            ids = {client: client.execute_command("CLUSTER MYID") for client in (source, target)}
            slot = slot_of(space)
            target.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", ids[source])
            source.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", ids[target])
            assert found(made, [space]) == [True]
            move(source, new, names[:6])
            assert found(made, [space]) == [True]  # half of it is asked for at the other node
            move(source, new, names[6:])
            assert found(made, [space]) == [True]
            for client in (target, source):
                client.execute_command("CLUSTER SETSLOT", slot, "NODE", ids[target])
        assert holder(three, space) is new
        assert found(made, SPACES) == [True] * len(SPACES)
        assert made.index.publish(space, OWN, entry(space.hex()))
        assert found(made, [space]) == [True]
        assert set(made.outcomes()) == {"ok"}
        assert made.heard.down == []


def move(source: Redis, to: RedisServer, names: list[str]) -> None:
    """Move keys to another server."""
    done = source.execute_command(
        "MIGRATE", "127.0.0.1", to.port, "", 0, 5000, "REPLACE", "AUTH", PASSWORD, "KEYS", *names
    )
    assert done in ("OK", b"OK")


def test_a_node_that_is_gone_costs_its_own_entries_until_it_is_back(three: list[RedisServer]) -> None:
    with rig(*three, timeout_s=0.5) as made, capture_logs() as lines:
        fill(made)
        lost = holder(three, SPACES[0])
        own = [space for space in SPACES if holder(three, space) is lost]
        others = [space for space in SPACES if space not in own]
        lost.kill()
        for space in own:
            made.now_s += 60
            assert made.index.propose(space, OWN) == ()
        made.now_s += 60
        assert found(made, others) == [True] * len(others)
        lost.start()
        wait_for(lambda: all(whole(server) for server in three))
        made.now_s += 60
        fill(made)
        assert found(made, SPACES) == [True] * len(SPACES)
        assert PASSWORD not in repr(lines)


def test_the_hosts_of_the_url_that_are_away_are_passed_over(three: list[RedisServer]) -> None:
    nobody = RedisServer(three[0].folder, free_port())
    with rig(nobody, three[1]) as made:
        fill(made)
        assert found(made, SPACES) == [True] * len(SPACES)
        assert set(made.outcomes()) == {"ok"}
    with rig(nobody) as made:
        made.fails(1)
        assert made.outcomes() == ["error"]


def test_over_tls_between_the_nodes_as_well(tmp_path: Path) -> None:
    write_certificate(tmp_path)
    with redis_cluster(tmp_path, 3, password=PASSWORD, tls=tmp_path) as servers:
        joined(servers, tmp_path)
        hosts = ",".join(f"127.0.0.1:{server.node_port}" for server in servers)
        made = Rig(f"rediss://:{PASSWORD}@{hosts}?ssl_ca_certs={tmp_path / 'cert.pem'}", cluster=True)
        fill(made)
        assert found(made, SPACES) == [True] * len(SPACES)
        assert set(made.outcomes()) == {"ok"}
        made.index.close()
        plain = Rig(f"redis://:{PASSWORD}@127.0.0.1:{servers[0].node_port}", cluster=True)
        plain.fails(1)
        assert plain.outcomes() == ["error"]
