"""Which entries of a lock a Python of another version needs."""

from pathlib import Path

from packaging.requirements import Requirement

from tests.support.scripts import loaded

ROOT = Path(__file__).parents[2]
LOCK = """\
async-timeout==5.0.1 ; python_full_version < '3.11.3' \\
    --hash=sha256:aa
click==8.5.1 \\
    --hash=sha256:bb \\
    --hash=sha256:cc
colorama==0.4.6 ; sys_platform == 'win32' \\
    --hash=sha256:dd
"""


def test_entries_that_hold_for_the_other_python_lose_their_condition() -> None:
    first, rest = loaded(ROOT / "images" / "wheels.py").entries(LOCK, "3.11.2").split("click", 1)
    assert first == "async-timeout==5.0.1 \\\n    --hash=sha256:aa\n"
    assert rest == "==8.5.1 \\\n    --hash=sha256:bb \\\n    --hash=sha256:cc\n"
    assert loaded(ROOT / "images" / "wheels.py").entries(LOCK, "3.11.7").startswith("click==8.5.1")


def test_the_lock_itself_is_read_whole() -> None:
    text = loaded(ROOT / "images" / "wheels.py").entries((ROOT / "requirements.lock").read_text(), "3.11.2")
    names = [Requirement(line.removesuffix(" \\")).name for line in text.splitlines() if line[0].isalnum()]
    assert len(names) == len(set(names))
    assert {"jax", "async-timeout", "litestar"} <= set(names)
    assert "colorama" not in names
    assert " ; " not in text
