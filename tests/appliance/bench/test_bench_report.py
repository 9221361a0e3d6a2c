"""The form of a report, exactly; statistics; the table and the picture."""

import io
import json
import sys

import pytest

from appliance.bench.report import Findings, PlotError, Report, Result, make_report, measured, plot, write_table
from appliance.bench.statistics import StatisticsError, median, paired_ratios, quantile, slope, spread

REPORT = Report(
    bench="start",
    versions={"python": "3.11.9"},
    host={"cpu": "A", "isa": ("avx2",), "cores": 2, "accelerator": "none"},
    results=(
        measured("ready_s", [5.0, 4.0, 9.0], "s", 8.0, "<="),
        Result("other", 1 / 3, "ratio", 1, (0.25, 2 / 3)),
    ),
    notes=("peers: not installed",),
)


def test_json_is_one_line_of_the_agreed_form() -> None:
    line = REPORT.to_json()
    assert "\n" not in line
    assert json.loads(line) == {
        "bench": "start",
        "versions": {"python": "3.11.9"},
        "host": {"cpu": "A", "isa": ["avx2"], "cores": 2, "accelerator": "none"},
        "results": [
            {
                "name": "ready_s", "value": 5.0, "unit": "s", "repeats": 3, "spread": [4.0, 9.0], "target": 8.0,
                "op": "<=", "met": True,
            },
            {
                "name": "other", "value": 0.333333, "unit": "ratio", "repeats": 1, "spread": [0.25, 0.666667],
                "target": None, "op": None, "met": None,
            },
        ],
        "notes": ["peers: not installed"],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("value", "op", "met"),
    [
        (2.0, ">=", True), (1.999, ">=", False), (2.0, "<=", True), (2.001, "<=", False), (2.0, "==", True),
        (2.1, "==", False),
    ],
)  # fmt: skip
def test_targets(value: float, op: str, met: bool) -> None:
    assert Result("r", value, "x", 1, (value, value), 2.0, op).met is met


def test_a_target_needs_an_operator() -> None:
    with pytest.raises(ValueError, match="ready_s: target 8 and op None"):
        Result("ready_s", 1.0, "s", 1, (1.0, 1.0), 8)


def test_made_report_names_host_and_versions() -> None:
    report = make_report("start", Findings((), ("note",), {"torch": "9.9"}))
    assert report.versions["torch"] == "9.9"
    assert {"python", "zccp", "jax"} <= set(report.versions)
    assert list(report.host) == ["cpu", "isa", "cores", "accelerator"]
    assert report.host["cores"] >= 1
    assert report.notes == ("note",)


def test_table_shows_every_figure_and_note() -> None:
    out = io.StringIO()
    write_table(REPORT, out)
    text = out.getvalue()
    assert "cpu A, isa avx2, cores 2, accelerator none" in text
    (row,) = [line for line in text.splitlines() if "ready_s" in line]
    assert [cell.strip() for cell in row.strip("│").split("│")] == ["ready_s", "5", "s", "4 .. 9", "3", "<= 8", "yes"]
    assert "- peers: not installed" in text


def test_plot_draws_a_png(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    plot(REPORT, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_plot_draws_samples_that_are_not_printed(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    report = make_report("step", Findings(REPORT.results, samples={"time, ms": [1.0, 2.0, 2.0, 50.0]}))
    assert "time, ms" not in report.to_json()
    plot(report, tmp_path / "with.png")
    plot(make_report("step", Findings(REPORT.results)), tmp_path / "without.png")
    with_samples, without = ((tmp_path / name).read_bytes() for name in ("with.png", "without.png"))
    height = slice(20, 24)
    assert int.from_bytes(with_samples[height], "big") > int.from_bytes(without[height], "big")


def test_plot_of_nothing_says_so(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(PlotError, match="there is no result"):
        plot(Report("x", {}, {"cpu": "A"}, (), ()), tmp_path / "a.png")


def test_plot_without_matplotlib_names_it(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(PlotError, match="needs matplotlib, which is not installed"):
        plot(REPORT, tmp_path / "a.png")


def test_statistics() -> None:
    assert median([3.0, 1.0, 2.0]) == 2.0
    assert spread([3.0, 1.0, 2.0]) == (1.0, 3.0)
    values = [4.0, 1.0, 3.0, 2.0]
    assert [quantile(values, share) for share in (0.0, 0.25, 0.5, 0.51, 1.0)] == [1.0, 1.0, 2.0, 3.0, 4.0]
    assert paired_ratios([2.0, 9.0], [4.0, 3.0]) == [0.5, 3.0]
    assert slope([0.0, 1.0, 2.0], [5.0, 7.0, 9.0]) == 2.0
    assert slope([0.0, 1.0, 2.0], [1.0, 4.0, 1.0]) == 0.0


def test_statistics_of_too_little() -> None:
    with pytest.raises(StatisticsError, match="median of 0"):
        median([])
    with pytest.raises(StatisticsError, match="spread of 0"):
        spread([])
    with pytest.raises(StatisticsError, match=r"quantile 0.5 of 0 measurements"):
        quantile([], 0.5)
    with pytest.raises(StatisticsError, match=r"quantile 1.5 of 1 measurements; it needs 0..1"):
        quantile([1.0], 1.5)
    with pytest.raises(StatisticsError, match="2 measurements over 1"):
        paired_ratios([1.0, 2.0], [1.0])
    with pytest.raises(StatisticsError, match="there are 1 and 2 values"):
        slope([1.0, 1.0], [1.0, 2.0])
