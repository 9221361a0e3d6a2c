"""One behaviour of the index, in memory and in a real Redis; and the exact comparison of prefixes."""

import time
from array import array
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec
import pytest

from appliance.reuse.fingerprint import Fingerprint, Fingerprinter
from appliance.reuse.index import (
    MAX_CANDIDATES,
    MAX_REFERENCE_BYTES,
    MAX_VALUE_BYTES,
    SCHEMA,
    Candidate,
    EmbeddedIndex,
    Entry,
    FingerprintIndex,
    decoded,
    encoded,
)
from appliance.reuse.prefix import MARK_BYTES, MARK_TOKENS, MAX_MARKS, common_tokens, reference_of, space_of
from appliance.reuse.redis_index import RedisIndex, connect
from tests.support.front import wait_for
from tests.support.redis_server import RedisServer, needs_redis, redis_server

SPACE = space_of("tenant", "model")
TTL_S = 0.4
TEXT = " ".join(f"word{number}" for number in range(300))


@dataclass
class Heard:
    """What an index reported."""

    calls: list[tuple[str, str]] = field(default_factory=list)
    down: list[bool] = field(default_factory=list)

    def index_called(self, operation: str, outcome: str, took_s: float) -> None:
        assert took_s >= 0
        self.calls.append((operation, outcome))

    def index_is_down(self, down: bool) -> None:
        self.down.append(down)


@dataclass
class Made:
    """An index under test; ``wait`` lets its clock go on."""

    index: FingerprintIndex
    heard: Heard = field(default_factory=Heard)
    server: RedisServer | None = None
    now_s: float = 1000.0

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        if self.server is not None:
            time.sleep(seconds)


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis"), password="a b/c@d") as server:
        yield server


@pytest.fixture(params=["embedded", pytest.param("redis", marks=needs_redis)])
def made(request: pytest.FixtureRequest) -> Iterator[Made]:
    with ExitStack() as stack:
        if request.param == "embedded":
            found = Made(EmbeddedIndex(50, TTL_S, lambda: found.now_s))
        else:
            server: RedisServer = request.getfixturevalue("shared_server")
            server.client().flushall()
            heard = Heard()
            url = f"unix://user:x@{server.folder}/redis.sock"
            server.client().execute_command("ACL", "SETUSER", "user", "on", ">x", "~zccp:*", "+@all")
            found = Made(RedisIndex(partial(connect, url, 2.0), TTL_S, 2.0, heard), heard, server)
        stack.callback(found.index.close)
        yield found


def fingerprint(text: str = TEXT) -> Fingerprint:
    found = Fingerprinter().of(text)
    assert found is not None
    return found


def entry(node: str = "node-1", tokens: int = 640, reference: bytes = b"r" * 32, *, warmup: bool = False) -> Entry:
    return Entry(reference, node, tokens, warmup)


def with_keys(base: Fingerprint, start: int, stop: int) -> Fingerprint:
    """A fingerprint that shares only the bands in a range with another."""
    other = [bytes([number]) * 8 for number in range(len(base.keys))]
    return Fingerprint(base.values, (*other[:start], *base.keys[start:stop], *other[stop:]))


def test_what_is_published_is_proposed(made: Made) -> None:
    own = fingerprint()
    assert made.index.propose(SPACE, own) == ()
    assert made.index.publish(SPACE, own, entry(warmup=True))
    assert made.index.propose(SPACE, own) == (Candidate(entry(warmup=True), 12),)
    assert made.index.publish(SPACE, own, entry())
    assert made.index.propose(SPACE, own) == (Candidate(entry(), 12),)


def test_one_shared_band_is_enough_and_most_bands_come_first(made: Made) -> None:
    own = fingerprint()
    made.index.publish(SPACE, with_keys(own, 0, 1), entry("one"))
    assert made.index.propose(SPACE, own) == (Candidate(entry("one"), 1),)
    made.index.publish(SPACE, with_keys(own, 5, 12), entry("seven"))
    made.index.publish(SPACE, with_keys(own, 2, 3), entry("longer", 2000))
    assert [(found.entry.node, found.bands) for found in made.index.propose(SPACE, own)] == [
        ("seven", 7), ("longer", 1), ("one", 1),
    ]  # fmt: skip


