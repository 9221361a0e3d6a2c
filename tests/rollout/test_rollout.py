"""Four appliances, an index on three of them, a balancer: installed, rolled out under load, broken, rolled back.

A sixth host stays bare: what is said of it is a dry run.
"""

import json
import re
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.rollout import materials
from tests.rollout.fleet import Fleet, Host, missing, run
from tests.rollout.materials import ROOT
from tests.support.front import wait_for

NODES = ("gpu1", "gpu2", "gpu3", "gpu4")
INDEX = NODES[:3]
FRONT = "front"
BARE = "bare"
ENVIRONMENTS = "/opt/zccp/environments"
REDIS_PASSWORD = str(materials.REDIS["redis_password"])
REDIS_CLI = f"REDISCLI_AUTH={REDIS_PASSWORD} redis-cli --tls --cacert /etc/redis/zccp-tls/ca.pem"
REMOVED = ("nginx-common", "redis-tools", "prometheus-node-exporter", "curl", "python3-apt", "python3-venv")
"""What a bare host lacks of what the others have from the start, and all that needs it."""
FIRST, SECOND, BROKEN, DEAD = "1.0.0", "1.0.1", "1.0.2", "1.0.3"
BREAKS = {
    BROKEN: {"api/routes/completions.py": ("services.require_ready()", 'raise RuntimeError("broken on purpose")')},
    DEAD: {"appliance/engine_main.py": ("import ", "import zccp_is_not_there\nimport ")},
}


class Operator:
    """Runs playbooks against a fleet, as from an operator's machine."""

    def __init__(self, fleet: Fleet, folder: Path, appliances: Sequence[str], values: dict[str, Any]) -> None:
        """Run the fleet with these appliances, which have these variables; logs go to the folder."""
        self.fleet = fleet
        self.values = values
        self._folder = folder
        materials.certificates(folder / "files", [host.address for host in fleet.hosts])
        self._inventory = materials.inventory(folder / "files", groups(fleet, appliances), values)

    def play(
        self, playbook: str, *options: str, inventory: Path | None = None, **values: object
    ) -> "subprocess.CompletedProcess[str]":
        """Run a playbook with extra variables."""
        program = str(Path(sys.executable).parent / "ansible-playbook")
        command = (program, "-i", str(inventory or self._inventory), playbook, *options, "-e", json.dumps(values))
        done = subprocess.run(
            self.fleet.inside(*command),
            cwd=ROOT / "ansible",
            env=materials.playbook_environment(self.fleet.key),
            capture_output=True,
            text=True,
            timeout=1500,
            check=False,
        )
        with (self._folder / "plays.log").open("a") as log:
            log.write(f"==== {playbook} {values}\n{done.stdout}\n{done.stderr}\n")
        return done

    def releases(self) -> dict[str, str]:
        """The current release of each appliance."""
        return {name: self.fleet.on(name, "basename $(readlink /opt/zccp/current)").strip() for name in NODES}

    def drained(self) -> list[str]:
        """Appliances that the balancer sends nothing to."""
        lines = self.fleet.on(FRONT, "grep -E '^ +server .* down;$' /etc/nginx/nginx.conf || true").splitlines()
        out = {line.split()[1].partition(":")[0] for line in lines}
        return [host.name for host in self.fleet.hosts if host.address in out]


def groups(fleet: Fleet, appliances: Sequence[str]) -> dict[str, dict[str, Host]]:
    """The groups of an inventory with these appliances, of which some hold the index."""
    index = [name for name in INDEX if name in appliances]
    named = {"appliances": appliances, "index": index, "balancers": [FRONT]}
    return {group: {name: fleet.host(name) for name in names} for group, names in named.items()}


