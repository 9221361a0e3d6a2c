"""Tests that take many minutes and root run only where they are asked for, by a command of their own."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest


def skip_unless_asked(
    items: Sequence[pytest.Item], folder: Path, variable: str, otherwise: str, missing: Callable[[], str]
) -> None:
    """Skip the tests of a folder with the reason, unless they are asked for through a variable.

    Raises:
        pytest.UsageError: they are asked for, and something that they need is missing here.
    """
    own = [item for item in items if folder in item.path.parents]
    if os.environ.get(variable):  # noqa: TID251
        if own and (reason := missing()):
            raise pytest.UsageError(f"{variable} is set, but {reason}")
        return
    for item in own:
        item.add_marker(pytest.mark.skip(reason=otherwise))
