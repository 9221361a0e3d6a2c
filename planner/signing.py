"""Signing keys of program stores: Ed25519, private on the build host, public wherever programs are loaded.

Owns the key files and the names of what is signed. A local key is made at first use; operators bring their own for
release stores.
"""

import os
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)

MANIFEST, SIGNATURE = "manifest.json", "manifest.sig"
"""Files of a program store: what lies in it, and the signature of that."""


class SigningKeyError(ValueError):
    """A key file is unreadable, of another kind, or open to others; the message names the file and the remedy."""


def local_key(path: Path) -> Ed25519PrivateKey:
    """The private key in a file, made with mode 0600 if there is none.

    Raises:
        SigningKeyError: the file is no Ed25519 private key or others can read it.
    """
    if not path.exists():
        key = Ed25519PrivateKey.generate()
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(pem)
        return key
    if path.stat().st_mode & 0o077:
        raise SigningKeyError(f"signing key {path} can be read by others; run: chmod 600 {path}")
    try:
        key = load_pem_private_key(path.read_bytes(), None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise SigningKeyError(f"signing key {path} cannot be read ({error}); delete it to make a new one") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise SigningKeyError(f"signing key {path} is no Ed25519 key; delete it to make a new one")
    return key


def public_key(pem: bytes) -> Ed25519PublicKey:
    """The public key in a PEM text.

    Raises:
        SigningKeyError: it is none.
    """
    try:
        key = load_pem_public_key(pem)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise SigningKeyError(f"the public key of the program store cannot be read: {error}") from error
    if not isinstance(key, Ed25519PublicKey):
        raise SigningKeyError("the public key of the program store is no Ed25519 key")
    return key


def public_pem(key: Ed25519PrivateKey) -> bytes:
    """The public half as PEM text, for configurations of nodes that load release stores."""
    return key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def verifies(key: Ed25519PublicKey, signature: bytes, message: bytes) -> bool:
    """Whether the signature is this key's over this message."""
    try:
        key.verify(signature, message)
    except InvalidSignature:
        return False
    return True
