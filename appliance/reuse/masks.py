r"""Mask patterns: volatile fields of a prompt, such as dates and ids, that are hidden before it is fingerprinted.

Owns the patterns that have a name, the checks of those that an operator writes, and the masking. Patterns are run by
RE2, whose time is linear in the text whatever the pattern, so that none can hold a worker up; what RE2 cannot do
(look-around, references back) is refused with the pattern's name. Never imports numpy or jax.

Source: RE2's syntax, https://github.com/google/re2/wiki/Syntax. ``\d``, ``\w`` and ``\b`` are ASCII there, and
``\pL`` or ``\p{N}`` name what Unicode has.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Protocol

import re2  # pyright: ignore[reportMissingTypeStubs]

_MONTH = (
    r"(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sept?(?:ember)?|Oct(?:ober)?"
    r"|Nov(?:ember)?|Dec(?:ember)?)\.?"
)
_DATE = (
    r"\b(?:\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.]\d{2,4}"
    rf"|\d{{1,2}}(?:st|n[d]|rd|th)? {_MONTH},? \d{{4}}|{_MONTH} \d{{1,2}}(?:st|n[d]|rd|th)?,? \d{{4}})\b"
)
_TIME = r"\b\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?(?: ?[ap]\.?m\b\.?)?"

NAMED: Mapping[str, str] = {
    "patient_id": r"\b(?:patient|pat|case|mrn)[ _-]?(?:id|no|nr|number)?[\"']?\s*[:=#]\s*[\"']?[\w-]*\d[\w-]*",
    "request_id": r"\b(?:request|session|trace|correlation|conversation|user)[ _-]?id[\"']?\s*[:=]\s*[\"']?[\w.-]+",
    "uuid": r"\b[0-9a-f]{8}-?[0-9a-f]{4}-?[0-9a-f]{4}-?[0-9a-f]{4}-?[0-9a-f]{12}\b",
    "email": r"\b[\w.+-]+@[\w-]+(?:\.[\w-]+)+\b",
    "timestamp": (
        rf"\b\d{{4}}-\d{{2}}-\d{{2}}[T ]\d{{2}}:\d{{2}}(?::\d{{2}}(?:[.,]\d+)?)?(?: ?Z\b| ?UTC\b|[+-]\d{{2}}:?\d{{2}})?"
        rf"|{_DATE}(?:,? (?:at )?{_TIME})?|\b1\d{{9}}(?:\d{{3}})?\b"
    ),
    "date": _DATE,
    "time": _TIME,
    "ip_address": r"\b\d{1,3}(?:\.\d{1,3}){3}\b|\b(?:[0-9a-f]{1,4}:){3,7}[0-9a-f]{0,4}\b",
    "hex_id": r"\b(?:0x)?[0-9a-f]{12,}\b",
    "number": r"\b\d+(?:[.,]\d+)*\b",
}
"""The patterns that have a name, in the order in which they are applied; upper and lower case are the same to them."""

PLACEHOLDER = "\N{WHITE SQUARE}"
"""What stands where something was hidden; a token of its own."""
MAX_PATTERNS = 32
MAX_PATTERN_CHARS = 1000
MAX_PROGRAM_BYTES = 1 << 20
"""Memory that RE2 may take for one pattern."""

_NAME = re.compile(r"[a-z_]+")


class MaskPatternError(ValueError):
    """A pattern cannot be used; the message names it and says why."""


class Masks:
    """A list of patterns, ready to run. Safe to share between threads."""

    __slots__ = ("_patterns",)

    def __init__(self, patterns: Sequence[str] = ()) -> None:
        """Compile.

        Args:
            patterns: names from ``NAMED`` and regular expressions; the latter are applied first, as they stand, then
                the named ones, in their own order.

        Raises:
            MaskPatternError: there are too many, or one cannot be used.
        """
        if len(patterns) > MAX_PATTERNS:
            raise MaskPatternError(f"there are {len(patterns)} patterns; at most {MAX_PATTERNS} are taken")
        own = [pattern for pattern in patterns if pattern not in NAMED]
        ordered = [*own, *(name for name in NAMED if name in patterns)]
        self._patterns = tuple(compiled(pattern, NAMED) for pattern in ordered)

    def apply(self, text: str) -> str:
        """The text with everything that a pattern matches replaced by ``PLACEHOLDER``."""
        if not self._patterns:
            return text
        data = text.encode("utf-8", "replace")
        for pattern in self._patterns:
            data = pattern.sub(_REPLACEMENT, data)
        return data.decode("utf-8", "replace")


_REPLACEMENT = f" {PLACEHOLDER} ".encode()
_SAMPLES = ("", "a B1, -\n")


class Match(Protocol):
    """A match, as far as it is used here."""

    def end(self) -> int:
        """Where it ends."""
        ...


class Pattern(Protocol):
    """A compiled pattern, as far as it is used here."""

    def sub(self, repl: bytes, text: bytes) -> bytes:
        """The text with every match replaced."""
        ...

    def match(self, text: str) -> Match | None:
        """Where the text begins with a match."""
        ...


def compiled(pattern: str, named: Mapping[str, str]) -> Pattern:
    """A pattern of RE2; one that is a name in ``named`` is that one, upper and lower case alike.

    Raises:
        MaskPatternError: it cannot be used; the message names it and says why.
    """
    if len(pattern) > MAX_PATTERN_CHARS:
        raise MaskPatternError(
            f"{pattern[:40]!r}... has {len(pattern)} characters; at most {MAX_PATTERN_CHARS} are taken"
        )
    given = named.get(pattern, pattern)
    if given is pattern and _NAME.fullmatch(pattern):
        raise MaskPatternError(
            f"{pattern!r} is no pattern with a name; those are {', '.join(named)}; a plain word is written as (?:word)"
        )
    options = re2.Options()
    options.log_errors = False
    options.max_mem = MAX_PROGRAM_BYTES
    options.never_capture = True
    options.case_sensitive = given is pattern
    try:
        made = re2.compile(given, options)
        matches_nothing = any(not match.group() for sample in _SAMPLES for match in made.finditer(sample))
    except (re2.error, UnicodeEncodeError) as error:
        raise MaskPatternError(f"{pattern!r} is no regular expression that RE2 takes: {_text(error)}") from None
    if matches_nothing:
        raise MaskPatternError(f"{pattern!r} matches the empty text; it must match at least one character")
    return made


def _text(error: Exception) -> str:
    given = error.args[0] if error.args else error
    return given.decode(errors="replace") if isinstance(given, bytes) else str(given)
