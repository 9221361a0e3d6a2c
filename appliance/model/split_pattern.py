r"""Split patterns: which two characters can never stand next to each other inside one match of a regular expression.

Owns the parser of the patterns by which byte-level vocabularies split a text, and what follows from their structure.
Reads a pattern's source; never runs it, so nothing here depends on how an engine searches.

A pattern is read as its positions (Glushkov's construction): one for every character class in it, with the positions
that may follow each. That describes every text the pattern can match, and some more. If no position that takes ``a`` is
followed by one that takes ``b``, no match contains ``ab``, whatever the alternatives try and in whatever order.
Patterns may look ahead in one way, ``(?!\S)``; whatever else looks around, refers back, is atomic or can match
nothing is refused.

Source: V. M. Glushkov, The abstract theory of automata, Russian Mathematical Surveys 16 (1961).
"""

import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import NoReturn

WHITE_SPACE = frozenset(
    "\t\n\v\f\r \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
    "\u2028\u2029\u202f\u205f\u3000"
)
"""Unicode White_Space."""

_AHEAD = r"(?!\S)"
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v"}
_CATEGORY = re.compile(r"L[ultmo]?|M[ecn]?|N[dlo]?|P[cdseifo]?|S[mcko]?|Z[slp]?")
_SYNTAX = frozenset("|()[]{}?*+.^$\\")

Takes = Callable[[str], bool]
"""Whether a class takes a character."""


class PatternError(ValueError):
    """A pattern has a construct that is not understood; the message names it and its place."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Part of a pattern by its positions.

    ``nullable``: it may match nothing. ``first`` and ``last``: where a match of it may begin and end. ``alone``:
    positions of which one character is a match, whatever stands around it; ``free``: nothing is one. ``looks``: it may
    look ahead before it has taken anything.
    """

    nullable: bool = True
    first: frozenset[int] = frozenset()
    last: frozenset[int] = frozenset()
    alone: frozenset[int] = frozenset()
    free: bool = True
    looks: bool = False


_NOTHING = _Part()
_LOOK = _Part(free=False, looks=True)


class SplitPattern:
    """What is known of the matches of one pattern. Immutable."""

    def __init__(self, source: str) -> None:
        """Read a pattern.

        Raises:
            PatternError: it has a construct that is not understood, or may match nothing.
        """
        reader = _Reader(source)
        whole = reader.whole()
        if whole.nullable:
            raise PatternError(f"{source!r} may match nothing")
        self._positions = reader.positions
        self._follow = {place: frozenset(places) for place, places in reader.follow.items()}
        self._looking = frozenset(reader.looking)
        self._alone = whole.alone

    def parts(self, a: str, b: str) -> bool:
        """Whether no match contains ``a`` followed by ``b``, and what matches up to ``a`` cannot depend on ``b``."""
        takes = self._positions
        ends = [place for place in range(len(takes)) if takes[place](a)]
        if any(takes[after](b) for place in ends for after in self._follow.get(place, ())):
            return False
        return b in WHITE_SPACE or self._looking.isdisjoint(ends)

    def takes(self, char: str) -> bool:
        """Whether every place with this character is inside some match."""
        return any(self._positions[place](char) for place in self._alone)


