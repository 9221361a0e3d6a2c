"""Settings that all tests share: the CPU backend, strict dtypes, annotations that are checked, repeatable examples.

Also which tests run in one process, where several share the suite: those of a module, which share what they compile,
and all that use the real model, which share its folder and the appliance. The longest come first.
"""

import os
from typing import Any

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

_WITH_THE_MODEL = ("tests/system/", "tests/model/test_model_library.py", "tests/model/test_tokenizer_ids.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give every test its turn: what takes minutes in one test or in one process first, in that order the rest."""
    items.sort(key=lambda item: 0 if _process(item.nodeid) == "model" else 1 if item.path.stem.endswith("_code") else 2)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give every test its process."""
    from xdist.scheduler import LoadScopeScheduling  # a plug-in that need not be there

    class ByProcess(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _process(nodeid)

    return ByProcess(config, log)


def _process(nodeid: str) -> str:
    return "model" if nodeid.startswith(_WITH_THE_MODEL) else nodeid.partition("::")[0]
