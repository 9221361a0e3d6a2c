"""Decoding: ids back to bytes and text, token by token, without ever showing half a character.

Owns the byte meaning of tokens (byte-level alphabets, ``<0xNN>`` byte fallback, the space sign of SentencePiece) and
the incremental decoder. Reads the decoder description of a ``tokenizer.json``; never imports jax or numpy.

The incremental text equals the engine's decoding of the whole list with control tokens left out. One case cannot:
bytes of a byte-fallback vocabulary that only later turn out to be no UTF-8 make the engine give up the valid characters
before them as well; characters once streamed stay.
"""

import codecs
import re
from collections.abc import Mapping
from enum import StrEnum

from tokenizers import Tokenizer as Engine

_SPACE_SIGN = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class _LeadingSpace(StrEnum):
    """What happens to the space that a vocabulary puts in front of a text."""

    KEPT = "kept"
    ONE_REMOVED = "one"
    FIRST_REMOVED = "first"
    """Every space sign of the first token goes."""


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level vocabularies: printable bytes stand for themselves, the rest moves above 255.

    Source: the GPT-2 encoder (MIT licence).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    moved = (byte for byte in range(256) if byte not in set(printable))
    return alphabet | {chr(256 + n): byte for n, byte in enumerate(moved)}


_BYTE_OF = _byte_alphabet()


class TokenTable:
    """The bytes of every token, worked out on first use and kept."""

    def __init__(self, engine: Engine, decoder: object) -> None:
        """Read the decoder description.

        Raises:
            ValueError: the decoder is of a kind whose byte meaning is not known; it is named.
        """
        self._engine = engine
        self.byte_level, self._leading = _decoder_kind(decoder)
        added = engine.get_added_tokens_decoder()
        self._special = {token_id: token.content for token_id, token in added.items() if token.special}
        self._cache: dict[int, bytes] = {}

    def is_special(self, token_id: int) -> bool:
        """Whether this is a control token, which gives no text."""
        return token_id in self._special

    def raw(self, token_id: int) -> bytes:
        """The token's bytes; a control token's literal text; nothing for an id that the vocabulary does not have."""
        found = self._cache.get(token_id)
        if found is None:
            found = self._cache[token_id] = self._work_out(token_id)
        return found

    def opening(self, token_id: int, raw: bytes) -> tuple[bytes, bool]:
        """The bytes of a text's first token, and whether the leading-space rule is now done with."""
        if self._leading is _LeadingSpace.FIRST_REMOVED:
            token = self._engine.id_to_token(token_id) or ""
            return (raw if _BYTE_TOKEN.fullmatch(token) else token.replace(_SPACE_SIGN, "").encode()), True
        if self._leading is _LeadingSpace.ONE_REMOVED:
            return raw.removeprefix(b" "), bool(raw)
        return raw, True

    def _work_out(self, token_id: int) -> bytes:
        if token_id in self._special:
            return self._special[token_id].encode()
        token = self._engine.id_to_token(token_id) if token_id >= 0 else None
        if token is None:
            return b""
        if self.byte_level:
            try:
                return bytes(_BYTE_OF[char] for char in token)
            except KeyError:
                return token.encode()
        if (match := _BYTE_TOKEN.fullmatch(token)) is not None:
            return bytes([int(match[1], 16)])
        return token.replace(_SPACE_SIGN, " ").encode()


class IncrementalDecoder:
    """Text of one completion, a token at a time; constant work a token."""

    def __init__(self, table: TokenTable, *, goes_on: bool) -> None:
        """Start a completion; ``goes_on`` says that text stands right before it, so that a leading space is content."""
        self._table = table
        self._opened = goes_on
        errors = "replace" if table.byte_level else "zccp-replace-each-byte"
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors)

    def push(self, token_id: int) -> str:
        """Text that this id completes; may be empty. Control tokens give no text."""
        if self._table.is_special(token_id):
            return ""
        raw = self._table.raw(token_id)
        if not self._opened:
            raw, self._opened = self._table.opening(token_id, raw)
        return self._utf8.decode(raw)

    def flush(self) -> str:
        """What was held back, undecodable bytes as one U+FFFD run. Call once, at the end."""
        return self._utf8.decode(b"", final=True)


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error("zccp-replace-each-byte", _replace_each_byte)


def _decoder_kind(decoder: object) -> tuple[bool, _LeadingSpace]:
    """(byte level, leading-space rule) of a tokenizer.json decoder.

    Known are ByteLevel, Metaspace, and sequences of Replace (space sign by space), ByteFallback, Fuse and one Strip.
    """
    steps = _steps(decoder)
    kinds = [str(step.get("type")) for step in steps]
    if kinds == ["ByteLevel"]:
        return True, _LeadingSpace.KEPT
    leading = _LeadingSpace.KEPT
    for kind, step in zip(kinds, steps, strict=True):
        if kind == "Metaspace" and step.get("replacement") == _SPACE_SIGN:
            never = step.get("prepend_scheme") == "never" or step.get("add_prefix_space") is False
            leading = _LeadingSpace.KEPT if never else _LeadingSpace.FIRST_REMOVED
        elif kind == "Strip" and (step.get("content"), step.get("start"), step.get("stop")) == (" ", 1, 0):
            leading = _LeadingSpace.ONE_REMOVED
        elif kind == "Replace" and (step.get("pattern"), step.get("content")) == ({"String": _SPACE_SIGN}, " "):
            continue
        elif kind not in ("ByteFallback", "Fuse"):
            raise ValueError(
                f"tokenizer.json: decoder {' + '.join(kinds)} is not supported at {kind}; supported: ByteLevel, "
                "Metaspace, and Replace + ByteFallback + Fuse + Strip"
            )
    if not {"Metaspace", "Replace"} & set(kinds):
        raise ValueError(
            f"tokenizer.json: decoder {' + '.join(kinds) or 'none'} is not supported; ByteLevel or Metaspace is"
        )
    return False, leading


def _steps(decoder: object) -> list[Mapping[str, object]]:
    if not isinstance(decoder, Mapping):
        return []
    if decoder.get("type") == "Sequence":
        return [step for inner in decoder.get("decoders", ()) for step in _steps(inner)]
    return [decoder]
