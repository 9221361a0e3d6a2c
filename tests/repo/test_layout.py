"""What the repository may hold: names at the top, sizes of files, words that have no place in it."""

import re
from pathlib import Path

import pytest

from tests.repo.test_checks import ROOT, tracked

TOP = {
    *("appliance", "pallas_kernels", "planner", "api", "tests", "images", "ansible", "pyproject.toml"),
    *("README.md", "LICENSE", "CONTRIBUTING.md", "CHANGELOG.md", "DECISIONS.md", "Makefile"),
    *("requirements.lock", "requirements-dev.lock", "requirements-aot.lock", "requirements-cuda12.lock"),
    *(".ci", ".gitignore"),
}
MAX_LINES = 500
PROSE = {
    *("requirements.lock", "requirements-dev.lock", "requirements-cuda12.lock"),
    *("calibration.txt", "LICENSE", "README.md", "DECISIONS.md"),
}
FORBIDDEN = {  # written so that this file does not hold what it looks for
    "a task without a reason": re.compile(r"\b(?:[T]ODO|[F]IXME|[X]XX|[H]ACK)\b(?!\(\S)"),
    "a host of a package index": re.compile(r"[p]ypi\.org|[f]iles\.pythonhosted|registry\.[n]pmjs|[d]eb\.debian"),
    "a path of one machine": re.compile(r"(?<![\w.~])/(?:work|root|opt|tmp/x|home)/(?!zccp\b)\w"),
}
SOURCES = (
    *("*.py", "*.toml", "*.md", "*.cc", "*.h", "*.json", "*.yaml", "*.yml", "*.j2", "*.sh", "*.lock", "*.cfg"),
    *("Makefile", "Containerfile", ".ci/run"),
)


def test_only_known_names_stand_at_the_top() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in tracked()} <= TOP


def test_no_file_passes_the_ceiling() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for path in tracked()
        if path.name not in PROSE and (lines := len(path.read_bytes().splitlines())) > MAX_LINES
    }
    assert long == {}


@pytest.mark.parametrize("kind", FORBIDDEN)
def test_words_without_a_place_here(kind: str) -> None:
    found: list[str] = []
    for path in tracked(*SOURCES):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if FORBIDDEN[kind].search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert found == []


def test_locks_pin_every_package_exactly_and_no_gpu_library() -> None:
    for name in ("requirements.lock", "requirements-dev.lock"):
        pins = [line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith((" ", "#"))]
        assert pins
        for pin in pins:
            assert re.match(r"[\w.\[\]-]+==[\w.]+(?: ;.*)?(?: \\)?$", pin), pin
            assert not re.match(r"nvidia|triton|cuda", pin), pin


def test_the_gpu_compiler_is_pinned_and_needs_no_driver() -> None:
    pins = (ROOT / "requirements-aot.lock").read_text().splitlines()
    assert [pin.partition("==")[0] for pin in pins] == ["jax-cuda12-pjrt", "jax-cuda12-plugin", "nvidia-cuda-nvcc-cu12"]
    jax = next(line for line in (ROOT / "requirements.lock").read_text().splitlines() if line.startswith("jax=="))
    assert {pin.partition("==")[2] for pin in pins[:2]} == {jax.partition("==")[2].partition(" ")[0]}


def test_gpu_hosts_have_the_packages_of_all_hosts_and_their_libraries() -> None:
    names = ("requirements.lock", "requirements-cuda12.lock")
    common, gpu = (set((ROOT / name).read_text().splitlines()) for name in names)
    assert common <= gpu
    more = {line.partition("==")[0] for line in gpu - common if line[:1].isalpha()}
    assert {name.split("-")[0] for name in more} == {"jax", "nvidia"}
    assert {"jax-cuda12-plugin", "jax-cuda12-pjrt", "nvidia-nccl-cu12"} <= more


def test_every_package_initialiser_imports_nothing() -> None:
    for folder in ("api", "appliance", "planner", "pallas_kernels"):
        for path in tracked(f"{folder}/**/__init__.py", f"{folder}/__init__.py"):
            assert not re.search(r"^\s*(?:from|import) ", path.read_text(), re.MULTILINE), path


def test_images_and_ansible_are_no_packages() -> None:
    assert not [path for path in tracked("images", "ansible") if path.name == "__init__.py"]


def test_a_test_file_name_is_used_once() -> None:
    names = [path.name for path in tracked("tests/**/test_*.py")]
    assert sorted(names) == sorted(set(names))


def test_ci_is_executable() -> None:
    assert Path(ROOT / ".ci" / "run").stat().st_mode & 0o111
