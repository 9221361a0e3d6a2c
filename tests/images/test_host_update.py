"""Releases are taken only with the right signature, form and checksums."""

import hashlib
import json
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from images.host import update
from images.host.slots import entry_text


def release(folder: Path, key: Ed25519PrivateKey, **changed: object) -> Path:
    folder.mkdir()
    files = {}
    for name in ("root.ext4.zst", "vmlinuz", "initrd.img"):
        (folder / name).write_bytes(name.encode())
        files[name] = {"bytes": len(name), "sha256": hashlib.sha256(name.encode()).hexdigest(), "unpacked_bytes": 64}
    text = json.dumps({"schema": 1, "version": "2.0.0", "variant": "cpu", "files": files, **changed}).encode()
    (folder / update.MANIFEST).write_bytes(text)
    (folder / update.SIGNATURE).write_bytes(key.sign(text))
    return folder


@pytest.fixture
def key() -> Ed25519PrivateKey:
    return Ed25519PrivateKey.generate()


@pytest.fixture
def trusted(tmp_path: Path, key: Ed25519PrivateKey) -> Path:
    path = tmp_path / "release-key.pem"
    path.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return path


def test_a_signed_manifest_is_read(tmp_path: Path, key: Ed25519PrivateKey, trusted: Path) -> None:
    assert update.read_manifest(release(tmp_path / "r", key), trusted).version == "2.0.0"


def test_another_signer_is_refused(tmp_path: Path, trusted: Path) -> None:
    with pytest.raises(update.UpdateError, match="not signed by the key in"):
        update.read_manifest(release(tmp_path / "r", Ed25519PrivateKey.generate()), trusted)


def test_a_changed_manifest_is_refused(tmp_path: Path, key: Ed25519PrivateKey, trusted: Path) -> None:
    folder = release(tmp_path / "r", key)
    path = folder / update.MANIFEST
    path.write_text(path.read_text().replace("2.0.0", "2.0.1"))
    with pytest.raises(update.UpdateError, match="not signed"):
        update.read_manifest(folder, trusted)


@pytest.mark.parametrize(
    ("changed", "told"),
    [({"schema": 2}, "schema 2"), ({"files": {}}, r"missing \['initrd.img', 'root.ext4.zst', 'vmlinuz'\]")],
)
def test_another_form_is_refused(
    tmp_path: Path, key: Ed25519PrivateKey, trusted: Path, changed: dict[str, object], told: str
) -> None:
    with pytest.raises(update.UpdateError, match=told):
        update.read_manifest(release(tmp_path / "r", key, **changed), trusted)


def test_no_release_is_refused(tmp_path: Path, trusted: Path) -> None:
    with pytest.raises(update.UpdateError, match="no release that can be checked"):
        update.read_manifest(tmp_path, trusted)


@pytest.mark.parametrize("fault", ["variant", "short", "damaged"])
def test_nothing_is_touched_by_a_release_that_is_not_taken(
    tmp_path: Path, key: Ed25519PrivateKey, trusted: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr(update, "booted", lambda: "zccp-a")
    monkeypatch.setattr(update, "read_manifest", lambda folder, read=update.read_manifest: read(folder, trusted))
    folder = release(tmp_path / "r", key)
    if fault == "short":
        (folder / "vmlinuz").write_bytes(b"v")
    elif fault == "damaged":
        (folder / "vmlinuz").write_bytes(b"VMLINUZ")
    esp = tmp_path / "esp"
    entry = esp / "loader/entries/zccp-1.0.0.conf"
    entry.parent.mkdir(parents=True)
    entry.write_text(entry_text("1.0.0", "zccp-b"))
    told = {"variant": "for 'cpu' hosts", "short": "does not have the 7 bytes", "damaged": "SHA-256 is another"}[fault]
    with pytest.raises(update.UpdateError, match=told):
        update.install(folder, "a100" if fault == "variant" else "cpu", lambda _done, _total: None, esp)
    assert entry.exists()
