"""Keys and the ledger: life of a key, hot reload, files that fail, limits shared by processes."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from api.ports import Tenant
from appliance import keys
from appliance.host.ledger import MAX_RECORDS, Ledger, LedgerError, Usage
from appliance.keys import FileKeyRing, KeyFile, KeyFileError


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "home" / "keys.json"


def test_a_key_is_found_and_its_secret_is_nowhere(path: Path) -> None:
    key, record = keys.add(path, "team-a", requests_per_minute=5, tokens_per_minute=7, admin=True)
    prefix, key_id, secret = key.split("-")
    assert (prefix, key_id, len(secret)) == ("zk", record.id, 64)
    assert secret not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    tenant = FileKeyRing(path).find(key.encode())
    assert tenant == Tenant(
        name="team-a", key_id=record.id, admin=True, requests_per_minute=5, tokens_per_minute=7
    )  # fmt: skip


@pytest.mark.parametrize(
    "wrong",
    [
        b"", b"zk-", b"zk", b"zk--", b"Bearer x", b"\xff\xfe", b"zk-\xc3\xa9-\xc3\xa9", b"zk-" + b"a" * 10_000,
        "zk-ключ-ключ".encode(),
    ],
)  # fmt: skip
def test_bytes_that_are_no_key(path: Path, wrong: bytes) -> None:
    keys.add(path, "t")
    assert FileKeyRing(path).find(wrong) is None


def test_near_misses(path: Path) -> None:
    key, record = keys.add(path, "t")
    ring = FileKeyRing(path)
    assert ring.find(key[:-1].encode()) is None
    assert ring.find(key.upper().encode()) is None
    assert ring.find((key + " ").encode()) is None
    assert ring.find(f"zk-{record.id}-".encode()) is None
    assert ring.find(key.replace(record.id, "0" * 16).encode()) is None
    other, _ = keys.add(path, "u")
    mixed = f"zk-{record.id}-{other.split('-')[2]}"
    assert ring.find(mixed.encode()) is None


def test_expiry(path: Path) -> None:
    clock = Clock()
    key, _ = keys.add(path, "t", expires_in_s=60, now=clock)
    ring = FileKeyRing(path, now=clock)
    clock.now += 59.9
    assert ring.find(key.encode()) is not None
    clock.now += 0.1
    assert ring.find(key.encode()) is None


def test_changes_are_followed_without_a_restart(path: Path) -> None:
    ring = FileKeyRing(path)
    assert ring.open
    key, record = keys.add(path, "t")
    assert not ring.open
    assert ring.find(key.encode()) is not None
    assert ring.tenants() == {record.id: "t"}
    assert keys.revoke(path, record.id) == record
    assert ring.find(key.encode()) is None
    assert not ring.open, "a file without keys lets nobody in"


def test_a_file_that_vanishes_or_breaks_opens_nothing(path: Path) -> None:
    key, _ = keys.add(path, "t")
    ring = FileKeyRing(path)
    path.unlink()
    assert not ring.open
    assert ring.find(key.encode()) is not None
    path.write_text("{broken")
    assert not ring.open
    assert ring.find(key.encode()) is not None


def test_a_broken_file_at_start_is_refused(path: Path) -> None:
    path.parent.mkdir()
    path.write_text("[]")
    with pytest.raises(KeyFileError, match=r"is damaged: .* restore it from a backup"):
        FileKeyRing(path)
    path.write_bytes(msgspec.json.encode(KeyFile(version=2)))
    with pytest.raises(KeyFileError, match="has version 2; this version reads 1"):
        FileKeyRing(path)


@pytest.mark.parametrize(
    ("tenant", "limits", "match"),
    [
        ("", {}, "1 to 64 printable characters"),
        ("x" * 65, {}, "1 to 64 printable characters"),
        ("a\nb", {}, "1 to 64 printable characters"),
        ("a", {"tokens_per_minute": -1}, "must not be negative"),
    ],
)
def test_what_add_refuses(path: Path, tenant: str, limits: dict, match: str) -> None:
    with pytest.raises(KeyFileError, match=match):
        keys.add(path, tenant, **limits)
    assert not path.exists()


def test_revoking_an_unknown_key(path: Path) -> None:
    with pytest.raises(KeyFileError, match="no key with id 'nope' in"):
        keys.revoke(path, "nope")


def test_two_processes_add_without_losing_any(path: Path) -> None:
    code = """
import sys
from pathlib import Path
from appliance import keys
for _ in range(20):
    keys.add(Path(sys.argv[1]), sys.argv[2])
