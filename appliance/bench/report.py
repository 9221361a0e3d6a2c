"""Report: what a bench found, as one JSON line, as a table, and as a picture.

Owns the form of results, the versions and the host that belong to them. A figure that could not be had is a note with
its reason and never a result. Reads package metadata and the host's own description; never imports jax.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from platform import python_version
from typing import Any, Literal, TextIO

from appliance.bench.statistics import median, quantile, spread
from pallas_kernels.platform import cpu_features, cpu_model, nvidia_gpus

Operator = Literal[">=", "<=", "=="]

PACKAGES = ("zccp", "jax", "jaxlib", "numpy", "litestar")
RELEVANT_ISA = ("amx_int8", "amx_bf16", "avx512_vnni", "avx512_bf16", "avx512f", "avx_vnni", "avx2", "i8mm", "asimddp")
"""Instruction sets that decide about the speed of the products here, fastest first."""

_SHOWN = 0.99
"""Share of samples that a histogram shows; a few slow ones would squeeze all others into one bar."""
_HISTOGRAM_HEIGHT = 5
"""Height of a histogram, in bars."""


class PlotError(RuntimeError):
    """The picture cannot be drawn; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class Result:
    """One figure.

    ``spread`` holds the least and the largest of ``repeats`` measurements. Without a ``target`` the figure is reported
    and neither met nor missed.
    """

    name: str
    value: float
    unit: str
    repeats: int
    spread: tuple[float, float]
    target: float | None = None
    op: Operator | None = None

    def __post_init__(self) -> None:
        if (self.target is None) != (self.op is None):
            raise ValueError(f"{self.name}: target {self.target} and op {self.op!r} must be given together")

    @property
    def met(self) -> bool | None:
        """Whether the target holds; None without one."""
        match self.op:
            case ">=":
                return self.value >= (self.target or 0.0)
            case "<=":
                return self.value <= (self.target or 0.0)
            case "==":
                return self.value == self.target
            case None:
                return None

    def to_json(self) -> dict[str, object]:
        """The result as it is printed, numbers cut to six significant digits."""
        return {
            "name": self.name,
            "value": _short(self.value),
            "unit": self.unit,
            "repeats": self.repeats,
            "spread": [_short(end) for end in self.spread],
            "target": self.target,
            "op": self.op,
            "met": self.met,
        }


def measured(
    name: str, values: Sequence[float], unit: str, target: float | None = None, op: Operator | None = None
) -> Result:
    """The median of repeated measurements as a result.

    Raises:
        StatisticsError: there is no measurement.
    """
    return Result(name, median(values), unit, len(values), spread(values), target, op)


@dataclass(frozen=True, slots=True)
class Findings:
    """What one run of a bench gives back.

    ``versions`` are those of packages that only this bench uses. ``samples`` holds single measurements by what they
    are, unit included; they are drawn, not printed.
    """

    results: tuple[Result, ...]
    notes: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict[str, str])
    samples: Mapping[str, Sequence[float]] = field(default_factory=dict[str, Sequence[float]])


@dataclass(frozen=True, slots=True)
class Report:
    """Findings with what they depend on."""

    bench: str
    versions: Mapping[str, str]
    host: Mapping[str, object]
    results: tuple[Result, ...]
    notes: tuple[str, ...]
    samples: Mapping[str, Sequence[float]] = field(default_factory=dict[str, Sequence[float]])

    def to_json(self) -> str:
        """The report as one JSON object on one line."""
        document = {
            "bench": self.bench,
            "versions": dict(self.versions),
            "host": dict(self.host),
            "results": [result.to_json() for result in self.results],
            "notes": list(self.notes),
        }
        return json.dumps(document, ensure_ascii=False)


def make_report(bench: str, findings: Findings) -> Report:
    """Put this host and the installed versions beside a bench's findings."""
    versions = {"python": python_version(), **installed(PACKAGES), **findings.versions}
    return Report(bench, versions, describe_host(), findings.results, findings.notes, findings.samples)


