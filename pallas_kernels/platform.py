"""The only place that asks which CPU, instruction sets and compilers are present. Never imports jax."""

import platform as host_platform
import sys
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
_NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")
_RELEVANT = (
    "amx", "avx", "bmi", "f16c", "fma", "movbe", "sse4", "asimd", "bf16", "i8mm", "sve",
)  # fmt: skip

NATIVE_FEATURES = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"})
"""Instruction sets without which the native CPU kernels cannot run."""


def cpu_model() -> str:
    """The CPU's own name, for reports; ``unknown`` where the system does not tell."""
    for line in _cpuinfo():
        if line.startswith(("model name", "Processor")):
            return line.split(":", 1)[1].strip()
    return host_platform.processor() or "unknown"


def cpu_features() -> tuple[str, ...]:
    """Instruction-set extensions of this CPU that compiled code may depend on, sorted."""
    for line in _cpuinfo():
        if line.startswith(("flags", "Features")):
            flags = line.split(":", 1)[1].split()
            return tuple(sorted(flag for flag in flags if flag.startswith(_RELEVANT)))
    return ()


def nvidia_gpus() -> tuple[str, ...]:
    """Models of the NVIDIA GPUs that the driver has taken, for reports; empty without the driver."""
    lines = [
        line
        for information in sorted(_NVIDIA_GPUS.glob("*/information"))
        for line in information.read_text().splitlines()
    ]
    return tuple(line.split(":", 1)[1].strip() for line in lines if line.startswith("Model:"))


def find_gpu_compiler() -> None:
    """Put a compiler for GPUs that lies beside the environment on the path; call before jax is imported.

    It lies in a folder of its own, since jax writes about a missing driver wherever it finds it.
    """
    folder = str(Path(sys.prefix) / "aot")
    if Path(folder).is_dir() and folder not in sys.path:
        sys.path.append(folder)


def _cpuinfo() -> list[str]:
    return _CPUINFO.read_text().splitlines() if _CPUINFO.exists() else []
