"""Rollout tests take minutes and root, so they run only where they are asked for: ``make test-rollout``."""

from pathlib import Path

import pytest

from tests.rollout.fleet import missing
from tests.support.on_request import skip_unless_asked


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip with the reason where there can be no fleet or nobody has asked for one."""
    skip_unless_asked(
        items, Path(__file__).parent, "ZCCP_TEST_ROLLOUT", "takes minutes and root; run make test-rollout", missing
    )
