"""Playbooks that run on this machine alone, into a folder of the test: no host is reached and nothing is installed."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
ANSIBLE = ROOT / "ansible"
BIN = Path(sys.executable).parent
PLAYBOOKS = ("site.yml", "rollout.yml", "rollback.yml", "status.yml", "support_bundle.yml")
EXAMPLE = ANSIBLE / "inventory" / "example"
SECRETS = {"vault_redis_password": "r" * 24, "vault_probe_key": "zk-example"}


def roles() -> list[Path]:
    """The folders of all roles."""
    return sorted(path for path in (ANSIBLE / "roles").iterdir() if path.is_dir())


def document(path: Path) -> Any:
    """What a YAML file says."""
    return yaml.safe_load(path.read_text())


def run(*command: str, home: Path) -> "subprocess.CompletedProcess[str]":
    """Run a tool of Ansible's in its folder; its caches go to ``home``."""
    environment = {
        "PATH": f"{BIN}:{os.defpath}:/usr/sbin:/sbin",
        "HOME": str(home),
        "LC_ALL": "C.UTF-8",
        "ANSIBLE_CONFIG": str(ANSIBLE / "ansible.cfg"),
        "ANSIBLE_HOME": str(home / "ansible"),
        "ANSIBLE_LOCAL_TEMP": str(home / "tmp"),
        "ANSIBLE_REMOTE_TEMP": str(home / "tmp"),
        "ANSIBLE_NOCOLOR": "1",
    }
    return subprocess.run(
        [str(BIN / command[0]), *command[1:]],
        cwd=ANSIBLE,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def play(
    tasks: list[dict[str, Any]],
    hosts: Mapping[str, Mapping[str, object]],
    folder: Path,
    *,
    facts: bool = False,
) -> "subprocess.CompletedProcess[str]":
    """Run tasks on this machine under the names of several hosts, each with variables of its own."""
    local = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
    inventory = folder / "hosts.yml"
    inventory.write_text(yaml.safe_dump({"all": {"hosts": {name: {**local, **v} for name, v in hosts.items()}}}))
    book = folder / "play.yml"
    book.write_text(yaml.safe_dump([{"hosts": "all", "gather_facts": facts, "tasks": tasks}]))
    return run("ansible-playbook", "-i", str(inventory), str(book), "-e", json.dumps({"playbook": "test"}), home=folder)
