"""The cpu image from its recipe to an update that fails: built, booted without KVM, asked, restarted, updated."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from images.disk import write_manifest
from tests.image.machine import Machine, booted
from tests.support.running_appliance import zccp

ROOT = Path(__file__).parents[2]
OUT = ROOT / "build" / "image"
ACCELERATOR = os.environ.get("ZCCP_TEST_ACCELERATOR", "tcg")  # noqa: TID251


@dataclass(frozen=True)
class Made:
    """A running machine, the key of its client, the release that its image was made from, and the signing key."""

    machine: Machine
    key: str
    release: Path
    signing_key: Path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    folder = tmp_path_factory.mktemp("image")
    identity = folder / "id"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(identity)], check=True)
    config = folder / "keys.yaml"
    config.write_text(yaml.safe_dump({"paths": {"home": str(folder / "home"), "run": str(folder / "run")}}))
    added = zccp("keys", "add", "acceptance", "--admin", "--json", "--config", str(config))
    assert added.returncode == 0, added.stderr
    seed = folder / "seed.yaml"
    seed.write_text(
        yaml.safe_dump({
            "hostname": "gpu-under-test",
            "authorized_keys": [identity.with_suffix(".pub").read_text().strip()],
            "keys": json.loads((folder / "home/keys.json").read_text()),
        })
    )  # fmt: skip
    command = [sys.executable, "-m", "images.build", "--variant", "cpu", "--out", str(OUT), "--seed", str(seed)]
    subprocess.run(command, cwd=ROOT, check=True)
    with booted(OUT / "cpu/disk.raw", folder, identity, ACCELERATOR) as machine:
        machine.wait(machine.ready)
        yield Made(machine, json.loads(added.stdout)["key"], OUT / "cpu/release", OUT / "key.pem")


def ask(made: Made) -> str:
    asked = {"model": "smollm2-135m", "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
    body = json.dumps(asked)
    version, status, text = made.machine.curl(
        "/v1/completions", "--data-binary", body, "--header", "content-type: application/json", "--header",
        f"authorization: Bearer {made.key}",
    )  # fmt: skip
    assert (version, status) == ("2", 200), text
    return json.loads(text)["choices"][0]["text"]


def test_it_answers_over_http2_and_only_to_a_key(made: Made) -> None:
    assert "Paris" in ask(made)
    assert made.machine.curl("/v1/models")[1] == 401


def test_it_is_the_host_of_its_seed_and_holds_no_secret_of_it(made: Made) -> None:
    machine = made.machine
    assert machine.run("hostname").strip() == "gpu-under-test"
    assert machine.run("ls /efi/zccp").split() == ["seed.taken.yaml", "zccp-a"]
    assert "acceptance" not in machine.run("cat /efi/zccp/seed.taken.yaml")
    machine.wait(lambda: machine.run("systemctl is-system-running || true").strip() == "running")
    assert machine.run("systemctl --failed --plain --no-legend") == ""


def test_the_firmware_started_nothing_that_is_not_signed(made: Made) -> None:
    variable = "/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
    assert made.machine.run(f"od -An -tu1 {variable}").split()[-1] == "1"
    assert "[integrity]" in made.machine.run("cat /sys/kernel/security/lockdown")


def test_nothing_was_compiled_and_nobody_else_gets_in(made: Made) -> None:
    machine = made.machine
    _, status, metrics = machine.curl("/metrics", "--header", f"authorization: Bearer {made.key}")
    assert status in (200, 403)  # the address of the host's own loopback is not the machine's
    inside = machine.run(
        f"curl -s -H 'authorization: Bearer {made.key}' http://127.0.0.1:8000/metrics | grep ^zccp_compilations_total"
    )
    assert {line.split()[-1] for line in inside.splitlines()} == {"0.0"}, metrics[:0]
    listening = machine.run("ss -Hltn | awk '{print $4}'").split()
    public = {address for address in listening if not address.startswith(("127.", "[::1]"))}
    assert {address.rpartition(":")[2] for address in public} <= {"22", "443", "5355"}
    assert "policy drop" in machine.run("nft list chain inet filter input")
    assert machine.run("passwd -S root").split()[1] in ("L", "LK", "NP")
    assert machine.run("awk -F: '$2 ~ /^[$]/' /etc/shadow") == ""
    assert machine.run("findmnt -no OPTIONS /").split(",")[0] == "ro"
    score = machine.run("systemd-analyze security --no-pager zccp.service | tail -1")
    assert float(score.split(":")[1].split()[0]) <= 3.0, score


def test_it_is_ready_again_after_a_restart(made: Made) -> None:
    machine = made.machine
    identity = machine.run("cat /etc/machine-id /data/host/ssh_host_ed25519_key.pub")
    machine.restart()
    machine.wait(machine.ready)
    assert "Paris" in ask(made)
    assert machine.run("cat /data/host/machine-id /data/host/ssh_host_ed25519_key.pub") == identity
    assert machine.run("cat /etc/machine-id") in identity


def test_an_update_boots_from_the_other_slot_and_stays(made: Made, tmp_path: Path) -> None:
    machine = made.machine
    _update(made, _release(made, tmp_path, "9.0.0"))
    machine.wait(machine.ready)
    machine.wait(lambda: "zccp-b  9.0.0  proven  (running)" in machine.run("zccp-host status"))
    assert "Paris" in ask(made)


def test_a_release_that_is_damaged_or_of_another_signer_changes_nothing(made: Made, tmp_path: Path) -> None:
    machine, before = made.machine, made.machine.run("zccp-host status; ls -R /efi")
    release = _release(made, tmp_path, "9.0.1")
    machine.run("rm -rf /data/release")
    machine.copy(release, "/data/release")
    machine.run("truncate -s -1 /data/release/initrd.img")
    assert "does not have the" in machine.run("zccp-host update /data/release 2>&1 || true")
    machine.run("sed -i s/9.0.1/9.0.2/ /data/release/manifest.json")
    assert "not signed by the key" in machine.run("zccp-host update /data/release 2>&1 || true")
    assert machine.run("zccp-host status; ls -R /efi") == before


def test_an_update_that_does_not_work_is_left_by_itself(made: Made, tmp_path: Path) -> None:
    machine = made.machine
    _update(made, _release(made, tmp_path, "9.1.0", broken=True))
    machine.wait(lambda: "zccp-b  9.0.0  proven  (running)" in machine.run("zccp-host status"), 3000.0)
    machine.wait(machine.ready)
    assert "Paris" in ask(made)
    assert "zccp-a  9.1.0  on trial, 0 tries left" in machine.run("zccp-host status")


def _update(made: Made, release: Path) -> None:
    made.machine.run("rm -rf /data/release")
    made.machine.copy(release, "/data/release")
    made.machine.restart("zccp-host update /data/release --reboot", 1800)


def _release(made: Made, folder: Path, version: str, *, broken: bool = False) -> Path:
    """The image's own release under another version; broken: its appliance ends at once."""
    release = folder / version
    shutil.copytree(made.release, release)
    if broken:
        root = release / "root.ext4"
        subprocess.run(["zstd", "-q", "-d", "--rm", str(root) + ".zst"], check=True)
        stub = folder / "stub"
        stub.write_text("#!/bin/sh\nexit 1\n")
        target = subprocess.run(
            ["debugfs", "-R", "ls -p /opt/zccp/releases", str(root)], capture_output=True, text=True, check=True
        ).stdout  # fmt: skip
        names = [line.split("/")[5] for line in target.splitlines() if line.count("/") > 5]
        (name,) = [name for name in names if not name.startswith(".")]
        place = f"/opt/zccp/releases/{name}/bin/zccp"
        script = folder / "script"
        script.write_text(f"rm {place}\nwrite {stub} {place}\nset_inode_field {place} mode 0100755\n")
        subprocess.run(["debugfs", "-w", "-f", str(script), str(root)], check=True, capture_output=True)
        subprocess.run(["zstd", "-q", "-3", "--rm", str(root)], check=True)
    write_manifest(release, "cpu", version, made.signing_key)
    return release
