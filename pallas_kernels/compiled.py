"""Compiled: the machine code of a kernel for a card that need not be present, and what that code takes.

Owns the deviceless compilation and the reading of the compiler's own reports. Needs the extra ``aot``; never runs a
kernel, and says nothing about time.
"""

import functools
import importlib.util
import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from pallas_kernels.card import Card

_USED = re.compile(
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
    r".*?Used (?P<registers>\d+) registers",
    re.DOTALL,
)


Shapes = jax.ShapeDtypeStruct | tuple[jax.ShapeDtypeStruct, ...]
"""Of an argument, which may be several arrays."""


class CompileError(RuntimeError):
    """The kernel cannot be compiled or its code cannot be read; the message gives the cause and what to do."""


@dataclass(frozen=True, slots=True)
class KernelCode:
    """What one kernel takes on a card.

    ``stack_bytes`` and ``spill_bytes`` are local memory of a thread; ``blocks`` run at once on a multiprocessor;
    ``tensor_products`` and ``async_copies`` count instructions in the code.
    """

    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int
    threads: int
    grid: tuple[int, int, int]
    blocks: int
    tensor_products: int
    async_copies: int


def missing() -> str:
    """What deviceless compilation lacks here; empty where it can run."""
    if not (_installed("jax_cuda12_plugin") and _installed("jax_plugins.xla_cuda12")):
        return "GPU code needs jax-cuda12-plugin and jax-cuda12-pjrt; install the extra: pip install 'zccp[aot]'"
    if _assembler() is None:
        return "reading GPU code needs ptxas of nvidia-cuda-nvcc-cu12; install the extra: pip install 'zccp[aot]'"
    return ""


def _installed(module: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(module)
    except ModuleNotFoundError:  # of a package that it is in
        return None


def _assembler() -> Path | None:
    """The assembler of the installed package, never the host's, so that its version is a known one."""
    package = _installed("nvidia.cuda_nvcc")
    places = [] if package is None else package.submodule_search_locations or []
    return next((file for place in places if (file := Path(place) / "bin" / "ptxas").is_file()), None)


@dataclass(frozen=True, slots=True)
class ProgramMemory:
    """Bytes of a whole program: results that lie where arguments lay, and what it needs beside both."""

    aliased_bytes: int
    temporary_bytes: int


def compile_kernel(card: Card, kernel: str, function: Callable[..., object], *shapes: Shapes) -> KernelCode:
    """Compile ``function`` for ``card`` and look at the code of its kernel of that name.

    Args:
        card: where the code would run.
        kernel: name of the ``pallas_call``.
        function: what to compile; its arguments are arrays.
        shapes: of the arguments.

    Raises:
        CompileError: a package is missing, the compiler refuses, or there is no kernel of that name.
    """
    with tempfile.TemporaryDirectory(prefix="zccp-kernel-") as name:
        folder = Path(name)
        try:
            _lowered(card, jax.jit(function), shapes).compile(compiler_options={"xla_dump_to": str(folder)})
        except jax.errors.JaxRuntimeError as error:
            raise CompileError(f"{kernel} does not compile for {card.name}: {error}") from error
        return _read(card, kernel, folder)


def program_memory(card: Card, function: Callable[..., object], *shapes: Shapes) -> ProgramMemory:
    """Compile ``function`` for ``card``, its first argument given away, and see what memory it takes.

    Raises:
        CompileError: a package is missing, or the compiler refuses.
    """
    try:
        analysis = _lowered(card, jax.jit(function, donate_argnums=0), shapes).compile().memory_analysis()
    except jax.errors.JaxRuntimeError as error:
        raise CompileError(f"a program does not compile for {card.name}: {error}") from error
    if analysis is None:
        raise CompileError(f"the compiler for {card.name} says nothing about memory; its package may be too new")
    return ProgramMemory(analysis.alias_size_in_bytes, analysis.temp_size_in_bytes)


def card_devices(card: Card, count: int) -> tuple[jax.Device, ...]:
    """Cards of one host, which need not be present, to compile for.

    Raises:
        CompileError: a package is missing.
    """
    if lacking := missing():
        raise CompileError(lacking)
    return _devices(card, count)


@functools.cache
def _devices(card: Card, count: int) -> tuple[jax.Device, ...]:
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="", target_config=card.target_config(), topology=f"1x1x{count}"
    )
    return tuple(topology.devices)


def _lowered(card: Card, function: jax.stages.Wrapped, shapes: tuple[Shapes, ...]) -> jax.stages.Lowered:
    placed = SingleDeviceSharding(card_devices(card, 1)[0])
    arguments = jax.tree.map(lambda part: jax.ShapeDtypeStruct(part.shape, part.dtype, sharding=placed), shapes)
    return function.lower(*arguments)


def _read(card: Card, kernel: str, folder: Path) -> KernelCode:
    launches = "\n".join(file.read_text() for file in folder.glob("*thunk_sequence.txt"))
    launch = re.search(
        rf"\b{kernel} grid: \[(\d+), (\d+), (\d+)\] threads: \[(\d+), 1, 1\]\s+shared_memory: (\d+) bytes", launches
    )
    sources = [file for file in folder.glob("*.ptx") if f".entry {kernel}(" in file.read_text()]
    if launch is None or len(sources) != 1:
        raise CompileError(f"the compiler's reports name no kernel {kernel!r}, or several; give the pallas_call a name")
    x, y, z, threads, shared_bytes = map(int, launch.groups())
    used = _USED.search(_assemble(card, sources[0]))
    if used is None:
        raise CompileError(f"the assembler's report on {kernel} has another form; its package may be too new")
    code, registers = sources[0].read_text(), int(used["registers"])
    return KernelCode(
        registers=registers,
        spill_bytes=int(used["stores"]) + int(used["loads"]),
        stack_bytes=int(used["stack"]),
        shared_bytes=shared_bytes,
        threads=threads,
        grid=(x, y, z),
        blocks=card.blocks(registers=registers, threads=threads, shared_bytes=shared_bytes),
        tensor_products=code.count("mma.sync") + code.count("wgmma.mma_async"),
        async_copies=len(re.findall(r"cp\.async\.c[ag]\.", code)),
    )


def _assemble(card: Card, source: Path) -> str:
    """The assembler's report on the one kernel of a file."""
    command = [str(_assembler()), "-v", f"-arch={card.architecture}", str(source), "-o", str(source.with_suffix(".o"))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - a path that we found
    if done.returncode:
        raise CompileError(f"the assembler refuses {source.name}: {done.stderr.strip()[:500]}")
    return done.stderr
