"""The repository's own checks as tests: format, types, layers, spelling, dependencies, scripts."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
CHECKS = {
    "lint": ("ruff", "check", "--no-cache", "."),
    "format": ("ruff", "format", "--no-cache", "--check", "."),
    "types": ("pyright",),
    "layers": ("lint-imports", "--no-cache"),
    "spelling": ("codespell",),
    "dependencies": ("deptry", "."),
    "scripts": ("shellcheck", ".ci/run", "images/rootfs.sh", "images/container/build.sh"),
}


def tracked(*patterns: str) -> list[Path]:
    """The files that belong to the repository: committed, or new and not ignored."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / line for line in done.stdout.splitlines() if (ROOT / line).is_file()]


@pytest.mark.parametrize("check", CHECKS)
def test_check(check: str) -> None:
    program, *arguments = CHECKS[check]
    done = subprocess.run([BIN / program, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"


def test_yaml_files_are_tidy() -> None:
    files = [str(path) for path in tracked("*.yaml", "*.yml")]
    if not files:
        return
    rules = "{extends: default, rules: {line-length: {max: 120}, document-start: disable}}"
    done = subprocess.run([BIN / "yamllint", "-d", rules, *files], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
