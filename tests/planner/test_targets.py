"""Targets: names, what each holds, and what is not known."""

import pytest

from pallas_kernels.card import card_names, find_card
from planner.target import UnknownTargetError, find_target, target_names

GPUS = [name for name in target_names() if find_target(name).platform == "cuda"]


def test_cpu_targets():
    assert {"cpu_native", "cpu_x86_64_v3"} <= set(target_names())
    assert find_target("cpu_native").features == find_target("cpu_native").sources == ()
    assert "avx2" in find_target("cpu_x86_64_v3").features


def test_an_unknown_target_is_refused_with_those_there_are():
    with pytest.raises(
        UnknownTargetError, match=r"target 'cpu' is unknown; targets: a100_.*, cpu_native, cpu_x86_64_v3"
    ):
        find_target("cpu")


def test_every_card_has_a_target_and_the_other_way_round():
    assert tuple(find_target(name).card for name in GPUS) == card_names()


@pytest.mark.parametrize("name", GPUS)
def test_a_gpu_has_what_the_planner_needs(name):
    target, card = find_target(name), find_card(find_target(name).card)
    assert 0.9 * card.memory_bytes < target.usable_bytes <= card.memory_bytes - (2 << 30)
    assert abs(target.memory_bytes_per_second / card.memory_bytes_per_second - 1) < 0.001
    assert target.host_bytes_per_second <= target.link_bytes_per_second < target.memory_bytes_per_second
    assert target.max_devices == 8
    assert len(target.sources) == 3


def test_the_numbers_of_the_reference_card():
    target = find_target("a100_sxm_80")
    assert target.usable_bytes == 85_100_068_864 - 2 * 1024**3
    assert target.bf16_flops / target.memory_bytes_per_second == pytest.approx(153, abs=0.1)
    assert (target.link_bytes_per_second, target.host_bytes_per_second) == (300 * 10**9, 32 * 10**9)
