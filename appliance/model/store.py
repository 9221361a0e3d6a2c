"""Model store: models on disk as orbax checkpoints, converted once and restored straight to their placement.

Owns the conversion of a checkpoint into a weight form and the folders of models (``appliance.model.record`` describes
them). The only module of this package that imports jax and orbax. Every write happens in a temporary folder beside the
destination and is renamed when complete, so that a stopped or failed conversion leaves nothing that looks like a model.
"""

import errno
import logging
import os
import shutil
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp

from appliance.model.checkpoint import Checkpoint, CheckpointError, Progress, no_progress
from appliance.model.checksums import seal, seal_faults
from appliance.model.disk import check_space
from planner.formats import WeightForm
from planner.weights import WeightSpec, weight_specs

Transform = Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]
"""A float32 weight tree to the tree of another form. It may drop arrays from its argument as it goes."""

Placement = Callable[[WeightSpec], jax.sharding.Sharding]
"""Where an array goes."""

_DTYPES: dict[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "int8": np.dtype(np.int8),
}


class StoreError(RuntimeError):
    """A model cannot be written or read; the message names the path, what is wrong and the remedy."""


def convert(
    checkpoint: Checkpoint,
    destination: Path,
    form: WeightForm,
    transform: Transform | None = None,
    progress: Progress = no_progress,
) -> None:
    """Write a model's weights in one form as an orbax checkpoint.

    The peak of memory is the float32 tree, the new tree and whatever ``transform`` takes besides.

    Args:
        checkpoint: the opened model.
        destination: the folder to make (``record.weights_folder``); an older one there is replaced once the new one is
            complete.
        form: the weight form.
        transform: makes the form's tree from the float32 tree; bf16 and float32 need none.
        progress: called with what is going on.

    Raises:
        CheckpointError: the model's files fail while they are read.
        DiskSpaceError: too little disk space.
        StoreError: the disk refuses.
    """
    specs = weight_specs(checkpoint.architecture, form)
    if transform is None and form is WeightForm.INT8:
        raise ValueError("the int8 form needs a transform that rounds the weights")
    destination.parent.mkdir(parents=True, exist_ok=True)
    check_space(destination.parent, sum(spec.num_bytes for spec in specs.values()), f"the {form} weights")
    try:
        tree = dict(checkpoint.weights(progress))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{checkpoint.files[0]}: failed while it was read: {error}") from error
    tree = transform(tree) if transform is not None else tree
    _save(_in_form(tree, specs), destination, progress)


def restore(path: Path, specs: Mapping[str, WeightSpec], placement: Placement | None = None) -> dict[str, jax.Array]:
    """Read a model's weights, each array straight to where it belongs.

    Args:
        path: the folder that ``convert`` made.
        specs: the tree that is expected.
        placement: where each array goes; the default is the first device.

    Raises:
        StoreError: there is no checkpoint, its files are not those that were written, or its tree, shapes or number
            formats are not the expected ones.
    """
    if not path.is_dir():
        raise StoreError(f"{path}: no converted weights; run zccp convert")
    check_weights(path)
    single = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = {
        name: jax.ShapeDtypeStruct(
            spec.shape, _DTYPES[spec.dtype], sharding=single if placement is None else placement(spec)
        )
        for name, spec in specs.items()
    }
    try:
        with _quiet_orbax(), ocp.StandardCheckpointer() as checkpointer:
            _check_stored(path, checkpointer.metadata(path).item_metadata, wanted)
            return checkpointer.restore(path, wanted)
    except StoreError:
        raise
    except Exception as error:  # orbax wraps what its readers raise in bare exceptions
        raise StoreError(
            f"{path}: cannot be read ({_reason(error)}); delete the folder and run zccp convert"
        ) from error


def check_weights(path: Path) -> None:
    """Check that the files of converted weights are those that ``convert`` wrote.

    Raises:
        StoreError: a file is missing, new, changed or cannot be read.
    """
    if faults := seal_faults(path):
        raise StoreError(f"{path}: {'; '.join(faults[:3])}; run zccp convert --force")


def _in_form(tree: dict[str, np.ndarray], specs: Mapping[str, WeightSpec]) -> dict[str, np.ndarray]:
    """The tree in the specs' number formats, checked against them."""
    if tree.keys() != specs.keys():
        raise ValueError(f"weight tree {sorted(tree)} is not the form's {sorted(specs)}")
    result: dict[str, np.ndarray] = {}
    for name, spec in specs.items():
        array = tree.pop(name)
        if array.shape != spec.shape:
            raise ValueError(f"weight {name} has shape {array.shape}, the form asks for {spec.shape}")
        result[name] = array.astype(_DTYPES[spec.dtype], copy=False)
    return result


def _save(tree: Mapping[str, np.ndarray], destination: Path, progress: Progress) -> None:
    part = destination.with_name(f".{destination.name}.{os.getpid()}.part")
    old = destination.with_name(f".{destination.name}.{os.getpid()}.old")
    progress("writing weights", 0, 1)
    try:
        with _quiet_orbax(), ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(part, dict(tree))
            checkpointer.wait_until_finished()
        seal(part)
        if destination.exists():
            destination.rename(old)
        part.rename(destination)
    except Exception as error:
        raise StoreError(
            f"{destination}: the weights could not be written ({_reason(error)}); "
            "nothing was kept, free some space or choose another disk and convert again",
        ) from error
    finally:
        for left in (part, old, *part.parent.glob(f"{part.name}*")):
            shutil.rmtree(left, ignore_errors=True)
    progress("writing weights", 1, 1)


@contextmanager
def _quiet_orbax() -> Generator[None]:
    """Orbax logs, with traces, what it also raises; one error is enough."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _says_full(error: Exception) -> bool:
    return getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error)


def _reason(error: Exception) -> str:
    return (
        "no space left on the disk" if _says_full(error) else next(iter(str(error).splitlines()), type(error).__name__)
    )


def _check_stored(path: Path, stored: object, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    tree = getattr(stored, "tree", None) or {}
    faults = [f"{name} is missing" for name in wanted.keys() - tree.keys()]
    faults += [f"{name} is not expected" for name in tree.keys() - wanted.keys()]
    for name in wanted.keys() & tree.keys():
        have, want = tree[name], wanted[name]
        if tuple(have.shape) != want.shape or np.dtype(have.dtype) != want.dtype:
            faults.append(f"{name} is {have.dtype}{list(have.shape)}, {want.dtype}{list(want.shape)} is needed")
    if faults:
        raise StoreError(f"{path}: {'; '.join(sorted(faults)[:6])}; delete the folder and run zccp convert")
