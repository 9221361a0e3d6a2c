"""Cuts: places at which a text may be cut, so that its parts give the ids of the whole, one after the other.

Owns the rules of that for the tokenizers that are served, and their proof. Reads an engine's description; encodes
nothing. Whatever is not known here (a normaliser, a pre-tokenizer, a pattern) has no cuts: its texts stay whole.

An engine finds added tokens, normalises what is between them, splits it into words, and gives each word its ids. A cut
between the characters ``a`` and ``b`` changes nothing if each of these steps does to both sides what it does to the
whole:

- Added tokens. None touches the cut, so that the leftmost longest ones are the same; ``a`` is no white space, so that
  none takes white space away across it.
- Normaliser. ``a`` and ``b`` are characters that NFC neither changes, moves nor composes with what is before them.
  Replacing single characters does not look at others. What puts a prefix in front of a text must do nothing to the
  second part: such texts are cut only in front of a space, and a normaliser's prefix then takes the place of it.
- Words, by a pattern. No match contains ``ab`` (``split_pattern``); then every match is one of the parts as well. If
  one of both characters is always inside a match, a word ends at the cut, and all later steps see the same words. If
  not, the cut may divide a word that the next step gets, and the proof goes on with that step.
- Ids, where a word may reach across the cut: BPE joins neighbours into tokens. If no token of the vocabulary contains
  ``ab``, nothing is ever joined across the cut, and the joins on each side are those of the whole. A run of unknown
  characters, which becomes one token, could reach across; so ``a`` and ``b`` are tokens themselves.

What a character is (a letter, a digit) is asked only of those that have been the same in every version of Unicode that
an engine may have been made with.
"""

import json
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer as Engine
from tokenizers.models import BPE
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

from appliance.model.split_pattern import WHITE_SPACE, PatternError, SplitPattern

REACH = 1024
"""Characters that are looked at from the place on at which a cut is wanted."""

_SECONDS = " \n。、，．！？；："  # noqa: RUF001 - the full-width signs are the point
"""In front of which characters a text may be cut."""
_BEFORE = re.compile(f"[{_SECONDS}]")
_SIGN = "\u2581"
"""What SentencePiece vocabularies write for a space."""

_SETTLED = (
    (0x21, 0x7E),
    (0xC0, 0x17F),
    (0x386, 0x3CE),
    (0x410, 0x44F),
    (0x5D0, 0x5EA),
    (0x621, 0x63A),
    (0x641, 0x64A),
    (0x905, 0x928),
    (0xE01, 0xE2E),
    (0x3001, 0x3002),
    (0x3041, 0x3094),
    (0x30A1, 0x30FA),
    (0x4E00, 0x9FA5),
    (0xAC00, 0xD7A3),
    (0xFF01, 0xFF5E),
)
"""Blocks after whose characters a text may be cut."""

