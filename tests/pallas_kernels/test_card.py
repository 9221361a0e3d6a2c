"""Cards: occupancy by each of its bounds, and names."""

import pytest

from pallas_kernels.card import UnknownCardError, card_names, find_card

A100 = find_card("a100_sxm_80")


@pytest.mark.parametrize(
    ("registers", "threads", "shared_bytes", "blocks"),
    [
        (32, 128, 0, 16),  # 2,048 threads
        (16, 32, 0, 32),  # blocks
        (128, 128, 1024, 4),  # 65,536 registers
        (128, 256, 1024, 2),
        (129, 256, 1024, 1),  # registers come by eights
        (168, 128, 1024, 3),
        (64, 128, 82_432, 2),  # 167,936 bytes, 1,024 of them for the system in every block
        (64, 128, 83_456, 1),
        (64, 128, 166_912, 1),
        (64, 128, 166_913, 0),
    ],
)
def test_blocks_that_fit_at_once(registers, threads, shared_bytes, blocks):
    assert A100.blocks(registers=registers, threads=threads, shared_bytes=shared_bytes) == blocks


def test_the_description_for_the_compiler_names_the_architecture():
    assert A100.architecture == "sm_80"
    assert "cuda_compute_capability { major: 8 minor: 0 }" in A100.target_config()
    assert "core_count: 108" in A100.target_config()


def test_an_unknown_card_is_refused_with_those_there_are():
    assert card_names() == ("a100_sxm_80",)
    with pytest.raises(UnknownCardError, match="card 'a200' is unknown; cards: a100_sxm_80"):
        find_card("a200")
