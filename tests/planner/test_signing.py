import os
import stat

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from planner.signing import SigningKeyError, local_key, public_key, public_pem, verifies


def test_a_local_key_is_made_once_for_the_owner_alone(tmp_path):
    path = tmp_path / "state" / "key.pem"
    mask = os.umask(0)
    try:
        key = local_key(path)
    finally:
        os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert public_pem(local_key(path)) == public_pem(key)


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o660])
def test_a_key_that_others_can_read_is_refused(tmp_path, mode):
    path = tmp_path / "key.pem"
    local_key(path)
    path.chmod(mode)
    with pytest.raises(SigningKeyError, match=f"signing key {path} can be read by others; run: chmod 600 {path}"):
        local_key(path)


@pytest.mark.parametrize("content", [b"", b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"])
def test_a_file_that_is_no_key(tmp_path, content):
    path = tmp_path / "key.pem"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(
        SigningKeyError, match=rf"signing key {path} cannot be read \(.*\); delete it to make a new one"
    ):
        local_key(path)


def test_keys_of_another_kind(tmp_path):
    other = ec.generate_private_key(ec.SECP256R1())
    path = tmp_path / "key.pem"
    path.write_bytes(other.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    path.chmod(0o600)
    with pytest.raises(SigningKeyError, match="is no Ed25519 key; delete it to make a new one"):
        local_key(path)
    with pytest.raises(SigningKeyError, match="the public key of the program store is no Ed25519 key"):
        public_key(other.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    with pytest.raises(SigningKeyError, match="cannot be read"):
        public_key(b"nothing")


def test_signatures():
    key, other = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    public = public_key(public_pem(key))
    signature = key.sign(b"text")
    assert verifies(public, signature, b"text")
    assert not verifies(public, signature, b"text ")
    assert not verifies(public, other.sign(b"text"), b"text")
    assert not verifies(public, b"", b"text")
    assert not verifies(public, signature[:-1], b"text")
