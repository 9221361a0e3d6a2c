"""What the kernels take on a GPU, from their machine code and their addresses, without the GPU.

Compiles every case of every kernel for the card, reads the compiler's reports, and counts the bytes of decoding over
long contexts from the addresses that the kernel asks for. Says nothing about time. Needs the extra ``aot``.
"""

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from appliance.bench.report import Findings, Result, installed
from appliance.bench.runner import BenchContext, BenchError, BenchUseError
from appliance.bench.statistics import spread
from pallas_kernels.platform import find_gpu_compiler

if TYPE_CHECKING:
    from pallas_kernels.card import Card
    from pallas_kernels.compiled import KernelCode

DECODE, PREFILL, UNPACK, WRITE, SAMPLE = "paged_decode", "paged_prefill", "paged_prefill_unpack", "page_write", "sample"
ATTENTION = (DECODE, PREFILL)
KERNELS = (*ATTENTION, UNPACK, WRITE, SAMPLE)

SHARED_BYTES = {DECODE: 83_456, PREFILL: 166_912, UNPACK: 83_456, WRITE: 83_456, SAMPLE: 83_456}
NAMES = {DECODE: "decode", PREFILL: "prefill", UNPACK: "unpack", WRITE: "write", SAMPLE: "sample"}
"""Of kernels, in the names of figures."""
BLOCKS_DECODE = 2
BYTES_OVER_MINIMUM = 1.10
LONG_CONTEXT = 8_192
"""Positions from which on bytes are counted: below, a launch is bound by other things."""
THREADS = 2
"""Cases examined at once: the assembler is a process of its own, and compiling leaves the interpreter free."""
_PACKAGES = ("jax-cuda12-plugin", "jax-cuda12-pjrt", "nvidia-cuda-nvcc-cu12")


@dataclass(frozen=True, slots=True)
class Examined:
    """One case: what its code takes on the card, and its bytes over the least (None where they are not counted)."""

    kernel: str
    name: str
    registers: int
    local_bytes: int
    shared_bytes: int
    blocks: int
    tensor_products: int
    async_copies: int
    bytes_over_minimum: float | None

    def line(self) -> str:
        """The case for people."""
        moved = "" if self.bytes_over_minimum is None else f", bytes {self.bytes_over_minimum:.4f} of the minimum"
        return (
            f"{self.kernel} {self.name}: {self.registers} registers, {self.local_bytes} B spilt, "
            f"{self.shared_bytes} B shared, {self.blocks} CTAs, {self.tensor_products} mma.sync, "
            f"{self.async_copies} cp.async{moved}"
        )


def run(context: BenchContext, target: str, only: str = "") -> Findings:
    """Examine every case of every kernel, or those with ``only`` in their names.

    Raises:
        BenchUseError: the extra is not installed, or no case has such a name.
        BenchError: a case does not compile.
    """
    examined = examine(context, target, only)
    return Findings(
        figures(examined),
        (
            *(case.line() for case in examined),
            "spilt: local memory of a thread; CTAs: at once on a multiprocessor; bytes: 32-byte sectors, no caches",
            "bytes are counted for paged_decode: tiles of paged_prefill find most of theirs in a cache",
            "decode_bandwidth_pct, prefill_peak_pct: --device measures them on a GPU",
            "bmq4_speedup_64k: a figure of time, which needs a GPU",
        ),
        installed(_PACKAGES),
    )


@dataclass(frozen=True, slots=True)
class _Job:
    kernel: str
    name: str
    code: "Callable[[Card], KernelCode]"
    ratio: Callable[[], float] | None


def _jobs() -> list[_Job]:
    from pallas_kernels.page_write import cases as write_cases  # noqa: PLC0415 - they load jax
    from pallas_kernels.page_write import examine as write  # noqa: PLC0415
    from pallas_kernels.paged_decode import cases as decode_cases  # noqa: PLC0415
    from pallas_kernels.paged_decode import examine as decode  # noqa: PLC0415
    from pallas_kernels.paged_prefill import cases as prefill_cases  # noqa: PLC0415
    from pallas_kernels.paged_prefill import examine as prefill  # noqa: PLC0415
    from pallas_kernels.sample import cases as sample_cases  # noqa: PLC0415
    from pallas_kernels.sample import examine as sample  # noqa: PLC0415

    def ratio(case: decode_cases.DecodeCase) -> float:
        return decode.traffic(case).ratio

    found = list[_Job]()
    for case in (*decode_cases.CASES, *decode_cases.QUANTISED_CASES):
        counted = functools.partial(ratio, case) if min(case.lengths) >= LONG_CONTEXT else None
        found.append(_Job(DECODE, f"{case.name} page {case.page_size}", functools.partial(decode.code, case), counted))
    for case in (*prefill_cases.CASES, *prefill_cases.QUANTISED_CASES):
        found.append(_Job(PREFILL, f"{case.name} page {case.page_size}", functools.partial(prefill.code, case), None))
    for case in prefill_cases.BLOCK_CASES:
        code = functools.partial(prefill.unpacking_code, case)
        found.append(_Job(UNPACK, f"{case.name} page {case.page_size}", code, None))
    for case in write_cases.GPU_CASES:
        found.append(_Job(WRITE, f"{case.name} page {case.page_size}", functools.partial(write.code, case), None))
    for case in sample_cases.CASES:
        found.append(_Job(SAMPLE, case.name, functools.partial(sample.code, case), None))
    return found


