"""Tests of whole images take many minutes and root, so they run only where they are asked for: ``make test-image``."""

import os
from pathlib import Path

import pytest

from tests.image.machine import missing

WANTED = bool(os.environ.get("ZCCP_TEST_IMAGE"))  # noqa: TID251


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip with the reason where no machine can be started or nobody has asked for one."""
    reason = missing() if WANTED else "takes many minutes and root; run make test-image"
    for item in items:
        if reason and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))
