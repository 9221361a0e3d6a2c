"""Rollout tests take minutes and root, so they run only where they are asked for: ``make test-rollout``."""

import os
from pathlib import Path

import pytest

from tests.rollout.fleet import missing

WANTED = bool(os.environ.get("ZCCP_TEST_ROLLOUT"))  # noqa: TID251


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip with the reason where there can be no fleet or nobody has asked for one."""
    reason = missing() if WANTED else "takes minutes and root; run make test-rollout"
    for item in items:
        if reason and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))
