"""kernels: the GPU kernels of attention, by their code without a GPU (--static) or by their answers and time on one.

Owns the options. ``kernels_static`` and ``kernels_device`` do the work; each loads jax itself.
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
        ["--target"],
        type=click.Choice(card_names()),
        default="a100_sxm_80",
        show_default=True,
        help="Card that --static compiles for; it need not be present.",
    ),
]


def run(context: BenchContext, *, static: bool, target: str) -> Findings:
    """Examine every case.

    Raises:
        BenchUseError: ``--static`` is not given, or the extra is not installed.
        BenchError: a case does not compile.
    """
    if not static:
        raise BenchUseError("this bench examines code and measures no time; say --static")
    return kernels_static.run(context, target)
