"""Conversion and restoring: exact, straight to placement, all or nothing."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

from appliance.model.checksums import CHECKSUMS
from appliance.model.disk import DiskSpaceError
from appliance.model.opening import open_checkpoint
from appliance.model.store import StoreError, convert, restore
from planner.formats import WeightForm
from planner.weights import weight_specs
from tests.support.tiny_models import save_gguf


@pytest.fixture
def checkpoint(tmp_path):
    save_gguf(tmp_path / "tiny.gguf", "qwen3", tie_word_embeddings=True)
    return open_checkpoint(tmp_path / "tiny.gguf")


def rounded(tree):
    """A stand-in for quantisation: codes are the signs, scales the mean magnitudes."""
    tree["head"] = tree["embed"].T
    for name in ("qkv", "o", "gate_up", "down", "head"):
        values = tree.pop(name)
        tree[f"{name}.codes"] = np.sign(values).astype(np.int8)
        tree[f"{name}.scale"] = np.abs(values).mean(axis=-2)
    return tree


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("form", list(WeightForm))
def test_what_is_restored_is_what_was_read(tmp_path, checkpoint, form):
    specs = weight_specs(checkpoint.architecture, form)
    convert(checkpoint, tmp_path / "out" / "w", form, rounded if form is WeightForm.INT8 else None)
    found = restore(tmp_path / "out" / "w", specs)
    source = dict(checkpoint.weights())
    if form is WeightForm.INT8:
        source = rounded(source)
    assert found.keys() == specs.keys()
    for name, array in found.items():
        expected = source[name]
        if specs[name].dtype == "bfloat16":
            expected = expected.astype(ml_dtypes.bfloat16)
        assert isinstance(array, jax.Array)
        assert array.dtype.name == specs[name].dtype
        np.testing.assert_array_equal(np.asarray(array), expected)
    assert names_in(tmp_path / "out") == ["w"]


def test_arrays_go_where_the_placement_says(tmp_path, checkpoint):
    convert(checkpoint, tmp_path / "w", WeightForm.FLOAT32)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("model",))
    specs = weight_specs(checkpoint.architecture, WeightForm.FLOAT32)
    asked = []

    def placement(spec):
        asked.append(spec.name)
        parts = [("model" if axis in ("kv_heads", "ffw") else None) for axis in spec.axes]
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*parts))

    found = restore(tmp_path / "w", specs, placement)
    assert sorted(asked) == sorted(specs)
    assert found["qkv"].sharding.spec == jax.sharding.PartitionSpec(None, None, "model")


def test_a_second_conversion_replaces_the_first(tmp_path, checkpoint):
    convert(checkpoint, tmp_path / "out" / "w", WeightForm.FLOAT32)
    doubled = lambda tree: {name: 2 * values for name, values in tree.items()}  # noqa: E731
    convert(checkpoint, tmp_path / "out" / "w", WeightForm.FLOAT32, doubled)
    found = restore(tmp_path / "out" / "w", weight_specs(checkpoint.architecture, WeightForm.FLOAT32))
    np.testing.assert_array_equal(np.asarray(found["embed"]), 2 * dict(checkpoint.weights())["embed"])
    assert names_in(tmp_path / "out") == ["w"]


def test_int8_needs_a_transform_and_every_tree_its_form(tmp_path, checkpoint):
    with pytest.raises(ValueError, match="int8 form needs a transform"):
        convert(checkpoint, tmp_path / "w", WeightForm.INT8)
    with pytest.raises(ValueError, match="is not the form's"):
        convert(checkpoint, tmp_path / "w", WeightForm.INT8, lambda tree: tree)
    with pytest.raises(ValueError, match="weight embed has shape"):
        convert(checkpoint, tmp_path / "w", WeightForm.FLOAT32, lambda tree: {**tree, "embed": tree["embed"][1:]})
    assert not (tmp_path / "w").exists()


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "no space left on the disk"),
        (ValueError("broken\nlong"), "broken"),
    ],
)
def test_a_failed_write_leaves_the_old_weights_and_nothing_else(tmp_path, checkpoint, monkeypatch, error, words):
    out = tmp_path / "out"
    convert(checkpoint, out / "w", WeightForm.FLOAT32)
    real = ocp.StandardCheckpointer.save

    def failing(self, path, *arguments, **keywords):
        real(self, path, *arguments, **keywords)
        self.wait_until_finished()
        raise error

    monkeypatch.setattr(ocp.StandardCheckpointer, "save", failing)
    with pytest.raises(StoreError, match=words) as caught:
        convert(checkpoint, out / "w", WeightForm.FLOAT32)
    assert "nothing was kept" in str(caught.value)
    assert names_in(out) == ["w"]
    restore(out / "w", weight_specs(checkpoint.architecture, WeightForm.FLOAT32))


def test_too_small_a_disk_is_refused_before_anything_is_read(tmp_path, checkpoint, monkeypatch):
    monkeypatch.setattr("appliance.model.disk.shutil.disk_usage", lambda path: SimpleNamespace(free=40 << 20))
    with pytest.raises(DiskSpaceError, match="64 MiB in reserve") as caught:
        convert(checkpoint, tmp_path / "out" / "w", WeightForm.FLOAT32)
    assert "40 MiB free" in str(caught.value)
    assert names_in(tmp_path / "out") == []


def test_other_forms_damage_and_absence_are_told_apart(tmp_path, checkpoint):
    specs = weight_specs(checkpoint.architecture, WeightForm.FLOAT32)
    with pytest.raises(StoreError, match="no converted weights; run zccp convert"):
        restore(tmp_path / "w", specs)
    convert(checkpoint, tmp_path / "w", WeightForm.FLOAT32)
    with pytest.raises(StoreError, match=r"down\.codes is missing"):
        restore(tmp_path / "w", weight_specs(checkpoint.architecture, WeightForm.INT8))
    with pytest.raises(StoreError, match=r"embed is float32\[384, 48\], bfloat16\[384, 48\] is needed"):
        restore(tmp_path / "w", weight_specs(checkpoint.architecture, WeightForm.BF16))


def largest_file(folder: Path) -> Path:
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: os.truncate(largest_file(folder), 100), "has been changed"),
        (lambda folder: flip(largest_file(folder)), "has been changed"),
        (lambda folder: largest_file(folder).unlink(), "is missing"),
        (lambda folder: (folder / "d" / "more").write_bytes(b"1"), "d/more is not one of its files"),
        (lambda folder: (folder / CHECKSUMS).write_text("["), "its checksums cannot be read"),
        (lambda folder: (folder / CHECKSUMS).write_text("[]"), "holds no map of files"),
        (lambda folder: (folder / CHECKSUMS).unlink(), "its checksums cannot be read"),
    ],
    ids=["truncated", "one bit", "a file less", "a file more", "damaged list", "no map", "no list"],
)
def test_damaged_weights_are_refused_before_they_are_read(tmp_path, checkpoint, damage, words):
    convert(checkpoint, tmp_path / "w", WeightForm.FLOAT32)
    damage(tmp_path / "w")
    with pytest.raises(StoreError, match=words) as caught:
        restore(tmp_path / "w", weight_specs(checkpoint.architecture, WeightForm.FLOAT32))
    assert str(caught.value).startswith(f"{tmp_path / 'w'}: ")
    assert str(caught.value).endswith("; run zccp convert --force")


def test_progress_names_both_halves(tmp_path, checkpoint):
    seen = []
    convert(
        checkpoint, tmp_path / "w", WeightForm.FLOAT32, progress=lambda what, done, total: seen.append((what, done))
    )
    assert [what for what, _ in seen][-2:] == ["writing weights", "writing weights"]
    assert seen[0][0] == "reading weights"
