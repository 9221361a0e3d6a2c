"""Ids: the ids of one sequence, prompt and completion, wherever they lie.

Owns what the planner needs of them, and ``IdBuffer``, ids in memory that is shared with whoever reads them. Imports
neither jax nor numpy.
"""

from typing import Protocol, runtime_checkable


@runtime_checkable
class Ids(Protocol):
    """Ids that grow at their end. A list of ints is one; a slice has the buffer protocol or is a list."""

    def __len__(self) -> int: ...

    def append(self, token_id: int, /) -> None:
        """Add an id behind the last one."""
        ...

    def __getitem__(self, part: slice, /) -> "memoryview | list[int]": ...


class IdBuffer:
    """Ids in memory that somebody else owns: nothing is copied, and what is appended is there for its readers at once.

    Args:
        tokens: int32 memory; ids begin at its first place.
        length: ids that are there.
    """

    __slots__ = ("_length", "_tokens")

    def __init__(self, tokens: memoryview, length: int) -> None:
        self._tokens = tokens
        self._length = length

    def __len__(self) -> int:
        return self._length

    def append(self, token_id: int) -> None:
        """Write an id behind the last one.

        Raises:
            IndexError: the memory is full.
        """
        self._tokens[self._length] = token_id
        self._length += 1

    def __getitem__(self, part: slice) -> memoryview:
        start, stop, _ = part.indices(self._length)
        return self._tokens[start:stop]

    def padded(self, start: int, count: int) -> memoryview | None:
        """``count`` places from ``start`` on, of which only those that hold ids mean anything; None past the memory."""
        return self._tokens[start : start + count] if start + count <= len(self._tokens) else None
