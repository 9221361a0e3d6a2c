"""Query energies on disk: written whole, read back, refused with a remedy where they are not what is needed."""

from pathlib import Path

import numpy as np
import pytest

from appliance.model.energy import has_energy, read_energy, write_energy
from appliance.model.store import StoreError

ENERGY = np.random.default_rng(0).random((3, 2, 16), np.float32)
SHAPE = (3, 2, 16)


def test_energies_come_back_and_may_be_replaced(tmp_path: Path) -> None:
    assert not has_energy(tmp_path)
    for energy in (ENERGY, ENERGY + 1):
        write_energy(tmp_path, energy)
        assert has_energy(tmp_path)
        np.testing.assert_array_equal(read_energy(tmp_path, SHAPE), energy)
    assert [path.name for path in tmp_path.iterdir()] == ["query-energy"], "nothing is left over"


def test_missing_energies_name_the_build(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"query-energy: the query energies .* are missing; run zccp build"):
        read_energy(tmp_path, SHAPE)


@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_damaged_energies_are_not_used(tmp_path: Path, damage: str) -> None:
    write_energy(tmp_path, ENERGY)
    file = tmp_path / "query-energy" / "query_energy.npy"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.unlink()
    if damage != "gone":
        file.write_bytes(content if damage == "flip" else content[:-8])
    with pytest.raises(StoreError, match=r"query-energy: .*query_energy\.npy.*; delete the folder and run zccp build"):
        read_energy(tmp_path, SHAPE)


@pytest.mark.parametrize("energy", [ENERGY[:2], ENERGY.astype(np.float64)], ids=["shape", "dtype"])
def test_energies_of_another_model_are_not_used(tmp_path: Path, energy: np.ndarray) -> None:
    write_energy(tmp_path, energy)
    with pytest.raises(StoreError, match=r"the model needs float32\[3, 2, 16\]; delete the folder and run zccp build"):
        read_energy(tmp_path, SHAPE)


def test_a_disk_that_refuses_is_told(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"query-energy: cannot be written .*; free some space and run zccp build"):
        write_energy(tmp_path / "missing", ENERGY)