def recap(done: "subprocess.CompletedProcess[str]") -> dict[str, dict[str, int]]:
    """The figures of each host that a playbook ends with."""
    rows = re.findall(r"^(\S+)\s+: (ok=.*)$", done.stdout.split("PLAY RECAP", 1)[1], re.MULTILINE)
    return {host: {k: int(v) for k, v in re.findall(r"(\w+)=(\d+)", figures)} for host, figures in rows}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything of this run; overlays need a file system that takes them, which /tmp is."""
    return tmp_path_factory.mktemp("rollout")


@pytest.fixture(scope="module")
def operator(folder: Path) -> Iterator[Operator]:
    """A fleet on which nothing is installed yet, and all that is needed to change that."""
    assert not missing()
    files = folder / "files"
    files.mkdir()
    for version in (FIRST, SECOND, BROKEN, DEAD):
        materials.wheel(version, files, BREAKS.get(version))
    archives = materials.archives()
    shared = {materials.wheels(): "/srv/wheels", files: "/srv/files", archives[0].file.parent: "/srv/archives"}
    environments = materials.KEPT / f"environments-{materials.base().name}-{materials.wheels().name}"
    values = {
        "zccp_accelerator": "none",
        "host_apt_update": False,
        "host_segment_count": 16,
        "application_version": FIRST,
        "application_model": "smollm2-135m",
        "application_wheel": f"{files}/zccp-{{{{ application_version }}}}-py3-none-any.whl",
        "application_wheelhouse": "/srv/wheels",
        "application_keys_file": str(folder / "keys.json"),
        "application_probe_url": "https://{{ ansible_host }}",
        "application_probe_ca": "/srv/files/ca.pem",
        "application_probe_key": materials.api_key(folder),
        "application_index_authority": str(files / "ca.pem"),
        "application_health_delay_s": 1,
        "application_health_retries": 60,
        "application_config": {
            "engine": materials.ENGINE,
            "shared_memory": {"segment_count": 16},
            "cache": {
                "redis_url": materials.index_url(range(1, len(INDEX) + 1)),
                "redis_cluster": True,
                "redis_timeout_ms": 1000,
            },
            "programs": {
                "directory": "/var/lib/zccp/releases/programs",
                "public_key": "/var/lib/zccp/releases/programs/public-key.pem",
            },
            "proxy": {
                "host": "0.0.0.0",
                "port": 443,
                "certificate": "/etc/zccp/tls/fullchain.pem",
                "certificate_key": "/etc/zccp/tls/key.pem",
            },
        },
        "model_store_remote": True,
        "model_store_archives": [archive.item("/srv/archives") for archive in archives],
        "nginx_certificate": str(files / "fleet.pem"),
        "nginx_certificate_key": str(files / "fleet-key.pem"),
    }
    (folder / "key").write_text(str(values["application_probe_key"]))
    if not environments.exists():
        make_environments(folder, shared, values, environments)
    shared[environments] = ENVIRONMENTS
    (folder / "fleet").mkdir()
    with Fleet((*NODES, FRONT, BARE), materials.base(), folder / "fleet", shared) as fleet:
        yield Operator(fleet, folder, NODES, values)


def make_environments(folder: Path, shared: dict[Path, str], values: dict[str, Any], kept: Path) -> None:
    """Let the role install the lock's packages on one host, and keep what it made for the hosts of all tests."""
    (folder / "first").mkdir()
    with Fleet((NODES[0], FRONT), materials.base(), folder / "first", shared) as fleet:
        done = Operator(fleet, folder, NODES[:1], values).play("site.yml")
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
        materials.keep(fleet.hosts[0].tree / ENVIRONMENTS.lstrip("/"), kept)


@pytest.fixture(scope="module")
def installed(operator: Operator) -> Operator:
    """The fleet after its first ``site.yml``."""
    done = operator.play("site.yml", zccp_site_batches=["100%"])
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    return operator


