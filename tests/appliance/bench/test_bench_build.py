"""The bench of releases: what it makes of a build's reports, and what it refuses."""

from pathlib import Path

import pytest

from appliance.bench import build as bench
from appliance.bench.runner import BenchContext, BenchUseError
from appliance.building import Release
from appliance.config import ApplianceConfig
from pallas_kernels.compiled import missing
from planner.build import BuildReport
from planner.memory import MemoryPlan

needs_compiler = pytest.mark.skipif(bool(missing()), reason=missing() or "present")
CONTEXT = BenchContext(ApplianceConfig(), lambda *_: None)


def report(kv_format: str, temp_bytes: int, alias_fraction: float) -> BuildReport:
    memory = MemoryPlan(1, 2, 3, 4, reserve_bytes=200, usable_bytes=800)
    return BuildReport(Path(kv_format), 34, 34, memory, 16, 5_000_000, temp_bytes, alias_fraction)


@needs_compiler
def test_the_worst_of_all_stores_counts(monkeypatch):
    release = Release([report("bf16", 20, 1.0), report("int8", 31, 0.5)], {"bmq4": "no room"}, Path("key.pem"))
    monkeypatch.setattr(bench, "_built", lambda *_: release)
    monkeypatch.setattr(bench, "_wastes", lambda *_: [(0.04, 0.7), (0.26, 0.9)])
    findings = bench.run(CONTEXT, target="a100_sxm_80", only=None, threads=2)
    found = {result.name: result for result in findings.results}
    assert [name for name in found if name.startswith("build_minutes")] == ["build_minutes_8b", "build_minutes_70b"]
    assert (found["build_minutes_8b"].target, found["build_minutes_70b"].target) == (15.0, 30.0)
    assert found["temp_fraction_max"].value == 0.031
    assert not found["temp_fraction_max"].met
    assert found["pool_alias_fraction_min"].value == 0.5
    assert not found["pool_alias_fraction_min"].met
    assert (found["padding_waste_mean"].value, found["padding_waste_mean"].met) == (0.26, False)
    assert (found["padding_waste_p99"].value, found["padding_waste_p99"].met) == (0.9, None)
    assert any("bmq4 is left out: no room" in note for note in findings.notes)


@pytest.mark.parametrize(
    ("target", "message"), [("cpu_native", "--target cpu_native is no GPU"), ("a1000", "target 'a1000' is unknown")]
)
def test_a_target_that_is_no_card_is_refused(target, message):
    with pytest.raises(BenchUseError, match=message):
        bench.run(CONTEXT, target=target, only="8b", threads=1)
