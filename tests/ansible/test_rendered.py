"""What templates become: a configuration that the appliance takes, units for systemd, an nginx that starts."""

import re
import shutil
import subprocess
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from appliance.config import ApplianceConfig, load
from appliance.nginx import fleet_config
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
    "fleet.yaml": "balancer/templates/config.yaml.j2",
}
ACCELERATORS = ("none", "a100")


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The templates with the example's variables, in a folder for each accelerator."""
    folder = tmp_path_factory.mktemp("rendered")
    values: dict[str, Any] = {}
    for role in ("host", "application", "redis", "balancer"):
        values |= document(ANSIBLE / "roles" / role / "defaults" / "main.yml")
    for group in ("all", "appliances", "balancers"):
        values |= document(EXAMPLE / "group_vars" / group / "main.yml")
    values |= SECRETS
    drained = b64encode(b"    server 192.0.2.1:443 max_fails=1 fail_timeout=5s down;\n").decode()
    values |= {"balancer_nodes_group": "all", "balancer_tls": str(folder), "balancer_installed": {"content": drained}}
    hosts: dict[str, dict[str, Any]] = {
        name: {**values, "zccp_accelerator": name, "inventory_dir": "/inventory", "ansible_host": f"192.0.2.{number}"}
        for number, name in enumerate(ACCELERATORS, 1)
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


def test_redis_alone_keeps_to_itself(rendered: Path) -> None:
    lines = (rendered / "none" / "redis.conf").read_text().splitlines()
    assert {"bind 127.0.0.1 -::1", 'save ""', "appendonly no", "maxmemory-policy allkeys-lru"} <= set(lines)
    assert f"requirepass {SECRETS['vault_redis_password']}" in lines


def test_the_balancer_s_configuration_names_the_appliances_and_keeps_the_drained_one(rendered: Path) -> None:
    config = load(rendered / "none" / "fleet.yaml")
    assert config.fleet.nodes == ("https://192.0.2.2:443", "https://192.0.2.1:443")
    assert config.fleet.drained == ("https://192.0.2.1:443",)
    assert config.fleet.server_name == "zccp.internal"
    assert (config.proxy.host, config.proxy.port) == ("0.0.0.0", 443)
    assert config.proxy.body_directory.startswith("/run/")  # in memory, since bodies are prompts


@needs_nginx
def test_nginx_takes_what_is_printed_for_the_balancer(rendered: Path) -> None:
    assert NGINX is not None
    certificates(rendered, ["192.0.2.1"])
    for name, copy in (("fleet.pem", "fullchain.pem"), ("fleet-key.pem", "key.pem"), ("ca.pem", "nodes-ca.pem")):
        shutil.copy(rendered / name, rendered / copy)
    text = fleet_config(load(rendered / "none" / "fleet.yaml"))
    for old, new in (("/var/log/nginx", rendered), ("/run/zccp_front_bodies", rendered / "bodies")):
        text = text.replace(old, str(new))
    (rendered / "nginx.conf").write_text(text)
    options = ["-e", str(rendered / "error.log"), "-g", f"pid {rendered}/pid;", "-c", str(rendered / "nginx.conf")]
    done = subprocess.run([NGINX, "-t", "-q", *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def drained(config: ApplianceConfig, *nodes: str) -> ApplianceConfig:
    """The same fleet with other nodes drained."""
    return replace(config, fleet=replace(config.fleet, drained=nodes))


def test_a_playbook_drains_by_the_word_that_the_appliance_prints_for_it(rendered: Path, tmp_path: Path) -> None:
    config = load(rendered / "none" / "fleet.yaml")
    one, other = config.fleet.nodes
    before, both, after = (fleet_config(drained(config, *names)) for names in ((), (one, other), (other,)))
    assert len({before, both, after}) == 3
    asked = document(ANSIBLE / "tasks" / "balance.yml")[1]["ansible.builtin.lineinfile"]
    file = tmp_path / "nginx.conf"
    file.write_text(before)
    task = {name: asked[name] for name in ("regexp", "line", "backrefs")} | {"path": str(file), "mode": "0600"}
    addresses = {"a": "192.0.2.1", "b": "192.0.2.2", "c": "192.0.2.3"}
    hosts = {name: {"ansible_host": address} for name, address in addresses.items()}
    steps = [("a b c", False, both), ("b c", True, after)]
    for names, admitted, wanted in steps:
        tasks = [
            {
                "name": "Write the word",
                "ansible.builtin.lineinfile": task,
                "vars": {"zccp_admitted": admitted},
                "throttle": 1,
                "when": f"inventory_hostname in '{names}'.split()",
            }
        ]
        done = play(tasks, hosts, tmp_path)
        assert done.returncode == 0, done.stdout
        assert file.read_text() == wanted