@contextmanager
def load(operator: Operator, folder: Path) -> Iterator[dict[str, Any]]:
    """Clients at the balancer for as long as the context lasts; afterwards the dictionary holds their tally."""
    url = f"https://{operator.fleet.host(FRONT).address}"
    command = (sys.executable, "-m", "tests.rollout.load", url, str(folder / "files/ca.pem"), str(folder / "key"))
    tally: dict[str, Any] = {}
    with subprocess.Popen(
        operator.fleet.inside(*command), cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield tally
        finally:
            out, _ = process.communicate("")
            tally |= json.loads(out)
            sys.stdout.write(f"load: {tally}\n")


def test_a_dry_run_on_bare_hosts_ends_and_tells_what_a_run_would_do(operator: Operator, folder: Path) -> None:
    on, host = operator.fleet.on, operator.fleet.host(BARE)
    on(BARE, f"DEBIAN_FRONTEND=noninteractive apt-get purge --yes {' '.join(REMOVED)}")
    files = "find /etc /opt /usr ! -type d ! -path '*/__pycache__/*' -printf '%p %s %T@\\n' | sort"
    look = f"dpkg-query --show; getent passwd; ls /var/lib; {files}"
    before = on(BARE, look)
    hosts = {"appliances": 2, "index": 3, "balancers": 1, "monitoring": 1}
    named = {group: {f"{group}{number}": host for number in range(count)} for group, count in hosts.items()}
    inventory = materials.inventory(folder / "files", named, operator.values)
    done = operator.play("site.yml", "--check", "--diff", inventory=inventory)
    figures = recap(done)
    assert done.returncode == 0, done.stdout[-8000:]
    assert set(figures) == {name for of in named.values() for name in of}
    assert all(row["failed"] == row["unreachable"] == 0 < row["changed"] for row in figures.values())
    for words in (
        "appliances0 would get curl, python3-venv and what they need",
        "appliances1 would get nginx-light and what they need",
        "index2 would get redis-server and what they need",
        "balancers0 would get nginx-light and what they need",
        "there is no Redis yet, so that its own configuration and its service are not looked at",
        "a run would make one cluster of index0, index1, index2",
        "appliances0 has no appliance yet that prints the configuration",
        "+vm.swappiness = 1",
    ):
        assert words in re.sub(r"\s+", " ", done.stdout), words
    assert REDIS_PASSWORD not in done.stdout
    assert on(BARE, look) == before


def test_a_second_run_and_a_dry_run_change_nothing(installed: Operator) -> None:
    for options in ((), ("--check", "--diff")):
        done = installed.play("site.yml", *options, zccp_site_batches=["100%"])
        assert done.returncode == 0, done.stdout[-8000:]
        assert {host: figures["changed"] for host, figures in recap(done).items()} == dict.fromkeys((*NODES, FRONT), 0)
        assert REDIS_PASSWORD not in done.stdout


def test_hosts_are_as_the_roles_say(installed: Operator) -> None:
    on = installed.fleet.on
    show = on(NODES[0], "systemctl show zccp.service --property User,Type,NRestarts,WatchdogUSec,ActiveState")
    assert set(show.split()) == {"User=zccp", "Type=notify", "NRestarts=0", "WatchdogUSec=1min", "ActiveState=active"}
    score = on(NODES[0], "systemd-analyze security --no-pager zccp.service | tail -1")
    assert float(re.search(r": (\d+\.\d)", score)[1]) <= 3.0  # type: ignore[index]
    assert on(NODES[0], "df --output=size -BM /dev/shm | tail -1").strip() == "288M"
    assert on(NODES[0], "stat -c '%U %a %T' -f /run/zccp_bodies; stat -c '%U %a' /run/zccp_bodies").endswith(
        "zccp 700\n"
    )
    assert on(FRONT, "stat -c '%U %a %m' /run/zccp_front_bodies").split() == [
        "www-data",
        "700",
        "/run/zccp_front_bodies",
    ]
    assert "NOAUTH" in on(INDEX[0], REDIS_CLI.partition(" ")[2] + " ping")
    assert "PONG" in on(INDEX[0], f"{REDIS_CLI} ping")
    assert on(NODES[0], "stat -c %a /etc/zccp/tls/key.pem /opt/zccp/current/etc/config.yaml").split() == ["600", "640"]
    listening = on(NODES[0], "ss -Hltn | awk '{print $4}'").split()
    assert {address for address in listening if not address.startswith(("127.0.0.1", "[::1]"))} <= {
        "0.0.0.0:22", "[::]:22", "0.0.0.0:443",
        *(f"{installed.fleet.host(INDEX[0]).address}:{port}" for port in (6379, 16379)),
    }  # fmt: skip


def test_a_rollout_under_load_loses_no_request(installed: Operator, folder: Path) -> None:
    with load(installed, folder) as tally:
        done = installed.play("rollout.yml", application_version=SECOND, zccp_rollout_batches=[1, "50%"])
    assert done.returncode == 0, done.stdout[-8000:]
    assert installed.releases() == dict.fromkeys(NODES, SECOND)
    assert installed.drained() == []
    assert tally["failed"] == []
    assert tally["requests"] > 20


@pytest.mark.parametrize("version", [BROKEN, DEAD])
def test_a_broken_release_stops_at_the_first_host_and_is_taken_back(
    installed: Operator, folder: Path, version: str
) -> None:
    before = installed.releases()
    with load(installed, folder) as tally:
        done = installed.play("rollout.yml", application_version=version, application_health_retries=20)
    assert done.returncode == 2
    assert f"{version} failed on {NODES[0]}, which serves {before[NODES[0]]} again" in done.stdout
    assert set(recap(done)) == {NODES[0]}
    assert installed.releases() == before
    assert installed.fleet.on(NODES[0], "ls /opt/zccp/releases").split() == [FIRST, SECOND]
    assert installed.drained() == []
    assert tally["failed"] == []
    assert tally["requests"] > 10


def complete(operator: Operator, folder: Path, prompt: str, *headers: str) -> int:
    """The status of one completion through the balancer."""
    url = f"https://{operator.fleet.host(FRONT).address}/v1/completions"
    body = json.dumps({"model": "smollm2-135m", "prompt": prompt, "max_tokens": 1})
    given = [f"authorization: Bearer {(folder / 'key').read_text()}", "content-type: application/json", *headers]
    options = [option for header in given for option in ("--header", header)]
    trust = ("--cacert", str(folder / "files/ca.pem"), "--output", "/dev/null", "--write-out", "%{http_code}")
    return int(run(*operator.fleet.inside("curl", "--silent", *trust, *options, "--data-binary", body, url)))


def served_by(operator: Operator, count: int) -> list[str]:
    """The appliances that gave the last answers of the balancer, each request's last one where it was sent on."""
    lines = operator.fleet.on(FRONT, f"tail -n {count} /var/log/nginx/access.log").splitlines()
    return [re.split(r", | : ", json.loads(line)["node"])[-1] for line in lines]


def test_prompts_that_begin_alike_meet(installed: Operator, folder: Path) -> None:
    beginning = "something about everything " * 160
    assert [complete(installed, folder, f"{beginning} and {n}") for n in range(4)] == [200] * 4
    assert len(set(served_by(installed, 4))) == 1
    assert [complete(installed, folder, "Hello", f"x-zccp-route: {n}") for n in range(12)] == [200] * 12
    assert len(set(served_by(installed, 12))) > 1
    assert [complete(installed, folder, f"Prompt {n}", "x-zccp-route: same") for n in range(4)] == [200] * 4
    assert len(set(served_by(installed, 4))) == 1


def test_an_appliance_that_is_gone_is_passed_over(installed: Operator, folder: Path) -> None:
    routes = [f"x-zccp-route: {n}" for n in range(8)]
    lost = installed.fleet.host(NODES[1])
    for unit in ("zccp", "nginx"):  # first nginx says that nobody takes requests, then nobody says anything
        installed.fleet.on(lost.name, f"systemctl stop {unit}")
        assert [complete(installed, folder, "Hello", route) for route in routes] == [200] * len(routes)
        assert f"{lost.address}:443" not in served_by(installed, len(routes))
    installed.fleet.on(lost.name, "systemctl start zccp nginx")
    assert installed.play("status.yml").stdout.count("status=ready") == len(NODES)


def index_calls(operator: Operator, key: str) -> Counter[str]:
    """How often the appliances have asked their index since they were started, by labels."""
    ask = f"curl --silent --header 'authorization: Bearer {key}' http://127.0.0.1:8000/metrics"
    calls = Counter[str]()
    for name in NODES:
        rows = re.findall(r"^zccp_index_calls_total\{(.*)\} (\S+)$", operator.fleet.on(name, ask), re.MULTILINE)
        calls.update({labels: int(float(value)) for labels, value in rows})
    return calls


def test_appliances_share_one_index_in_a_cluster(installed: Operator, folder: Path) -> None:
    on = installed.fleet.on
    for name in INDEX:
        said = on(name, f"{REDIS_CLI} -h {installed.fleet.host(name).address} cluster info")
        assert {"cluster_state:ok", "cluster_slots_assigned:16384", "cluster_known_nodes:3"} <= set(said.split())
    text = " ".join(f"Paragraph {number} of a document that two of them get." for number in range(40))
    for number in range(12):
        assert complete(installed, folder, text, f"x-zccp-route: {number}") == 200
    asked, told = 'operation="propose",outcome="ok"', 'operation="publish",outcome="ok"'
    key = (folder / "key").read_text()
    wait_for(lambda: index_calls(installed, key)[asked] >= 12 and index_calls(installed, key)[told] >= 2)
    assert sum(int(on(name, f"{REDIS_CLI} dbsize")) for name in INDEX) >= 12


def test_going_back_to_an_earlier_release(installed: Operator, folder: Path) -> None:
    installed.play("rollout.yml", application_version=SECOND, zccp_rollout_batches=["100%"])
    with load(installed, folder) as tally:
        done = installed.play("rollback.yml", zccp_to=FIRST, zccp_rollout_batches=[1, "50%"])
    assert done.returncode == 0, done.stdout[-8000:]
    assert installed.releases() == dict.fromkeys(NODES, FIRST)
    assert tally["failed"] == []


def test_a_release_that_is_not_there_is_refused(installed: Operator) -> None:
    before = installed.releases()
    done = installed.play("rollback.yml", zccp_to="0.0.1")
    assert done.returncode == 2
    assert "gpu1 has no release 0.0.1; install it with rollout.yml" in done.stdout
    assert installed.releases() == before


def test_changed_settings_restart_drained_hosts(installed: Operator, folder: Path) -> None:
    before = installed.releases()
    with load(installed, folder) as tally:
        release = before[NODES[0]]
        values = {"application_version": release, "zccp_site_batches": [2, "100%"], "application_drain_s": 25}
        done = installed.play("site.yml", "--limit", "appliances", **values)
    assert done.returncode == 0, done.stdout[-8000:]
    assert done.stdout.count("gets new settings and is drained and restarted") == len(NODES)
    again = installed.play("site.yml", "--check", "--limit", NODES[0], **(values | {"application_drain_s": 24}))
    assert again.returncode == 0, again.stdout[-8000:]
    assert "gets new settings and is drained and restarted" in again.stdout
    assert installed.releases() == before
    for name in NODES:
        assert installed.fleet.on(name, "grep drain_s /etc/zccp/config.yaml").strip() == "drain_s: 25"
        assert installed.fleet.on(name, "systemctl show zccp --property TimeoutStopUSec --value").strip() == "40s"
    assert installed.drained() == []
    assert tally["failed"] == []


def test_status_is_one_line_a_host(installed: Operator) -> None:
    done = installed.play("status.yml")
    assert done.returncode == 0
    lines = re.findall(r"(gpu\d release=\S+ status=ready)\s+running=\d+ waiting=\d+ free_pages=(\d+)/\2", done.stdout)
    assert len(lines) == len(NODES)


def test_a_support_bundle_holds_no_secret(installed: Operator, folder: Path) -> None:
    done = installed.play("support_bundle.yml", zccp_bundles=str(folder / "bundles"))
    assert done.returncode == 0, done.stdout[-4000:]
    key = (folder / "key").read_text()
    for name in NODES:
        with tarfile.open(folder / "bundles" / f"{name}.tar.gz") as tar:
            texts = {member.name: tar.extractfile(member).read().decode() for member in tar if member.isfile()}  # type: ignore[union-attr]
        assert {"./doctor.txt", "./journal.txt", "./configuration.txt", "./health.txt"} <= set(texts)
        assert '"status":"ready"' in texts["./health.txt"].replace(" ", "")
        for text in texts.values():
            assert key not in text
            assert REDIS_PASSWORD not in text
            assert "write down the numbers" not in text
