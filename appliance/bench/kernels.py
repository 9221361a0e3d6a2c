"""kernels: the GPU kernels, by their code without a GPU (--static) or by answers and time on one.

Owns the options. ``kernels_static`` and ``kernels_device`` do the work.
"""

from collections.abc import Sequence

import click

from appliance.bench import kernels_static
from appliance.bench.report import Findings
from appliance.bench.runner import BenchContext, BenchUseError
from pallas_kernels.card import card_names

OPTIONS: Sequence[click.Parameter] = [
    click.Option(
        ["--static"], is_flag=True, help="Examine code compiled for --target; needs the extra aot and no GPU."
    ),
    click.Option(
        ["--device"], is_flag=True, help="Check every case on this machine's GPU against the reference, time it."
    ),
    click.Option(
        ["--target"],
        type=click.Choice(card_names()),
        default="a100_sxm_80",
        show_default=True,
        help="Card that --static compiles for; it need not be present.",
    ),
    click.Option(["--only"], default="", metavar="TEXT", help="Only cases with this in the name of kernel and case."),
]


def run(context: BenchContext, *, static: bool, device: bool, target: str, only: str) -> Findings:
    """Examine every case of every kernel, or run it.

    Raises:
        BenchUseError: not just one of ``--static`` and ``--device`` is given, what it needs is missing, or no case has
            that name.
        BenchError: a case does not compile for the target.
    """
    if static == device:
        raise BenchUseError("say what to do: --static examines code without a GPU, --device runs on this machine's GPU")
    if static:
        return kernels_static.run(context, target, only)
    from appliance.bench import kernels_device  # noqa: PLC0415 - it loads jax

    return kernels_device.run(context, only)
