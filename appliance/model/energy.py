"""The query energies of a model on disk: measured at a build, read by the engine, for the bitmask formats.

Owns the folder ``query-energy`` of a model, sealed by checksums as converted weights are.
"""

import os
import shutil
from pathlib import Path

import numpy as np

from appliance.model.checksums import broken_seals, is_sealed, seal
from appliance.model.store import StoreError

_FOLDER, _FILE = "query-energy", "query_energy.npy"
_REMEDY = "run zccp build"


def has_energy(folder: Path) -> bool:
    """Whether a model's energies have been measured."""
    return is_sealed(folder / _FOLDER)


def write_energy(folder: Path, energy: np.ndarray) -> None:
    """Keep a model's energies, float32 [layers, kv_heads, head_dim]; what was there is replaced in one step.

    Raises:
        StoreError: the disk refuses.
    """
    whole = folder / _FOLDER
    part = folder / f".{_FOLDER}.{os.getpid()}.part"
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        np.save(part / _FILE, energy, allow_pickle=False)
        seal(part)
        shutil.rmtree(whole, ignore_errors=True)
        part.rename(whole)
    except OSError as error:
        raise StoreError(f"{whole}: cannot be written ({error}); free some space and {_REMEDY}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def read_energy(folder: Path, shape: tuple[int, int, int]) -> np.ndarray:
    """A model's energies, float32 of ``shape``.

    Raises:
        StoreError: there are none, they are not those that were written, or those of another model.
    """
    whole = folder / _FOLDER
    if not has_energy(folder):
        raise StoreError(f"{whole}: the query energies that bitmask formats need are missing; {_REMEDY}")
    try:
        if faults := broken_seals(whole):
            raise StoreError(f"{whole}: {'; '.join(faults[:3])}; delete the folder and {_REMEDY}")
        energy = np.load(whole / _FILE, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise StoreError(f"{whole}: cannot be read ({error}); delete the folder and {_REMEDY}") from error
    if energy.shape != shape or energy.dtype != np.float32:
        raise StoreError(
            f"{whole}: holds {energy.dtype}{list(energy.shape)}, the model needs float32{list(shape)}; "
            f"delete the folder and {_REMEDY}"
        )
    return energy