"""
    running = [subprocess.Popen([sys.executable, "-c", code, str(path), name]) for name in ("a", "b")]
    assert [process.wait() for process in running] == [0, 0]
    tenants = [record.tenant for record in keys.read(path).keys]
    assert (tenants.count("a"), tenants.count("b")) == (20, 20)
    assert [other.name for other in path.parent.iterdir() if other.name.endswith("~")] == []


TENANT = Tenant(name="t", key_id="k1", requests_per_minute=3, tokens_per_minute=100)


def test_requests_and_tokens_of_a_minute(tmp_path: Path) -> None:
    clock = Clock()
    ledger = Ledger(tmp_path / "usage.bin", clock)
    first = ledger.take(TENANT, requests=1, tokens=40)
    assert (first.allowed, first.limit_requests, first.remaining_requests) == (True, 3, 2)
    assert (first.limit_tokens, first.remaining_tokens, first.reset_s) == (100, 60, 60.0)
    clock.now += 20
    refused = ledger.take(TENANT, requests=1, tokens=61)
    assert (refused.allowed, refused.remaining_requests, refused.remaining_tokens) == (False, 2, 60)
    assert refused.reset_s == 40.0
    assert ledger.take(TENANT, requests=1, tokens=60).allowed
    ledger.add_tokens(TENANT, 25)
    over = ledger.take(TENANT, requests=1, tokens=0)
    assert (over.allowed, over.remaining_tokens) == (False, 0)
    clock.now += 40
    assert ledger.take(TENANT, requests=3, tokens=0).allowed
    assert not ledger.take(TENANT, requests=1, tokens=0).allowed
    assert ledger.usage() == [Usage("k1", 5, 125)]
    ledger.close()
    ledger.close()


def test_a_request_above_the_whole_limit_runs_when_it_is_the_first(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "usage.bin", Clock())
    assert ledger.take(TENANT, requests=1, tokens=500).allowed
    assert not ledger.take(TENANT, requests=1, tokens=1).allowed
    ledger.close()


def test_keys_without_limits_are_counted_and_nobody_is_not(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "usage.bin", Clock())
    free = Tenant(name="t", key_id="k2")
    state = ledger.take(free, requests=1, tokens=10)
    assert (state.allowed, state.limit_requests, state.limit_tokens) == (True, 0, 0)
    anonymous = Tenant(name="anonymous", key_id="")
    assert ledger.take(anonymous, requests=1, tokens=10).allowed
    ledger.add_tokens(anonymous, 5)
    assert ledger.usage() == [Usage("k2", 1, 10)]
    ledger.close()


def test_a_clock_that_went_back_starts_a_new_window(tmp_path: Path) -> None:
    clock = Clock()
    ledger = Ledger(tmp_path / "usage.bin", clock)
    ledger.take(TENANT, requests=3, tokens=0)
    clock.now = 5.0
    assert ledger.take(TENANT, requests=3, tokens=0).allowed
    ledger.close()


def test_totals_survive_a_restart_and_the_longest_unused_record_gives_way(tmp_path: Path) -> None:
    clock = Clock()
    ledger = Ledger(tmp_path / "usage.bin", clock)
    for number in range(MAX_RECORDS):
        clock.now += 1
        ledger.take(Tenant(name="t", key_id=f"k{number:04d}"), requests=1, tokens=number)
    ledger.close()
    ledger = Ledger(tmp_path / "usage.bin", clock)
    ledger.take(Tenant(name="t", key_id="k0000"), requests=1, tokens=0)
    ledger.take(Tenant(name="t", key_id="new"), requests=1, tokens=9)
    used = {usage.key_id: usage for usage in ledger.usage()}
    assert used["k0000"].requests == 2
    assert "k0001" not in used
    assert used["new"] == Usage("new", 1, 9)
    assert len(used) == MAX_RECORDS
    ledger.close()


def test_limits_hold_across_processes(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from api.ports import Tenant
from appliance.host.ledger import Ledger
ledger = Ledger(Path(sys.argv[1]), lambda: 1.0)
tenant = Tenant(name="t", key_id="k", requests_per_minute=150)
print(sum(ledger.take(tenant, requests=1, tokens=2).allowed for _ in range(100)))
"""
    file = tmp_path / "usage.bin"
    running = [
        subprocess.Popen([sys.executable, "-c", code, str(file)], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    allowed = [int(process.communicate()[0]) for process in running]
    assert sum(allowed) == 150
    ledger = Ledger(file, lambda: 1.0)
    assert ledger.usage() == [Usage("k", 150, 300)]
    ledger.close()


def test_a_file_that_is_no_ledger(tmp_path: Path) -> None:
    file = tmp_path / "usage.bin"
    file.write_bytes(b"x" * 100)
    with pytest.raises(LedgerError, match="is no usage file of version 1; move it away"):
        Ledger(file)
    with pytest.raises(LedgerError, match="Is a directory"):
        Ledger(tmp_path)