def examine(context: BenchContext, target: str, only: str = "") -> tuple[Examined, ...]:
    """Every case with ``only`` in the name of kernel and case.

    Raises:
        BenchUseError: the extra is not installed, or no case has such a name.
        BenchError: a case does not compile.
    """
    find_gpu_compiler()
    import jax  # noqa: PLC0415 - and the modules below load it

    from pallas_kernels.card import find_card  # noqa: PLC0415
    from pallas_kernels.compiled import missing  # noqa: PLC0415

    if lacking := missing():
        raise BenchUseError(lacking)
    jax.config.update("jax_platforms", "cpu")
    card, found = find_card(target), list[Examined]()
    jobs = [job for job in _jobs() if only in f"{job.kernel} {job.name}"]
    if not jobs:
        raise BenchUseError(no_such_case(only, KERNELS))
    with ThreadPoolExecutor(THREADS) as pool:
        running = [pool.submit(_examined, job, card) for job in jobs]
        try:
            for done, future in enumerate(running):
                context.progress(f"compiling for {target}", done, len(jobs))
                found.append(future.result())
        finally:
            pool.shutdown(cancel_futures=True)
    return tuple(found)


def _examined(job: _Job, card: "Card") -> Examined:
    from pallas_kernels.compiled import CompileError  # noqa: PLC0415 - it loads jax

    try:
        code = job.code(card)
    except CompileError as error:
        raise BenchError(f"{job.kernel} {job.name}: {error}") from error
    return Examined(
        job.kernel,
        job.name,
        code.registers,
        code.spill_bytes + code.stack_bytes,
        code.shared_bytes,
        code.blocks,
        code.tensor_products,
        code.async_copies,
        None if job.ratio is None else job.ratio(),
    )


def no_such_case(only: str, kernels: Sequence[str] = ATTENTION) -> str:
    """Why nothing of these kernels is examined or run."""
    return f"no case has {only!r} in its name; a name begins with {' or '.join(kernels)}"


def figures(examined: Sequence[Examined]) -> tuple[Result, ...]:
    """The worst of all cases, with its target; of a kernel without any case there is no figure."""
    spilt = [case.local_bytes for case in examined]
    registers = [case.registers for case in examined]
    found = [
        Result("spill_bytes_max", max(spilt), "B", len(spilt), spread(spilt), 0, "=="),
        Result("registers_max", max(registers), "registers", len(registers), spread(registers)),
    ]
    if attention := [case for case in examined if case.kernel in ATTENTION]:
        without = [float(not case.tensor_products) for case in attention]
        copies = [float(not case.async_copies) for case in attention]
        found += (
            Result("cases_without_mma", sum(without), "cases", len(without), spread(without), 0, "=="),
            Result("cases_without_cp_async", sum(copies), "cases", len(copies), spread(copies)),
        )
    for kernel, name in NAMES.items():
        shared = [case.shared_bytes for case in examined if case.kernel == kernel]
        blocks = [case.blocks for case in examined if case.kernel == kernel]
        if not shared:
            continue
        least = (BLOCKS_DECODE, ">=") if kernel == DECODE else (None, None)
        found += (
            Result(f"smem_{name}_max", max(shared), "B", len(shared), spread(shared), SHARED_BYTES[kernel], "<="),
            Result(f"{name}_ctas_per_sm_min", min(blocks), "CTAs", len(blocks), spread(blocks), *least),
        )
    moved = [case.bytes_over_minimum for case in examined if case.bytes_over_minimum is not None]
    if moved:
        found.append(
            Result("bytes_over_minimum_max", max(moved), "ratio", len(moved), spread(moved), BYTES_OVER_MINIMUM, "<=")
        )
    return tuple(found)
