"""The implementations of an op; ``native`` is skipped by name where this host cannot build or run it."""

import pytest

from pallas_kernels import native
from pallas_kernels.platform import NATIVE_FEATURES, cpu_features


@pytest.fixture(scope="session")
def missing_for_native() -> str:
    """What this host lacks for the native kernels; empty where they are compiled and registered."""
    missing = NATIVE_FEATURES - set(cpu_features())
    if missing:
        return f"native kernels need {sorted(missing)}, which this CPU lacks"
    if native.compiler() is None:
        return "native kernels need a C++ compiler"
    native.register(native.compile_library())
    return ""


@pytest.fixture(params=["reference", "xla", "native"])
def implementation(request: pytest.FixtureRequest) -> str:
    """Each implementation in turn."""
    if request.param == "native" and (missing := request.getfixturevalue("missing_for_native")):
        pytest.skip(missing)
    return request.param


@pytest.fixture(scope="session")
def fast_implementations(missing_for_native: str) -> tuple[str, ...]:
    """The implementations beside the reference that this host can run."""
    return ("xla",) if missing_for_native else ("xla", "native")
