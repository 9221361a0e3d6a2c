"""Tests of whole images take many minutes and root, so they run only where they are asked for: ``make test-image``."""

from pathlib import Path

import pytest

from tests.image.machine import missing
from tests.support.on_request import skip_unless_asked


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip with the reason where no machine can be started or nobody has asked for one."""
    skip_unless_asked(
        items, Path(__file__).parent, "ZCCP_TEST_IMAGE", "takes many minutes and root; run make test-image", missing
    )
