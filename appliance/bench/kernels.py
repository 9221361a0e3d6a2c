"""kernels: what the attention kernels take on a GPU, from their machine code and their addresses, without the GPU.

Compiles every case of every kernel for the card, reads the compiler's reports, and counts the bytes of long contexts
from the addresses that the kernel asks for. Says nothing about time. Needs the extra ``aot``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import click

from appliance.bench.report import Findings, Result, installed
from appliance.bench.runner import BenchContext, BenchError, BenchUseError
from pallas_kernels.card import card_names

OPTIONS: Sequence[click.Parameter] = [
    click.Option(["--static"], is_flag=True, help="Examine compiled code; the only way there is, and it must be said."),
    click.Option(
        ["--target"],
        type=click.Choice(card_names()),
        default="a100_sxm_80",
        show_default=True,
        help="Card to compile for; it need not be present.",
    ),
]

SHARED_BYTES_DECODE = 83_456
BLOCKS_DECODE = 2
BYTES_OVER_MINIMUM = 1.10
LONG_CONTEXT = 8_192
"""Positions from which on bytes are counted: below, a launch is bound by other things."""
_PACKAGES = ("jax-cuda12-plugin", "jax-cuda12-pjrt", "nvidia-cuda-nvcc-cu12")


@dataclass(frozen=True, slots=True)
class Examined:
    """One case: what its code takes on the card, and its bytes over the least (None where they are not counted)."""

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
            f"{self.name}: {self.registers} registers, {self.local_bytes} B spilt, {self.shared_bytes} B shared, "
            f"{self.blocks} CTAs, {self.tensor_products} mma.sync, {self.async_copies} cp.async{moved}"
        )


def run(context: BenchContext, *, static: bool, target: str) -> Findings:
    """Examine every case.

    Raises:
        BenchUseError: ``--static`` is not given, or the extra is not installed.
        BenchError: a case does not compile.
    """
    if not static:
        raise BenchUseError("this bench examines code and measures no time; say --static")
    examined = examine_decode(context, target)
    return Findings(
        figures(examined),
        (
            *(case.line() for case in examined),
            "spilt: local memory of a thread; CTAs: at once on a multiprocessor; bytes: 32-byte sectors, no caches",
            "smem_prefill_max, bmq4_speedup_64k: this version has no such kernel",
            "decode_bandwidth_pct, prefill_peak_pct: this bench measures no time",
        ),
        installed(_PACKAGES),
    )


def examine_decode(context: BenchContext, target: str) -> tuple[Examined, ...]:
    """Every case of paged_decode.

    Raises:
        BenchUseError: the extra is not installed.
        BenchError: a case does not compile.
    """
    import jax  # noqa: PLC0415 - and the modules below load it

    from pallas_kernels.card import find_card  # noqa: PLC0415
    from pallas_kernels.compiled import CompileError, missing  # noqa: PLC0415
    from pallas_kernels.paged_decode import examine  # noqa: PLC0415
    from pallas_kernels.paged_decode.cases import CASES  # noqa: PLC0415

    if lacking := missing():
        raise BenchUseError(lacking)
    jax.config.update("jax_platforms", "cpu")
    card, found = find_card(target), list[Examined]()
    for done, case in enumerate(CASES):
        context.progress(f"compiling for {target}", done, len(CASES))
        try:
            code = examine.code(case, card)
        except CompileError as error:
            raise BenchError(f"{case.name}: {error}") from error
        long = min(case.lengths) >= LONG_CONTEXT
        found.append(
            Examined(
                f"paged_decode {case.name} page {case.page_size}",
                code.registers,
                code.spill_bytes + code.stack_bytes,
                code.shared_bytes,
                code.blocks,
                code.tensor_products,
                code.async_copies,
                examine.traffic(case).ratio if long else None,
            )
        )
    return tuple(found)


def figures(examined: Sequence[Examined]) -> tuple[Result, ...]:
    """The worst of all cases, with its target."""
    moved = [case.bytes_over_minimum for case in examined if case.bytes_over_minimum is not None]
    spilt = [case.local_bytes for case in examined]
    shared = [case.shared_bytes for case in examined]
    blocks = [case.blocks for case in examined]
    without = [float(not case.tensor_products) for case in examined]
    copies = [float(not case.async_copies) for case in examined]
    registers = [case.registers for case in examined]

    def ends(values: Sequence[float]) -> tuple[float, float]:
        return min(values), max(values)

    count = len(examined)
    return (
        Result("spill_bytes_max", max(spilt), "B", count, ends(spilt), 0, "=="),
        Result("cases_without_mma", sum(without), "cases", count, ends(without), 0, "=="),
        Result("cases_without_cp_async", sum(copies), "cases", count, ends(copies)),
        Result("registers_max", max(registers), "registers", count, ends(registers)),
        Result("smem_decode_max", max(shared), "B", count, ends(shared), SHARED_BYTES_DECODE, "<="),
        Result("decode_ctas_per_sm_min", min(blocks), "CTAs", count, ends(blocks), BLOCKS_DECODE, ">="),
        Result("bytes_over_minimum_max", max(moved), "ratio", len(moved), ends(moved), BYTES_OVER_MINIMUM, "<="),
    )
