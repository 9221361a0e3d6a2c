"""Targets: names, what each holds, and what is not known."""

import pytest

from planner.target import UnknownTargetError, find_target, target_names


def test_cpu_targets():
    assert {"cpu_native", "cpu_x86_64_v3"} <= set(target_names())
    assert find_target("cpu_native").features == ()
    assert "avx2" in find_target("cpu_x86_64_v3").features


def test_an_unknown_target_is_refused_with_those_there_are():
    with pytest.raises(
        UnknownTargetError, match=r"target 'cpu' is unknown; targets: a100_.*, cpu_native, cpu_x86_64_v3"
    ):
        find_target("cpu")
