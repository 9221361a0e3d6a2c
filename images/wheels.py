#!/usr/bin/env python3
"""Fetches every wheel that a lock names for another Python 3.11, so that an image or a host needs no package index.

``images/wheels.py LOCK FOLDER --python 3.11.2``: pip judges the conditions of a lock by the Python that runs it, so the
entries that hold there are chosen here first. Every file is checked against the lock's hashes.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from packaging.markers import Marker


def entries(lock: str, python: str) -> str:
    """The entries of a lock that hold for a Python version, without their conditions."""
    place = {"python_version": ".".join(python.split(".")[:2]), "python_full_version": python}
    kept: list[str] = []
    wanted = True
    for line in lock.splitlines():
        if line[:1].isalnum():
            name, _, condition = line.removesuffix("\\").partition(" ; ")
            wanted = not condition or Marker(condition).evaluate(place)
            kept += [f"{name.strip()} \\"] * wanted
        elif wanted:
            kept.append(line)
    return "\n".join(kept) + "\n"


def main() -> int:
    """Fetch; pip's exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lock", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.11.2", help="version of the Python that will use them; Debian 12's own")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    chosen = given.folder / "requirements.txt"
    chosen.write_text(entries(given.lock.read_text(encoding="utf-8"), given.python), encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["--require-hashes", "--dest", str(given.folder), "--requirement", str(chosen)]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
