"""Tests that take many minutes and root run only where they are asked for, by a command of their own."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest


def skip_unless_asked(
    items: Sequence[pytest.Item], folder: Path, variable: str, otherwise: str, missing: Callable[[], str]
) -> None:
    """Skip the tests of a folder with the reason: nobody asked through a variable, or something is missing here."""
    reason = missing() if os.environ.get(variable) else otherwise  # noqa: TID251
    for item in items:
        if reason and folder in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))
