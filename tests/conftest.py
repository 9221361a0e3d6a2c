"""Settings that all tests share: the CPU backend, strict dtypes, annotations that are checked, repeatable examples.

Also which tests run in one process, where several share the suite: those of a module, which share what they compile,
and all that use the real model, which share its folder and the appliance. The longest come first.
"""

import os
from pathlib import Path

import pytest
from hypothesis import settings
from jaxtyping import install_import_hook

from pallas_kernels.platform import find_gpu_compiler

find_gpu_compiler()
# read by jax when it is first imported, here and in the processes that tests start
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # noqa: TID251 - no configuration exists yet
os.environ.setdefault("JAX_NUMPY_DTYPE_PROMOTION", "strict")  # noqa: TID251

# an int where a float is annotated is fine, as it is for a type checker
_CHECKER = "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))"
install_import_hook(["pallas_kernels", "planner"], _CHECKER)

settings.register_profile("ci", derandomize=True, deadline=None)
settings.load_profile("ci")

_WITH_THE_MODEL = ("test_model_library", "test_tokenizer_ids")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give every test its process and its turn."""
    items.sort(key=lambda item: _turn(item.path))
    for item in items:
        with_model = item.get_closest_marker("system") is not None or item.path.stem in _WITH_THE_MODEL
        item.add_marker(pytest.mark.xdist_group("the model" if with_model else str(item.path)))


def _turn(file: Path) -> int:
    """What takes minutes in one test or in one process first, in that order the rest."""
    if "system" in file.parts or file.stem in _WITH_THE_MODEL:
        return 0
    return 1 if file.stem.endswith("_code") else 2
