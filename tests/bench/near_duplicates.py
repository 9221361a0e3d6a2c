"""Near-duplicates of real texts: the licence texts of the SPDX list with the edits that such documents get in practice.

Owns the texts, the kinds of edit and where they fall: punctuation, dates, names, words, and the order of clauses, at
places that are uniform over the length of a text. Everything follows from a seed, and a place is drawn before the edit
that fits there, so that no part of a text is edited more than another.

Source: the texts are those of the package ``spdx`` (CC0-1.0), which ships the licence list of SPDX.
"""

import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources

MIN_WORDS = 100
"""Texts with fewer words are left out: a page of them is most of the text."""

_NAMES = ("Ada Example", "Northwind Research Institute", "J. M. Placeholder", "The Sample Authors", "Contoso Labs GmbH")
_MONTHS = ("January", "March", "June", "September", "November")
_SYNONYMS = ("document", "party", "section", "material", "agreement", "holder", "notice", "copy")
_SIGNS = (",", ";", " -", ":")


@dataclass(frozen=True, slots=True)
class NearDuplicate:
    """An edited text: ``name`` of the licence, ``kinds`` of its edits, ``first`` where the two part, in characters."""

    name: str
    original: str
    text: str
    kinds: tuple[str, ...]

    @property
    def first(self) -> int:
        """Characters that both texts begin with."""
        pairs = zip(self.original, self.text, strict=False)
        length = min(len(self.original), len(self.text))
        return next((place for place, (one, two) in enumerate(pairs) if one != two), length)


@cache
def documents() -> Mapping[str, str]:
    """The licence texts by their SPDX identifiers, deprecated ones and doubles left out, by name."""
    found: dict[str, str] = {}
    for file in sorted((resources.files("spdx") / "data").iterdir(), key=lambda file: file.name.removesuffix(".txt")):
        name, dot, kind = file.name.rpartition(".")
        if not dot or kind != "txt" or name.startswith("deprecated_"):
            continue
        text = file.read_bytes().decode("utf-8", "replace").strip()
        if len(text.split()) >= MIN_WORDS and text not in found.values():
            found[name] = text
    return found


def near_duplicates(count: int, *, seed: int = 1, most_edits: int = 3) -> Iterator[NearDuplicate]:
    """So many edited texts: a random document each, with one to ``most_edits`` edits."""
    chance = random.Random(seed)
    names = list(documents())
    for _ in range(count):
        name = chance.choice(names)
        yield edited(name, documents()[name], chance, chance.randint(1, most_edits))


def edited(name: str, text: str, chance: random.Random, edits: int) -> NearDuplicate:
    """A text with so many edits of random kinds, each at a place that is uniform over its length."""
    changed, kinds = text, list[str]()
    while len(kinds) < edits:
        kind = chance.choice(list(EDITS))
        changed = EDITS[kind](changed, chance.random(), chance)
        kinds.append(kind)
    return NearDuplicate(name, text, changed, tuple(kinds))


def _word_at(text: str, place: float) -> tuple[int, int]:
    """Where the word at a place begins and ends."""
    at = int(place * len(text))
    match = re.compile(r"\S+").search(text, at) or re.search(r"\S+\s*$", text)
    return match.span() if match is not None else (at, at)


def _punctuation(text: str, place: float, chance: random.Random) -> str:
    _, end = _word_at(text, place)
    if text[end - 1 : end] in (",", ";", ":", "."):
        return text[: end - 1] + text[end:]
    return text[:end] + chance.choice(_SIGNS) + text[end:]


def _date(text: str, place: float, chance: random.Random) -> str:
    _, end = _word_at(text, place)
    return f"{text[:end]} ({chance.choice(_MONTHS)} {chance.randint(1, 28)}, {chance.randint(1990, 2026)}){text[end:]}"


def _name(text: str, place: float, chance: random.Random) -> str:
    _, end = _word_at(text, place)
    return f"{text[:end]} by {chance.choice(_NAMES)}{text[end:]}"


def _word(text: str, place: float, chance: random.Random) -> str:
    start, end = _word_at(text, place)
    return text[:start] + chance.choice(_SYNONYMS) + text[end:]


def _clause_order(text: str, place: float, _: random.Random) -> str:
    """The two sentences or list items from a place on change places."""
    ends = [match.end() for match in re.finditer(r"[.;]\s+|\n\s*\n", text)]
    later = [end for end in ends if end >= int(place * len(text))] or ends[-3:]
    if len(later) < 3:
        later = ends[-3:]
    if len(later) < 3:
        return text
    one, two, three = later[:3]
    return text[:one] + text[two:three] + text[one:two] + text[three:]


EDITS: Mapping[str, Callable[[str, float, random.Random], str]] = {
    "punctuation": _punctuation,
    "date": _date,
    "name": _name,
    "word": _word,
    "clause_order": _clause_order,
}
