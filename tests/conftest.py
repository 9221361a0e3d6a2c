"""Settings that all tests share: the CPU backend, strict dtypes, annotations that are checked, repeatable examples."""

import os

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