def test_candidates_are_few(made: Made) -> None:
    own = fingerprint()
    for band in range(12):
        made.index.publish(SPACE, with_keys(own, band, band + 1), entry(f"node-{band}", 64 + band))
    found = made.index.propose(SPACE, own)
    assert [one.entry.node for one in found] == ["node-11", "node-10", "node-9", "node-8"]
    assert len(found) == MAX_CANDIDATES


def test_tenants_and_models_see_nothing_of_each_other(made: Made) -> None:
    own = fingerprint()
    made.index.publish(SPACE, own, entry())
    for tenant, model in (("tenant", "model2"), ("other", "model"), ("", "model"), ("tenantm", "odel"), ("", "")):
        assert made.index.propose(space_of(tenant, model), own) == ()
    assert made.index.propose(SPACE, own)


def test_entries_end_with_their_time(made: Made) -> None:
    own = fingerprint()
    made.index.publish(SPACE, own, entry())
    made.wait(TTL_S / 2)
    assert made.index.propose(SPACE, own)
    made.wait(TTL_S)
    assert made.index.propose(SPACE, own) == ()


@pytest.mark.parametrize(
    "wrong",
    [
        entry(reference=b"r" * (MAX_REFERENCE_BYTES + 1)),
        entry(node=""),
        entry(node="n" * 129),
        entry(tokens=0),
        entry(tokens=1 << 40),
    ],
)
def test_an_entry_beyond_its_bounds_is_not_published(made: Made, wrong: Entry) -> None:
    assert not made.index.publish(SPACE, fingerprint(), wrong)
    assert made.index.propose(SPACE, fingerprint()) == ()


def test_the_largest_entry_fits(made: Made) -> None:
    largest = entry("\N{BABY ANGEL}" * 100, 1 << 31, bytes(MAX_REFERENCE_BYTES))
    assert made.index.publish(SPACE, fingerprint(), largest)
    assert made.index.propose(SPACE, fingerprint())[0].entry == largest


def test_a_closed_index_is_a_new_one(made: Made) -> None:
    made.index.close()
    made.index.close()
    assert made.index.publish(SPACE, fingerprint(), entry())
    assert made.index.propose(SPACE, fingerprint())


def test_memory_is_bounded_and_what_is_used_stays() -> None:
    index = EmbeddedIndex(10, 60.0, lambda: 0.0)
    kept = fingerprint()
    index.publish(SPACE, kept, entry("kept"))
    for number in range(100):
        index.publish(SPACE, fingerprint(f"{number} {TEXT[number * 7 :]} {number}"), entry(f"node-{number}"))
        assert index.propose(SPACE, kept)
        assert len(index) <= 10 * 12
    assert index.propose(SPACE, fingerprint(f"3 {TEXT[21:]} 3"))[:1] != (Candidate(entry("node-3"), 12),)


def test_a_value_is_what_this_version_writes_or_nothing() -> None:
    value = encoded(entry())
    assert value is not None
    assert decoded(value) == entry()
    pack = msgspec.msgpack.encode
    plain = [b"r", "node", 64, False]
    garbage = [
        b"", b"\xc1", value[:-1], value + b"\0", b"\x92" * 1000, b"\xff" * 40, b"PONG", pack({"schema": SCHEMA}),
        pack([SCHEMA + 1, plain]), pack([str(SCHEMA), plain]), pack([SCHEMA, [*plain, 1]]), pack([SCHEMA, plain[:2]]),
        pack([SCHEMA, ["r", "node", -5, False]]), pack([SCHEMA, [b"r", "node", 64.5, False]]), pack(plain), b"\xdc",
        pack([SCHEMA, [b"r", "node", 64, None]]), value + b" " * MAX_VALUE_BYTES, pack([SCHEMA, [b"", "", 1, False]]),
    ]  # fmt: skip
    assert [decoded(one) for one in garbage] == [None] * len(garbage)


def ids(seed: int, length: int) -> array:
    return array("i", [(seed * 7919 + place * 31) % 49_000 for place in range(length)])


