"""The playbooks and roles are well formed, typed and free of secrets."""

import re
from pathlib import Path

import pytest

from tests.ansible.playing import ANSIBLE, EXAMPLE, PLAYBOOKS, SECRETS, document, roles, run

SHARED = {"zccp_accelerator", "application_version", "application_model"}


@pytest.mark.parametrize("playbook", PLAYBOOKS)
def test_a_playbook_is_read_without_complaint(playbook: str, tmp_path: Path) -> None:
    done = run("ansible-playbook", "--syntax-check", "-i", str(EXAMPLE), playbook, home=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


def test_the_linter_of_ansible_passes_in_its_strictest_profile(tmp_path: Path) -> None:
    assert document(ANSIBLE / ".ansible-lint")["profile"] == "production"
    done = run("ansible-lint", "--offline", "--nocolor", *PLAYBOOKS, home=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Profile 'production' was required, and it passed" in done.stderr


def test_yaml_is_tidy_and_warnings_count(tmp_path: Path) -> None:
    done = run("yamllint", "--strict", ".", home=tmp_path)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("role", roles(), ids=lambda path: path.name)
def test_every_variable_of_a_role_is_typed_and_described(role: Path) -> None:
    specs = document(role / "meta" / "argument_specs.yml")["argument_specs"]
    defaults = document(role / "defaults" / "main.yml")
    for options in (spec["options"] for spec in specs.values()):
        assert set(defaults) <= set(options)
        for name, option in options.items():
            assert {"type", "description"} <= set(option), name
            assert option["description"].endswith("."), name
            assert option.get("required", False) == (name not in defaults), name
            assert name.startswith(f"{role.name}_") or name in SHARED, name


def test_every_role_is_used_and_refuses_other_systems() -> None:
    site = (ANSIBLE / "site.yml").read_text()
    tasks = "".join(path.read_text() for path in ANSIBLE.glob("roles/*/tasks/*.yml"))
    for role in roles():
        assert f"role: {role.name}\n" in site or f"name: {role.name}\n" in tasks
        assert document(role / "meta" / "main.yml")["galaxy_info"]["role_name"] == role.name


def test_only_modules_of_ansible_itself_are_used() -> None:
    for path in (*ANSIBLE.glob("*.yml"), *ANSIBLE.glob("tasks/*"), *ANSIBLE.glob("roles/*/tasks/*")):
        for module in re.findall(r"^\s*-?\s*([a-z_]+\.[a-z_]+\.[a-z_]+):", path.read_text(), re.MULTILINE):
            assert module.startswith("ansible.builtin."), f"{path}: {module}"


def test_the_example_holds_no_secret_and_names_what_belongs_into_the_vault() -> None:
    example = document(EXAMPLE / "group_vars/all/vault.example.yml")
    assert example == dict.fromkeys(SECRETS, "")
    text = "".join(path.read_text() for path in EXAMPLE.rglob("*.yml"))
    assert set(re.findall(r"\{\{ (vault_\w+) \}\}", text)) == set(SECRETS)
    assert not re.search(r"BEGIN [A-Z ]*PRIVATE KEY|\bzk-\w{8}", text)


def test_a_failed_host_stops_a_rollout() -> None:
    for playbook in ("rollout.yml", "rollback.yml"):
        (play,) = document(ANSIBLE / playbook)
        assert play["max_fail_percentage"] == 0
        assert play["serial"] == "{{ zccp_rollout_batches | default([1, '25%']) }}"
    assert document(ANSIBLE / "tasks" / "return.yml")[-1]["ansible.builtin.fail"]
