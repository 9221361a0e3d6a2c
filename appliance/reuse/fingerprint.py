"""The context fingerprint (CSF): a MinHash signature of the beginning of a prompt, and its LSH band keys.

Owns the light tokens, the shingles, the signature and the keys; all of it is a pure function of the text, the same in
every process and on every machine. Similar prompts are likely to share a band key; what they really have in common is
for others to find out exactly. Never imports jax, and of ``datasketch`` only what computes a signature.

The set that is compared is that of the word 3-shingles of the first ``LIGHT_TOKENS`` light tokens; J below is the
Jaccard similarity of two such sets. A light token is a run of letters and digits, one ideograph or kana, or one other
character that is no white space, after NFC and the masks. Each different token is hashed once with SHA3-256; a shingle
is three such hashes, mixed with an odd factor for each place, so that order counts.

With r rows a band and b bands, two prompts share a key with probability 1 - (1 - J^r)^b:

====== === === ========= ========= =========
hashes  r   b   J = 0.85  J = 0.92  J = 0.2
====== === === ========= ========= =========
128     10  12  0.928     0.9989    1.2e-6
256     12  21  0.960     0.99993   8.6e-8
====== === === ========= ========= =========

Source: A. Broder, On the resemblance and containment of documents, 1997; J. Leskovec, A. Rajaraman, J. Ullman, Mining
of Massive Datasets, section 3.4.
"""

import hashlib
import re
import sys
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module, util
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from appliance.reuse.masks import Masks

if TYPE_CHECKING:
    from datasketch import MinHash

SCHEMA = 1
"""Rises with every change of what a fingerprint is; fingerprints of different schemas are never compared."""
LIGHT_TOKENS = 1024
TEXT_CHARS = 16_384
"""Characters of a text that are looked at; enough for ``LIGHT_TOKENS`` of any prose."""
SHINGLE = 3
BANDS: Mapping[int, tuple[int, int]] = {128: (10, 12), 256: (12, 21)}
"""Rows a band and bands, for each number of hashes."""

_HEAD_CHARS = 6400
"""Characters in which ``LIGHT_TOKENS`` of most texts lie; all of ``TEXT_CHARS`` are taken where they do not."""
_SEED = 1
_BATCH = 256
"""Shingles that are permuted at a time: what arises fits into the processor's cache."""
_FACTORS = np.array([0x9E37_79B9_7F4A_7C15, 0xC2B2_AE3D_27D4_EB4F, 0x1656_67B1_9E37_79F9], "<u8")
"""Odd factors of the three places of a shingle, with about as many ones as zeros."""

_IDEOGRAPHS = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_WORDS = re.compile(r"\w+|[^\w\s]")
_WORDS_AND_IDEOGRAPHS = re.compile(rf"[{_IDEOGRAPHS}]|[^\W{_IDEOGRAPHS}]+|[^\w\s]")
_IDEOGRAPH = re.compile(rf"[{_IDEOGRAPHS}]")


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Of one prompt: ``values``, the signature as little-endian uint32, and ``keys``, 8 bytes a band."""

    values: bytes
    keys: tuple[bytes, ...]

    def similarity(self, other: "Fingerprint") -> float:
        """The estimate of J: the share of equal values. Both must have the same number of hashes."""
        own, others = np.frombuffer(self.values, "<u4"), np.frombuffer(other.values, "<u4")
        return float((own == others).mean())


class Fingerprinter:
    """Makes fingerprints of one kind. Safe to share between threads."""

    __slots__ = ("_blank", "_hashes", "_masks")

    def __init__(self, hashes: Literal[128, 256] = 128, masks: Masks | None = None) -> None:
        """Prepare.

        Args:
            hashes: values of a signature.
            masks: what is hidden first; None hides nothing.
        """
        self._hashes = hashes
        self._masks = masks or Masks()
        self._blank = _minhash()(num_perm=hashes, seed=_SEED, hashfunc=_as_given, scheme="affine32")

    def of(self, text: str) -> Fingerprint | None:
        """The fingerprint of a text; None where it has fewer than ``SHINGLE`` tokens, which would all be alike."""
        tokens = self._tokens(text)
        if len(tokens) < SHINGLE:
            return None
        signature = self._blank.copy()
        shingles = shingle_hashes(tokens)
        for start in range(0, len(shingles), _BATCH):
            signature.update_batch((shingles[start : start + _BATCH],))
        values = signature.hashvalues.astype("<u4").tobytes()
        return Fingerprint(values, band_keys(values, self._hashes))

    def _tokens(self, text: str) -> list[str]:
        """The light tokens, from as little of the text as has them."""
        for chars in (_HEAD_CHARS, TEXT_CHARS):
            tokens = light_tokens(self._masks.apply(unicodedata.normalize("NFC", text[:chars])))
            if len(tokens) > LIGHT_TOKENS or len(text) <= chars:
                break
        return tokens[:LIGHT_TOKENS]


def light_tokens(text: str) -> list[str]:
    """The light tokens of a text that is already masked."""
    if text.isascii() or not _IDEOGRAPH.search(text):
        return _WORDS.findall(text)
    return _WORDS_AND_IDEOGRAPHS.findall(text)


def shingle_hashes(tokens: Sequence[str]) -> "npt.NDArray[np.uint32]":
    """A 32-bit hash of the shingle at each place of at least ``SHINGLE`` tokens."""
    digests = {token: hashlib.sha3_256(token.encode("utf-8", "replace")).digest() for token in set(tokens)}
    words = np.frombuffer(b"".join(map(digests.__getitem__, tokens)), "<u8")[:: hashlib.sha3_256().digest_size // 8]
    places = len(tokens) - SHINGLE + 1
    mixed = np.zeros(places, "<u8")
    for place, factor in enumerate(_FACTORS):
        mixed += words[place : place + places] * factor
    return (mixed >> np.uint64(32)).astype(np.uint32)


def band_keys(values: bytes, hashes: int) -> tuple[bytes, ...]:
    """The keys of a signature: 64 bits of a hash of each band's values, its place, and what it is a band of."""
    rows, bands = BANDS[hashes]
    size = 4 * rows
    return tuple(
        hashlib.blake2b(
            values[band * size : (band + 1) * size], digest_size=8, salt=bytes((SCHEMA, rows, band)), person=b"zccp-csf"
        ).digest()
        for band in range(bands)
    )


def _as_given(hashes: "npt.NDArray[np.uint32]") -> "npt.NDArray[np.uint32]":
    """The hash function of a signature: its elements are hashed already, and a batch is one array of them."""
    return hashes


@cache
def _minhash() -> "type[MinHash]":
    """``datasketch.MinHash``, without the rest of the package, which would load scipy: 43 MiB more a process."""
    name = "datasketch"
    loaded = sys.modules.get(name)
    if loaded is None:
        spec = util.find_spec(name)
        if spec is None:
            raise ModuleNotFoundError(f"{name} is not installed", name=name)
        sys.modules[name] = util.module_from_spec(spec)  # found, and not run
    try:
        return import_module(f"{name}.minhash").MinHash
    finally:
        if loaded is None:
            del sys.modules[name]
