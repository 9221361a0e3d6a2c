"""Meter: the time and size bounds of one template render, and the checks that keep operations within them.

Owns the arithmetic of bounds: how large a result would be, worked out before it is made. Knows no template engine
beyond its error type.
"""

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from jinja2 import TemplateError

TOTAL_FACTOR = 32
_TICK_EVERY = 1024
_MAX_NUMBER_BITS = 4096
_WIDE_FORMAT = re.compile(r"\d{4,}|\*|\{[^{}]*\{")


class BoundError(TemplateError):
    """A render passed its time or size bound."""


@dataclass(slots=True)
class Meter:
    """The bounds of one render: ``deadline_s`` on the clock's scale, ``max_chars`` for any text or list it makes.

    All it makes together, which it might keep, is bounded by ``TOTAL_FACTOR`` times that; ``total`` counts it.
    """

    clock: Callable[[], float]
    deadline_s: float
    max_chars: int
    total: int = 0

    def tick(self) -> None:
        """One step of work.

        Raises:
            BoundError: the deadline has passed.
        """
        if self.clock() > self.deadline_s:
            raise BoundError("the chat template did not finish within its time bound")

    def room_for(self, size: int) -> None:
        """Check a size before something of it is made.

        Raises:
            BoundError: it passes the bound.
        """
        if size > self.max_chars:
            raise BoundError(f"the chat template makes {size} characters or items; the bound is {self.max_chars}")

    def made(self, value: object) -> None:
        """Count something just made.

        Raises:
            BoundError: it, or everything made so far, passes the bound.
        """
        if isinstance(value, str | bytes | list | tuple | dict):
            self.room_for(len(value))
            self.total += len(value)
            if self.total > TOTAL_FACTOR * self.max_chars:
                raise BoundError(
                    f"the chat template makes more than {TOTAL_FACTOR * self.max_chars} characters in all; "
                    f"the bound is {TOTAL_FACTOR} times {self.max_chars}"
                )
        elif isinstance(value, int) and value.bit_length() > _MAX_NUMBER_BITS:
            raise BoundError(f"the chat template makes a number of more than {_MAX_NUMBER_BITS} bits")

    def written(self, *values: object) -> None:
        """Check the size that values have as text, however often a container holds the same part.

        Raises:
            BoundError: it passes the bound.
        """
        size, visited, open_values = 0, 0, list(values)
        while open_values:
            value = open_values.pop()
            visited += 1
            if visited % _TICK_EVERY == 0:
                self.tick()
            if isinstance(value, str | bytes):
                size += len(value)
            elif isinstance(value, Mapping):
                size += 2
                open_values += value.keys()
                open_values += value.values()
            elif isinstance(value, list | tuple):
                size += 2
                open_values += value
            else:
                size += 1
            self.room_for(size + len(open_values))

    def product(self, left: object, right: object) -> None:
        """Check ``left * right`` where one of them is repeated.

        Raises:
            BoundError: the result passes the bound.
        """
        for repeated, times in ((left, right), (right, left)):
            if isinstance(repeated, str | bytes | list | tuple) and isinstance(times, int):
                self.room_for(len(repeated) * max(times, 0))

    def power(self, base: object, exponent: object) -> None:
        """Check ``base ** exponent``.

        Raises:
            BoundError: the result has too many bits.
        """
        if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * exponent > _MAX_NUMBER_BITS:
            raise BoundError(f"the chat template makes a number of more than {_MAX_NUMBER_BITS} bits")

    def replacement(self, text: str, old: str, new: str) -> None:
        """Check ``text.replace(old, new)``.

        Raises:
            BoundError: the result passes the bound.
        """
        if len(new) > len(old):
            self.room_for(len(text) + text.count(old) * (len(new) - len(old)))

    def layout(self, text: str | bytes) -> None:
        """Check the widths in a format string.

        Raises:
            BoundError: a width is four digits or more, or computed.
        """
        if _WIDE_FORMAT.search(text if isinstance(text, str) else text.decode("latin-1")):
            raise BoundError("the chat template uses a format with a wide or computed width")

    def join(self, separator: str, parts: Iterable[object]) -> str:
        """Join parts as text, checked on the way.

        Raises:
            BoundError: the deadline passed or the result passes the bound.
        """
        pieces: list[str] = []
        size = 0
        for part in parts:
            self.tick()
            if not isinstance(part, str):
                self.written(part)
            piece = str(part)
            size += len(piece) + len(separator)
            self.room_for(size)
            pieces.append(piece)
        joined = separator.join(pieces)
        self.made(joined)
        return joined


def check_widths(values: Iterable[object] | Sequence[object], bound: int) -> None:
    """Check whole numbers that are widths or counts.

    Raises:
        BoundError: one of them passes the bound.
    """
    for value in values:
        if isinstance(value, int) and abs(value) > bound:
            raise BoundError(f"the chat template asks for a width of {value}; the bound is {bound}")


def monotonic_meter(seconds: float, max_chars: int) -> Meter:
    """A meter that allows so many seconds from now."""
    return Meter(time.monotonic, time.monotonic() + seconds, max_chars)
