"""Prefix references: short digests of the first ids of a prompt, from which the longest common prefix is exact.

Owns the marks: one every ``MARK_TOKENS`` ids, 8 bytes of a SHA-256 chain that begins with the tenant and the model.
Equal marks mean equal ids from the first on (but for one chance in 2^64), so that nobody has to believe what another
node says of a prefix: what two prompts share is where their marks first differ. Never holds text or ids.
"""

import hashlib
import sys
from array import array
from collections.abc import Sequence

MARK_TOKENS = 64
MARK_BYTES = 8
MAX_MARKS = 64
"""Marks of one reference: a fingerprint sees no more of a prompt than their ids."""

_SPACE_BYTES = 16


def space_of(tenant: str, model: str) -> bytes:
    """The part of the index that one tenant's prompts of one model have to themselves; 16 bytes, a one-way digest.

    Args:
        tenant: who asks; empty where no key is needed.
        model: what the ids belong to, down to its weights.
    """
    digest = hashlib.sha256(b"zccp space 1")
    for part in (tenant.encode("utf-8", "surrogatepass"), model.encode("utf-8", "surrogatepass")):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()[:_SPACE_BYTES]


def reference_of(space: bytes, ids: Sequence[int]) -> bytes:
    """The marks of a prompt's first ids, ``MARK_BYTES`` each; none for a prompt of fewer than ``MARK_TOKENS``."""
    count = min(len(ids) // MARK_TOKENS, MAX_MARKS)
    head = array("i", ids[: count * MARK_TOKENS])
    if sys.byteorder == "big":
        head.byteswap()
    view, step = memoryview(head).cast("B"), MARK_TOKENS * head.itemsize
    link, marks = hashlib.sha256(space).digest(), bytearray()
    for start in range(0, len(view), step):
        link = hashlib.sha256(link + view[start : start + step]).digest()
        marks += link[:MARK_BYTES]
    return bytes(marks)


def common_tokens(own: bytes, other: bytes) -> int:
    """How many first ids two prompts share, in whole ``MARK_TOKENS``, by their references."""
    marks = 0
    while True:
        at = marks * MARK_BYTES
        mark = own[at : at + MARK_BYTES]
        if len(mark) < MARK_BYTES or mark != other[at : at + MARK_BYTES]:
            return marks * MARK_TOKENS
        marks += 1
