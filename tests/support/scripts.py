"""Scripts that belong to no package, as modules that tests can call."""

import importlib.util
from pathlib import Path
from types import ModuleType


def loaded(script: Path) -> ModuleType:
    """A script as a module of its own, not registered under any name."""
    spec = importlib.util.spec_from_file_location(script.stem, script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
