"""Ranges of request fields: one function a kind of value.

Owns the wording of range errors: the field's path, the value, the bound. A field that is null or missing has its
default.
"""

import math
from collections.abc import Sequence

from msgspec import Raw

from api.errors import BadRequestError, UnsupportedError, quoted

NULL = Raw(b"null")
"""Default of fields that are accepted and inert: whatever stands there is skipped."""

MAX_STOP_CHARACTERS = 1024


def number(name: str, value: float | None, low: float, high: float, default: float) -> float:
    """A number in ``[low, high]``.

    Raises:
        BadRequestError: it is outside.
    """
    if value is None:
        return default
    if not (math.isfinite(value) and low <= value <= high):
        raise BadRequestError(f"{name} is {value}; it must be between {low:g} and {high:g}", param=name)
    return float(value)


def whole(name: str, value: int | None, low: int, high: int, default: int) -> int:
    """A whole number in ``[low, high]``.

    Raises:
        BadRequestError: it is outside.
    """
    if value is None:
        return default
    if not low <= value <= high:
        raise BadRequestError(f"{name} is {quoted(value)}; it must be between {low} and {high}", param=name)
    return value


def at_least(name: str, value: int | None, low: int) -> int | None:
    """A whole number of ``low`` or more; None stays None.

    Raises:
        BadRequestError: it is less.
    """
    if value is not None and value < low:
        raise BadRequestError(f"{name} is {quoted(value)}; it must be {low} or more", param=name)
    return value


def stop_strings(name: str, value: str | Sequence[str] | None, most: int) -> tuple[str, ...]:
    """Stop strings as a tuple.

    Raises:
        BadRequestError: too many, an empty one, or one that is too long.
    """
    if value is None:
        return ()
    if isinstance(value, str):
        value = (value,)
    if len(value) > most:
        raise BadRequestError(f"{name} has {len(value)} strings; at most {most} are taken", param=name)
    for index, stop in enumerate(value):
        path = f"{name}[{index}]"
        if not stop:
            raise BadRequestError(f"{path} is empty; a stop string needs at least one character", param=path)
        if len(stop) > MAX_STOP_CHARACTERS:
            raise BadRequestError(
                f"{path} has {len(stop)} characters; at most {MAX_STOP_CHARACTERS} are taken", param=path
            )
    return tuple(value)


def top_k(value: int | None, vocab: int) -> int:
    """``top_k`` with 0, -1 and anything from the vocabulary's size on meaning off.

    Raises:
        BadRequestError: it is below -1.
    """
    value = at_least("top_k", value, -1)
    return 0 if value is None or value <= 0 or value >= vocab else value


def refuse_tools(tools: Sequence[Raw] | None) -> None:
    """Take an empty tool list only.

    Raises:
        UnsupportedError: there are tools.
    """
    if tools:
        raise UnsupportedError(f"tools has {len(tools)} entries; tools are not supported yet, send none", param="tools")
