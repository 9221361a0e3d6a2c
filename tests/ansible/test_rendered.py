"""What templates become: a configuration that the appliance takes, units for systemd, an nginx that starts."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from appliance.config import load
from tests.ansible.playing import ANSIBLE, EXAMPLE, SECRETS, document, play
from tests.rollout.materials import certificates
from tests.support.front import NGINX, needs_nginx

SCORE = 3.0
"""Most that ``systemd-analyze security`` may say; 10 is worst. The bound is the project's."""
TEMPLATES = {
    "config.yaml": "application/templates/config.yaml.j2",
    "zccp.service": "application/templates/zccp.service.j2",
    "zccp-shared-memory.service": "host/templates/zccp-shared-memory.service.j2",
    "run-zccp_bodies.mount": "host/templates/bodies.mount.j2",
    "60-zccp.conf": "host/templates/sysctl.conf.j2",
    "redis.conf": "redis/templates/redis.conf.j2",
    "nginx.conf": "balancer/templates/nginx.conf.j2",
}
ACCELERATORS = ("none", "a100")


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The templates with the example's variables, in a folder for each accelerator."""
    folder = tmp_path_factory.mktemp("rendered")
    values: dict[str, Any] = {}
    for role in ("host", "application", "redis", "balancer"):
        values |= document(ANSIBLE / "roles" / role / "defaults" / "main.yml")
    values |= document(EXAMPLE / "group_vars/appliances/main.yml") | SECRETS
    values |= {"balancer_tls": str(folder), "balancer_nodes_directory": str(folder / "nodes")}
    hosts: dict[str, dict[str, Any]] = {
        name: {**values, "zccp_accelerator": name, "inventory_dir": "/inventory", "ansible_host": "192.0.2.1"}
        for name in ACCELERATORS
    }
    for name in ACCELERATORS:
        (folder / name).mkdir()
    loop = [{"src": str(ANSIBLE / "roles" / path), "name": name} for name, path in TEMPLATES.items()]
    task = {
        "src": "{{ item.src }}",
        "dest": f"{folder}/{{{{ inventory_hostname }}}}/{{{{ item.name }}}}",
        "mode": "0600",
    }
    done = play([{"name": "Render", "ansible.builtin.template": task, "loop": loop}], hosts, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_configuration_is_one(rendered: Path) -> None:
    config = load(rendered / "none" / "config.yaml")
    assert config.server.host == "127.0.0.1"
    assert config.server.workers == 2
    assert config.paths.home == "/var/lib/zccp"
    assert config.proxy.port == 443
    assert config.proxy.directory == "/run/zccp/proxy"
    assert config.proxy.body_directory == "/run/zccp_bodies"
    assert config.auth.keys_file == "/etc/zccp/keys.json"
    assert config.cache.redis_url == f"redis://:{SECRETS['vault_redis_password']}@127.0.0.1:6379/0"


def test_shared_memory_holds_the_segments_of_two_runs(rendered: Path) -> None:
    defaults = document(ANSIBLE / "roles/host/defaults/main.yml")
    config = load(rendered / "none" / "config.yaml")
    assert defaults["host_segment_count"] == config.shared_memory.segment_count
    assert defaults["host_segment_size_kb"] == config.shared_memory.segment_size_kb
    size = re.search(r"size=(\d+)M /dev/shm", (rendered / "none" / "zccp-shared-memory.service").read_text())
    assert size is not None
    assert int(size[1]) == 2 * 128 + 256


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@pytest.mark.parametrize("accelerator", ACCELERATORS)
def test_the_unit_is_confined(rendered: Path, accelerator: str) -> None:
    unit = rendered / accelerator / "zccp.service"
    threshold = f"--threshold={SCORE * 10:.0f}"
    command = ["systemd-analyze", "security", "--no-pager", "--offline=true", threshold, str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr


@pytest.mark.parametrize("accelerator", ACCELERATORS)
def test_the_unit_says_how_it_is_watched_and_ended(rendered: Path, accelerator: str) -> None:
    lines = (rendered / accelerator / "zccp.service").read_text().splitlines()
    config = load(rendered / accelerator / "config.yaml")
    for wanted in (
        "Type=notify",
        "WatchdogSec=60",
        "User=zccp",
        "KillMode=mixed",
        "LimitCORE=0",
        "ExecReload=/bin/kill -HUP $MAINPID",
        f"TimeoutStopSec={config.server.drain_s + 15:.0f}",
    ):
        assert wanted in lines
    assert ("PrivateDevices=yes" in lines) == (accelerator == "none")
    assert ("DeviceAllow=/dev/kmsg r" in lines) == (accelerator == "a100")


def test_redis_keeps_to_itself(rendered: Path) -> None:
    lines = (rendered / "none" / "redis.conf").read_text().splitlines()
    assert {"bind 127.0.0.1 -::1", 'save ""', "appendonly no", "maxmemory-policy allkeys-lru"} <= set(lines)
    assert f"requirepass {SECRETS['vault_redis_password']}" in lines


@needs_nginx
def test_nginx_takes_the_configuration_of_the_balancer(rendered: Path) -> None:
    assert NGINX is not None
    certificates(rendered, ["192.0.2.1"])
    for name, copy in (("fleet.pem", "fullchain.pem"), ("fleet-key.pem", "key.pem"), ("ca.pem", "nodes-ca.pem")):
        shutil.copy(rendered / name, rendered / copy)
    (rendered / "nodes").mkdir()
    (rendered / "nodes" / "gpu1.conf").write_text("server 192.0.2.11:443 max_fails=1 fail_timeout=2s;\n")
    (rendered / "nodes" / "gpu2.conf").write_text("server 192.0.2.12:443 max_fails=1 fail_timeout=2s down;\n")
    text = (rendered / "none" / "nginx.conf").read_text().replace("/var/log/nginx", str(rendered))
    (rendered / "nginx.conf").write_text(text)
    options = [
        "-t",
        "-q",
        "-e",
        str(rendered / "error.log"),
        "-g",
        f"pid {rendered}/pid;",
        "-c",
        str(rendered / "nginx.conf"),
    ]
    done = subprocess.run([NGINX, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_drained_host_keeps_its_line() -> None:
    task = document(ANSIBLE / "tasks" / "balance.yml")[0]["ansible.builtin.lineinfile"]
    pattern = re.compile(task["regexp"])
    admitted = "server 192.0.2.11:443 max_fails=1 fail_timeout=2s;"
    drained = "server 192.0.2.11:443 max_fails=1 fail_timeout=2s down;"
    for line in (admitted, drained):
        assert pattern.sub(r"\g<1>;", line) == admitted
        assert pattern.sub(r"\g<1> down;", line) == drained