class _Reader:
    """Reads a pattern's source from left to right."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._at = 0
        self._any_case = False
        self.positions: list[Takes] = []
        self.follow: dict[int, set[int]] = {}
        self.looking: set[int] = set()

    def whole(self) -> _Part:
        part = self._alternatives()
        if self._at < len(self._source):
            self._refuse("an unpaired parenthesis")
        return part

    def _refuse(self, what: str) -> NoReturn:
        raise PatternError(f"{self._source!r} has {what} at {self._at}")

    def _next(self) -> str:
        return self._source[self._at : self._at + 1]

    def _skip(self, text: str) -> bool:
        if not self._source.startswith(text, self._at):
            return False
        self._at += len(text)
        return True

    def _alternatives(self) -> _Part:
        parts = [self._sequence()]
        while self._skip("|"):
            parts.append(self._sequence())
        return reduce(_either, parts)

    def _sequence(self) -> _Part:
        part = _NOTHING
        while self._next() not in ("", "|", ")"):
            part = self._joined(part, self._quantified())
        return part

    def _joined(self, left: _Part, right: _Part) -> _Part:
        self._link(left, right)
        return _Part(
            nullable=left.nullable and right.nullable,
            first=left.first | right.first if left.nullable else left.first,
            last=left.last | right.last if right.nullable else right.last,
            alone=(left.alone if right.free else frozenset()) | (right.alone if left.free else frozenset()),
            free=left.free and right.free,
            looks=left.looks or (left.nullable and right.looks),
        )

    def _link(self, left: _Part, right: _Part) -> None:
        for place in left.last:
            self.follow.setdefault(place, set()).update(right.first)
        if right.looks:
            self.looking |= left.last

    def _quantified(self) -> _Part:
        part = self._atom()
        while (sign := self._next()) and sign in "?*+{":
            least, most = self._counts()
            if self._next() == "+" and sign != "{":
                self._refuse("a possessive quantifier")
            self._skip("?")
            if most != 1:
                self._link(part, part)
            optional = least == 0
            part = _Part(
                nullable=optional or part.nullable,
                first=part.first,
                last=part.last,
                alone=part.alone if least <= 1 or part.free else frozenset(),
                free=optional or part.free,
                looks=part.looks,
            )
        return part

    def _counts(self) -> tuple[int, int | None]:
        """Least and most repetitions of the quantifier here; None = no bound."""
        sign = self._next()
        self._at += 1
        if sign != "{":
            return {"?": (0, 1), "*": (0, None), "+": (1, None)}[sign]
        end = self._source.find("}", self._at)
        least, comma, most = self._source[self._at : max(end, self._at)].partition(",")
        if not least.isdecimal() or not (most.isdecimal() or not most):
            self._refuse("a brace that is no quantifier")
        self._at = end + 1
        return int(least), (int(most) if most else None) if comma else int(least)

    def _atom(self) -> _Part:
        if self._skip(_AHEAD):
            return _LOOK
        if self._next() == "(":
            return self._group()
        if self._skip("["):
            return self._position(self._class())
        if self._skip("."):
            return self._position(lambda char: char != "\n")
        if self._skip("\\"):
            return self._position(self._escape()[0])
        char = self._next()
        if char in _SYNTAX:
            self._refuse(repr(char))
        self._at += 1
        return self._position(lambda given: given == char)

    def _group(self) -> _Part:
        before = self._any_case
        if self._skip("(?i:"):
            self._any_case = True
        elif not self._skip("(?:") and self._skip("(") and self._next() == "?":
            self._refuse("a group of a kind that is not understood")
        part = self._alternatives()
        if not self._skip(")"):
            self._refuse("an unpaired parenthesis")
        self._any_case = before
        return part

    def _position(self, takes: Takes) -> _Part:
        """One position; without regard to case it may take any letter, and is counted on for none."""
        place = len(self.positions)
        any_case = self._any_case
        self.positions.append((lambda char: char.isalpha() or takes(char)) if any_case else takes)
        itself = frozenset({place})
        return _Part(nullable=False, first=itself, last=itself, alone=frozenset() if any_case else itself, free=False)

    def _escape(self) -> tuple[Takes, str]:
        """What the escape here takes, and the character it stands for if it is only one."""
        kind = self._next()
        self._at += 1
        if kind in ("p", "P"):
            end = self._source.find("}", self._at)
            name = self._source[self._at + 1 : max(end, self._at)]
            if self._next() != "{" or not _CATEGORY.fullmatch(name):
                self._refuse("a property that is no general category")
            self._at = end + 1
            return lambda char: unicodedata.category(char).startswith(name) == (kind == "p"), ""
        if kind in ("s", "S"):
            return lambda char: (char in WHITE_SPACE) == (kind == "s"), ""
        if kind in ("d", "D"):
            return lambda char: char.isdecimal() == (kind == "d"), ""
        char = _CONTROLS.get(kind, kind)
        if not kind or (kind.isalnum() and kind not in _CONTROLS):
            self._refuse(f"the escape \\{kind}")
        return lambda given: given == char, char

    def _class(self) -> Takes:
        negated = self._skip("^")
        items: list[Takes] = []
        while not self._skip("]"):
            items.append(self._class_item())
        if not items:
            self._refuse("an empty class")
        return lambda char: any(takes(char) for takes in items) != negated

    def _class_item(self) -> Takes:
        low_takes, low = self._class_char()
        if not low or self._next() != "-" or self._source.startswith("-]", self._at):
            return low_takes
        self._at += 1
        _, high = self._class_char()
        if not high:
            self._refuse("a range without an end")
        return lambda char: low <= char <= high

    def _class_char(self) -> tuple[Takes, str]:
        char = self._next()
        if not char or char == "[" or self._source.startswith("&&", self._at):
            self._refuse("a class of classes, or one without an end")
        self._at += 1
        if char == "\\":
            return self._escape()
        return lambda given: given == char, char


def _either(left: _Part, right: _Part) -> _Part:
    return _Part(
        nullable=left.nullable or right.nullable,
        first=left.first | right.first,
        last=left.last | right.last,
        alone=left.alone | right.alone,
        free=left.free or right.free,
        looks=left.looks or right.looks,
    )