def installed(packages: Sequence[str]) -> dict[str, str]:
    """Versions of those of the packages that are installed."""
    found: dict[str, str] = {}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def describe_host() -> dict[str, object]:
    """CPU model, its relevant instruction sets, the cores this process may use, and accelerators."""
    features = set(cpu_features())
    return {
        "cpu": cpu_model(),
        "isa": tuple(name for name in RELEVANT_ISA if name in features),
        "cores": len(os.sched_getaffinity(0)),
        "accelerator": ", ".join(nvidia_gpus()) or "none",
    }


def write_table(report: Report, out: TextIO) -> None:
    """Write the report for people: host, one row a figure, notes."""
    from rich.console import Console  # noqa: PLC0415 - only for people
    from rich.table import Table  # noqa: PLC0415

    console = Console(file=out)
    host = report.host
    console.print(
        f"{report.bench}: {', '.join(f'{name} {_cell(host[name])}' for name in host)}", highlight=False, soft_wrap=True
    )
    table = Table("figure", "value", "unit", "spread", "repeats", "target", "met")
    for result in report.results:
        ends = "" if result.repeats < 2 else " .. ".join(f"{end:.4g}" for end in result.spread)
        target = "" if result.op is None else f"{result.op} {result.target:g}"
        met = {True: "yes", False: "NO", None: ""}[result.met]
        table.add_row(result.name, f"{result.value:.5g}", result.unit, ends, str(result.repeats), target, met)
    console.print(table)
    for note in report.notes:
        console.print(f"- {note}", highlight=False, markup=False, soft_wrap=True)
    console.print(
        ", ".join(f"{name} {version}" for name, version in report.versions.items()), highlight=False, soft_wrap=True
    )


def plot(report: Report, file: Path) -> None:
    """Draw every figure as a bar with its spread and its target, figures of one unit together, and samples below.

    Raises:
        PlotError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - a development package
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError as error:
        raise PlotError("--plot needs matplotlib, which is not installed; run pip install matplotlib") from error
    units = list(dict.fromkeys(result.unit for result in report.results))
    if not units:
        raise PlotError("--plot has nothing to draw: there is no result; the notes say why")
    heights = [1 + sum(result.unit == unit for result in report.results) for unit in units]
    heights += [_HISTOGRAM_HEIGHT] * len(report.samples)
    figure = Figure(figsize=(9, 1.2 + 0.45 * (sum(heights) + len(heights))), layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(len(heights), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0])
    for axis, unit in zip(axes, units, strict=False):
        _draw_bars(axis, [result for result in report.results if result.unit == unit])
    for axis, (what, values) in zip(axes[len(units) :], report.samples.items(), strict=True):
        axis.hist(values, bins=100, range=(0.0, quantile(values, _SHOWN)), color="tab:blue")
        axis.set_xlabel(f"{what}; the largest {1 - _SHOWN:.0%} are not shown")
    figure.suptitle(f"{report.bench}: {report.host['cpu']}")
    try:
        figure.savefig(file)
    except (OSError, ValueError) as error:
        raise PlotError(f"--plot {file}: {error}") from error


def _draw_bars(axis: Any, shown: Sequence[Result]) -> None:
    """Results of one unit, one bar each."""
    places = range(len(shown))
    below = [result.value - result.spread[0] for result in shown]
    above = [result.spread[1] - result.value for result in shown]
    colours = [{True: "tab:green", False: "tab:red", None: "tab:blue"}[result.met] for result in shown]
    errors = [[max(0.0, length) for length in side] for side in (below, above)]
    axis.barh(places, [result.value for result in shown], xerr=errors, color=colours)
    for place, result in zip(places, shown, strict=True):
        if result.target is not None:
            axis.plot([result.target] * 2, [place - 0.45, place + 0.45], color="black")
    axis.set_yticks(places, [result.name for result in shown])
    axis.invert_yaxis()
    axis.set_xlabel(shown[0].unit)


def _cell(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _short(value: float) -> float:
    return float(f"{value:.6g}")
