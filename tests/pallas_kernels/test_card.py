"""Cards: occupancy by each of its bounds, and names."""

import pytest

from pallas_kernels.card import UnknownCardError, card_names, find_card
from pallas_kernels.compiled import missing
from pallas_kernels.paged_decode import examine
from pallas_kernels.paged_decode.cases import CASES

A100 = find_card("a100_sxm_80")
needs_compiler = pytest.mark.skipif(bool(missing()), reason=missing() or "present")


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
    assert card_names() == ("a100_pcie_80", "a100_sxm_40", "a100_sxm_80", "h100_sxm", "h200_sxm")
    with pytest.raises(UnknownCardError, match="card 'a200' is unknown; cards: a100_pcie_80, a100_sxm_40, a100_sxm_80"):
        find_card("a200")


@pytest.mark.parametrize("name", card_names())
def test_every_card_can_hold_a_block_of_its_own_bounds(name):
    card = find_card(name)
    assert card.source
    assert card.shared_bytes_per_block + 1024 == card.shared_bytes_per_multiprocessor
    assert card.blocks(registers=32, threads=1024, shared_bytes=card.shared_bytes_per_block) == 1
    assert card.blocks(registers=32, threads=1024, shared_bytes=card.shared_bytes_per_block + 1) == 0
    assert f"device_memory_size: {4 * card.memory_bytes}" in card.target_config()


def test_a_hopper_has_more_shared_memory_and_instructions_of_its_own():
    hopper = find_card("h100_sxm")
    assert (A100.architecture, hopper.architecture, find_card("h200_sxm").architecture) == ("sm_80", "sm_90a", "sm_90a")
    assert hopper.blocks(registers=64, threads=128, shared_bytes=76_800) == 3
    assert A100.blocks(registers=64, threads=128, shared_bytes=76_800) == 2


@needs_compiler
@pytest.mark.parametrize("name", card_names())
def test_kernels_compile_for_every_card(name):
    case = next(case for case in CASES if case.name == "llama-3.1-8b-32:8-d128-ragged")
    code = examine.code(case, find_card(name))
    assert code.spill_bytes == 0
    assert code.tensor_products > 0
    assert code.blocks >= 2