def test_the_common_prefix_is_exact() -> None:
    own = ids(1, 1000)
    for shared, wanted in ((0, 0), (63, 0), (64, 64), (100, 64), (128, 128), (999, 960), (1000, 960)):
        other = array("i", [*own[:shared], *ids(2, 1000 - shared)])
        assert common_tokens(reference_of(SPACE, own), reference_of(SPACE, other)) == wanted
    assert reference_of(SPACE, own[:63]) == b""
    assert reference_of(SPACE, list(own)) == reference_of(SPACE, own)
    assert len(reference_of(SPACE, ids(1, 131_000))) == MAX_MARKS * MARK_BYTES
    assert common_tokens(reference_of(SPACE, own), reference_of(space_of("b", "model"), own)) == 0


def test_a_mark_depends_on_all_ids_before_it() -> None:
    own = reference_of(SPACE, ids(1, 256))
    changed = ids(1, 256)
    changed[3] += 1
    other = reference_of(SPACE, changed)
    assert all(own[at : at + MARK_BYTES] != other[at : at + MARK_BYTES] for at in range(0, len(own), MARK_BYTES))


def test_a_poisoned_entry_proposes_no_more_than_is_true() -> None:
    own, foreign = ids(1, 640), array("i", [*ids(1, 128), *ids(3, 512)])
    poisoned = entry(tokens=100_000, reference=reference_of(SPACE, foreign) + b"\0" * 200)
    assert common_tokens(reference_of(SPACE, own), poisoned.reference) == 2 * MARK_TOKENS


@needs_redis
def test_names_and_values_hold_digests_only_and_are_bounded(shared_server: RedisServer, tmp_path: Path) -> None:
    client = shared_server.client()
    client.flushall()
    url = f"redis://:a%20b%2Fc%40d@127.0.0.1:{shared_server.port}"
    index = RedisIndex(partial(connect, url, 2.0), 60.0, 2.0, Heard())
    text = "SECRET-CANARY " + TEXT
    space = space_of("TENANT-CANARY", "m")
    index.publish(space, fingerprint(text), entry(reference=reference_of(space, ids(1, 9000))))
    names = [name.decode() for name in client.scan_iter()]
    assert len(names) == 12
    assert all(len(name) < 200 and "CANARY" not in name and name.startswith("zccp:1.1:{") for name in names)
    values = [client.get(name) for name in names]
    assert all(len(value) < MAX_VALUE_BYTES and b"CANARY" not in value for value in values)
    assert all(0 < client.pttl(name) <= 60_000 for name in names)
    index.publish(space, fingerprint(text), entry())
    assert client.dbsize() == 12
    index.close()


@needs_redis
def test_each_call_is_one_round_trip(shared_server: RedisServer) -> None:
    index = RedisIndex(
        partial(connect, f"redis://:a%20b%2Fc%40d@127.0.0.1:{shared_server.port}", 2.0), 60.0, 2.0, Heard()
    )
    index.propose(SPACE, fingerprint())
    client = shared_server.client()
    before = client.info("stats")["total_reads_processed"]
    index.propose(SPACE, fingerprint())
    index.publish(SPACE, fingerprint(), entry())
    assert client.info("stats")["total_reads_processed"] - before == 3  # two calls, and the question itself
    index.close()


@needs_redis
def test_keys_stay_bounded_over_many_publications(shared_server: RedisServer) -> None:
    client = shared_server.client()
    client.flushall()
    heard = Heard()
    index = RedisIndex(partial(connect, f"redis://:a%20b%2Fc%40d@127.0.0.1:{shared_server.port}", 2.0), 0.2, 2.0, heard)
    for number in range(200):
        index.publish(SPACE, fingerprint(f"{TEXT[number * 5 :]} {number}"), entry(f"node-{number}"))
    client.config_set("maxmemory-policy", "allkeys-random")
    client.config_set("maxmemory", client.info("memory")["used_memory"])
    for number in range(200):
        index.publish(SPACE, fingerprint(f"{TEXT[number * 5 :]} x{number}"), entry(f"node-{number}"))
        index.propose(SPACE, fingerprint(f"{TEXT[number * 5 :]} {number}"))
    client.config_set("maxmemory", 0)
    assert {outcome for _, outcome in heard.calls} == {"ok"}
    wait_for(lambda: client.dbsize() == 0, 10)
    index.close()
