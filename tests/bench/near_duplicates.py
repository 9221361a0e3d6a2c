"""Near-duplicates: documents of real English and copies of them with small edits, each at a place of its own.

Owns the cutting of a text into documents and the kinds of edits: punctuation, a date, a name, the order of two clauses.
Where an edit is, is uniform over the length of the document. Equal arguments give equal texts.
"""

import random
import re
from collections.abc import Callable

Edit = Callable[[str, random.Random], str]

NAMES = ("Alvarez", "Brandt", "Chen", "Dubois", "Eriksen", "Fontana", "Gupta", "Haddad")
_SENTENCE = re.compile(r"(?<=[.!?])\s+")


def documents(text: str, count: int, words: int) -> list[str]:
    """The first ``count`` stretches of so many words.

    Raises:
        ValueError: the text is too short.
    """
    all_words = text.split()
    if len(all_words) < count * words:
        raise ValueError(f"the text has {len(all_words)} words; {count} documents of {words} need {count * words}")
    return [" ".join(all_words[start : start + words]) for start in range(0, count * words, words)]


def edited(document: str, source: random.Random, edits: int) -> str:
    """The document with so many edits."""
    for _ in range(edits):
        document = source.choice((_punctuation, _date, _name, _clauses))(document, source)
    return document


def _place(document: str, source: random.Random) -> int:
    """The beginning of a word, uniform over the length."""
    found = document.find(" ", source.randrange(len(document)))
    return len(document) if found < 0 else found


def _punctuation(document: str, source: random.Random) -> str:
    at = _place(document, source)
    return f"{document[:at]}{source.choice(',;:')}{document[at:]}"


def _date(document: str, source: random.Random) -> str:
    at = _place(document, source)
    day = f"{source.randrange(1, 29)}/{source.randrange(1, 13)}/{source.randrange(1990, 2030)}"
    return f"{document[:at]} {day}{document[at:]}"


def _name(document: str, source: random.Random) -> str:
    at = _place(document, source)
    return f"{document[:at]} {source.choice(NAMES)}{document[at:]}"


def _clauses(document: str, source: random.Random) -> str:
    """Two neighbouring sentences change places."""
    sentences = _SENTENCE.split(document)
    if len(sentences) < 2:
        return _punctuation(document, source)
    at = source.randrange(len(sentences) - 1)
    sentences[at : at + 2] = reversed(sentences[at : at + 2])
    return " ".join(sentences)
