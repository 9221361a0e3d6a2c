"""Models as one file: out of one store, into another that has no network, whole or not at all."""

import io
import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from appliance import cli
from appliance.model.archive import ArchiveError, export_model, import_model, remove_model
from appliance.model.catalog import file_sha256
from appliance.model.checkpoint import CheckpointError
from appliance.model.checksums import seal
from appliance.model.library import ModelLibrary
from appliance.model.record import ModelRecordError, read_record, read_text_assets
from tests.support.tiny_models import save_gguf


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A stored model with weights; what they hold does not matter here."""
    save_gguf(tmp_path / "tiny.gguf", "llama")
    folder = ModelLibrary(tmp_path / "home").ensure(str(tmp_path / "tiny.gguf"))
    weights = folder / "weights-int8"
    (weights / "d").mkdir(parents=True)
    (weights / "d/0").write_bytes(bytes(range(256)) * 64)
    seal(weights)
    (folder / "source").mkdir()
    (folder / "source/large").write_bytes(b"x" * 1000)
    return folder


@pytest.fixture
def archive(tmp_path: Path, stored: Path) -> Path:
    path = tmp_path / "tiny.tar"
    assert export_model(stored, path) == file_sha256(path)
    return path


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_model_arrives_as_it_was_but_for_its_source(tmp_path: Path, stored: Path, archive: Path) -> None:
    folder = import_model(archive, tmp_path / "other/models", file_sha256(archive).upper())
    there, here = files(folder), files(stored)
    assert there.pop("model.json") != here.pop("model.json")
    assert here.pop("source/large")
    assert there == here
    assert (read_record(folder).source_path, read_record(folder).source_files) == ("", read_record(stored).source_files)
    assert read_text_assets(folder) == read_text_assets(stored)
    assert [path.name for path in (tmp_path / "other/models").iterdir()] == ["tiny"]


def test_an_imported_model_is_served_without_its_source(tmp_path: Path, stored: Path, archive: Path) -> None:
    Path(read_record(stored).reference).unlink()
    library = ModelLibrary(tmp_path / "other")
    folder = import_model(archive, tmp_path / "other/models")
    assert library.ensure("tiny") == folder
    with pytest.raises(CheckpointError, match="came as converted weights"):
        library.open(folder)


def test_an_archive_replaces_the_model_of_its_name_and_is_alike_each_time(
    tmp_path: Path, stored: Path, archive: Path
) -> None:
    again = tmp_path / "again.tar"
    assert export_model(stored, again) == file_sha256(archive)
    folder = import_model(archive, tmp_path / "other/models")
    (folder / "weights-int8/d/0").write_bytes(b"damaged")
    assert import_model(archive, tmp_path / "other/models") == folder
    assert files(folder)["weights-int8/d/0"] == files(stored)["weights-int8/d/0"]


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20_000])


def _changed(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content.replace(bytes(range(256)) * 4, b"\0" * 1024, 1))


def _noise(path: Path) -> None:
    path.write_bytes(b"no archive" * 500)


def _with(member: tarfile.TarInfo) -> Callable[[Path], None]:
    def add(path: Path) -> None:
        with tarfile.open(path, "a") as tar:
            tar.addfile(member, io.BytesIO())

    return add


def _link(target: str) -> tarfile.TarInfo:
    member = tarfile.TarInfo("tiny/link")
    member.type, member.linkname = tarfile.SYMTYPE, target
    return member


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (_cut, "no archive|is missing"),
        (_changed, "d/0 has been changed"),
        (_noise, "is no archive of zccp models export"),
        (_with(tarfile.TarInfo("../../escaped")), "is no archive"),
        (_with(_link("/etc/passwd")), "is no archive"),
        (_with(tarfile.TarInfo("second/file")), "holds 2 things at its top"),
    ],
)
def test_nothing_of_a_damaged_archive_stays(
    tmp_path: Path, archive: Path, damage: Callable[[Path], None], told: str
) -> None:
    damage(archive)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(ArchiveError, match=told):
        import_model(archive, tmp_path / "other/models")
    assert list((tmp_path / "other/models").iterdir()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*before, "other"])


def test_another_sha256_and_no_file_are_told(tmp_path: Path, archive: Path) -> None:
    with pytest.raises(ArchiveError, match=f"its SHA-256 is {file_sha256(archive)}, not 00"):
        import_model(archive, tmp_path / "other/models", "00")
    with pytest.raises(ArchiveError, match="no such file"):
        import_model(tmp_path / "none.tar", tmp_path / "other/models")


def test_a_model_without_or_with_damaged_weights_is_not_exported(tmp_path: Path, stored: Path) -> None:
    (stored / "weights-int8/d/0").write_bytes(b"damaged")
    with pytest.raises(ArchiveError, match="d/0 has been changed"):
        export_model(stored, tmp_path / "out.tar")
    shutil.rmtree(stored / "weights-int8")
    with pytest.raises(ArchiveError, match="zccp convert tiny"):
        export_model(stored, tmp_path / "out.tar")
    assert not (tmp_path / "out.tar").exists()


def test_a_removed_model_is_gone(stored: Path) -> None:
    size = sum(len(content) for content in files(stored).values())
    assert remove_model(stored) == size
    assert list(stored.parent.iterdir()) == []
    with pytest.raises(ModelRecordError, match="holds no model"):
        remove_model(stored)


def test_the_verbs(tmp_path: Path, stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(home: str, *arguments: str, exit_code: int = 0) -> dict[str, object]:
        monkeypatch.setenv("ZCCP_HOME", str(tmp_path / home))
        monkeypatch.setenv("ZCCP_RUN", str(tmp_path / "run"))
        done = CliRunner().invoke(cli.main, ["models", *arguments, "--json"])
        assert done.exit_code == exit_code, done.output
        return json.loads(done.stdout)

    told = run("home", "export", "tiny", str(tmp_path / "out.tar"))
    assert told["sha256"] == file_sha256(tmp_path / "out.tar")
    assert run("far", "import", str(tmp_path / "out.tar"), "--sha256", str(told["sha256"]))["model"] == "tiny"
    assert "its SHA-256 is" in str(run("far", "import", str(tmp_path / "out.tar"), "--sha256", "0", exit_code=1))
    monkeypatch.setenv("ZCCP_CONFIG", str(tmp_path / "config.yaml"))
    (tmp_path / "config.yaml").write_text("model: {reference: tiny}\n")
    assert "--force removes it" in str(run("far", "rm", "tiny", exit_code=2))
    assert run("far", "rm", "tiny", "--force")["removed"] == "tiny"
    assert "tiny" not in str(run("far", "list"))
    assert stored.exists()