_BYTE_LEVEL = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""The pattern of the byte-level step. Source: the tokenizers library (Apache-2.0)."""

_Part = Mapping[str, Any]
"""A normaliser or pre-tokenizer as tokenizer.json describes it."""


class _NoCutsError(ValueError):
    """Nothing is known of a part of the tokenizer."""


@dataclass(frozen=True, slots=True)
class _Step:
    """One step of splitting: ``keeps`` whether it does the same to both sides, ``ends`` whether a word ends there."""

    keeps: Callable[[str, str], bool]
    ends: Callable[[str, str], bool] = lambda _a, _b: False
    changes: Mapping[str, str] | None = None
    """Characters that it replaces, for the steps after it."""


class Cuts:
    """The cuts of one engine. Thread-safe: nothing changes after construction but a cache."""

    def __init__(self, engine: Engine) -> None:
        """Read what an engine does."""
        self._engine = engine
        self._safe: dict[tuple[str, str], bool] = {}
        self._bigrams: frozenset[str] | None = None
        self._steps: tuple[_Step, ...] | None = None
        self._changes: dict[str, str] = {}
        self.skipped = 0
        """Characters that the second part leaves out: 1 where a prefix takes the place of a space."""
        self._spaces_only = False
        try:
            self._read_normalizer(_described(engine.normalizer))
            self._steps = self._read_steps(_described(engine.pre_tokenizer))
            self._added = self._read_added()
        except (_NoCutsError, PatternError):
            self._steps = None

    @property
    def known(self) -> bool:
        """Whether there may be cuts at all."""
        return self._steps is not None

    def find(self, text: str, low: int) -> int | None:
        """The first cut at ``low`` or up to ``REACH`` characters behind it; None: there is none."""
        if self._steps is None:
            return None
        for match in _BEFORE.finditer(text, max(low, 1), low + REACH):
            at = match.start()
            if self._is_safe(text[at - 1], text[at]) and self._is_free(text, at):
                return at
        return None

    # ------------------------------------------------------------------ one place

    def _is_safe(self, a: str, b: str) -> bool:
        found = self._safe.get((a, b))
        if found is None:
            found = self._safe[a, b] = self._work_out(a, b)
        return found

    def _work_out(self, a: str, b: str) -> bool:
        if not _is_settled(a) or a in self._changes or (self._spaces_only and b != " "):
            return False
        b = self._changes.get(b, b)
        for step in self._steps or ():
            if not step.keeps(a, b):
                return False
            if step.ends(a, b):
                return True
            if step.changes is not None:
                a, b = step.changes.get(a, a), step.changes.get(b, b)
        return self._never_joined(a, b)

    def _never_joined(self, a: str, b: str) -> bool:
        """Whether no token joins ``a`` and ``b``, of a vocabulary whose words are only what BPE makes of them."""
        if self._bigrams is None:
            self._bigrams = _bigrams(self._engine, set(map(self._last_change, _SECONDS)))
        return a in self._bigrams and b in self._bigrams and a + b not in self._bigrams

    def _last_change(self, char: str) -> str:
        char = self._changes.get(char, char)
        for step in self._steps or ():
            char = (step.changes or {}).get(char, char)
        return char

    def _is_free(self, text: str, at: int) -> bool:
        """Whether no added token touches the cut, and something is left behind what the second part leaves out."""
        low, end = max(0, at - self._longest), at + self.skipped
        if end >= len(text):
            return False
        window = text[low : end + self._longest]
        seen = [window]
        if self._changes:
            seen.append("".join(self._changes.get(char, char) for char in window))
        return not any(
            each.startswith(token, place) and low + place + len(token) >= at
            for each in seen
            for place in range(min(end - low + 1, len(each)))
            for token in self._added.get(each[place], ())
        )

    # ------------------------------------------------------------------ what the engine does

    def _read_normalizer(self, described: _Part | None) -> None:
        prefix = ""
        for part in _flat(described, "normalizers"):
            match part:
                case {"type": "NFC"}:
                    continue
                case {"type": "Prepend", "prepend": str(given)} if not prefix:
                    prefix = given
                case {"type": "Replace", "pattern": {"String": str(old)}, "content": "\u2581"} if len(old) == 1:
                    self._changes.setdefault(old, _SIGN)
                    prefix = prefix.replace(old, _SIGN)
                case _:
                    raise _NoCutsError
        if prefix:
            if prefix != self._changes.get(" ", " "):
                raise _NoCutsError
            self._spaces_only, self.skipped = True, 1

    def _read_steps(self, described: _Part | None) -> tuple[_Step, ...]:
        steps: list[_Step] = []
        for part in _flat(described, "pretokenizers"):
            match part:
                case {"type": "ByteLevel"}:
                    self._spaces_only |= bool(part.get("add_prefix_space", True))
                    if part.get("use_regex", True):
                        steps.append(_by_pattern(_BYTE_LEVEL))
                    steps.append(_Step(keeps=lambda _a, _b: False))  # what follows sees another alphabet
                case {"type": "Split", "pattern": {"Regex": str(pattern)}} if _keeps_matches(part):
                    steps.append(_by_pattern(pattern))
                case {"type": "Split", "pattern": {"String": str(literal)}} if literal:
                    steps.append(_Step(keeps=_outside(literal)))
                case {"type": "Digits"}:
                    steps.append(_Step(keeps=lambda _a, _b: True))  # it asks only whether both neighbours are digits
                case {"type": "Metaspace", "replacement": str(sign)}:
                    self._spaces_only |= part.get("prepend_scheme", "always") != "never"
                    splits = bool(part.get("split", True))
                    steps.append(_metaspace(sign, splits=splits))
                case _:
                    raise _NoCutsError
        return tuple(steps)

    def _read_added(self) -> Mapping[str, Sequence[str]]:
        """Texts of added tokens by their first character, as they are looked for."""
        normalizer = self._engine.normalizer
        composes = any(part.get("type") == "NFC" for part in _flat(_described(normalizer), "normalizers"))
        texts: set[str] = set()
        for token in self._engine.get_added_tokens_decoder().values():
            texts.add(token.content)
            if token.normalized and normalizer is not None:
                if composes:
                    raise _NoCutsError
                texts.add(normalizer.normalize_str(token.content))
                texts.add("".join(self._changes.get(char, char) for char in token.content))
        texts.discard("")
        self._longest = max(map(len, texts), default=0)
        added: dict[str, list[str]] = {}
        for text in texts:
            added.setdefault(text[0], []).append(text)
        return added


def _is_settled(char: str) -> bool:
    """Whether this is no white space, and no version of Unicode or form of it makes it another character."""
    code = ord(char)
    return (
        any(low <= code <= high for low, high in _SETTLED)
        and unicodedata.category(char) != "Cn"
        and unicodedata.normalize("NFC", char) == char
        and char not in WHITE_SPACE
    )


def _described(part: Normalizer | PreTokenizer | None) -> _Part | None:
    """A part of an engine as it stands in tokenizer.json."""
    return None if part is None else json.loads(part.__getstate__())


def _flat(part: _Part | None, inner: str) -> list[_Part]:
    """The steps of a part, in order."""
    if part is None:
        return []
    if part.get("type") == "Sequence":
        return [step for each in part[inner] for step in _flat(each, inner)]
    return [part]


def _by_pattern(source: str) -> _Step:
    pattern = SplitPattern(source)
    return _Step(keeps=pattern.parts, ends=lambda a, b: pattern.takes(a) or pattern.takes(b))


def _keeps_matches(part: _Part) -> bool:
    """Whether every match becomes a word of its own, and the rest words too or nothing."""
    behavior, inverted = part.get("behavior"), part.get("invert", False)
    return behavior == "Isolated" or (behavior == "Removed" and bool(inverted))


def _outside(literal: str) -> Callable[[str, str], bool]:
    """Neither character is part of what is looked for, so that nothing found touches the cut."""
    return lambda a, b: a not in literal and b not in literal


def _metaspace(sign: str, *, splits: bool) -> _Step:
    """Spaces become signs, and a word begins with each sign if it ``splits``."""
    return _Step(
        keeps=lambda a, b: sign not in (a, b),
        ends=lambda _a, b: splits and b == " ",
        changes={" ": sign},
    )


def _bigrams(engine: Engine, seconds: set[str]) -> frozenset[str]:
    """Neighbours in the tokens of a BPE vocabulary whose second is in ``seconds``, and the tokens of one character.

    Empty where the model joins by other rules. Works through the whole vocabulary.
    """
    model = engine.model
    if not isinstance(model, BPE) or model.dropout or model.ignore_merges:
        return frozenset()
    if model.continuing_subword_prefix or model.end_of_word_suffix:
        return frozenset()
    found: set[str] = set()
    for token in engine.get_vocab(with_added_tokens=False):
        if len(token) == 1:
            found.add(token)
        for second in seconds.intersection(token[1:]):
            found.update(token[at - 1 : at + 1] for at in range(1, len(token)) if token[at] == second)
    return frozenset(found)
