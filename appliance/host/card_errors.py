"""Errors that the NVIDIA driver reports of the served cards, read from the kernel's log as they are written.

Owns the table of errors after which a process cannot go on with its card, the parsing of the driver's lines and the
open log. Decides nothing; never imports jax.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

KERNEL_LOG = Path("/dev/kmsg")
DRIVER_CARDS = Path("/proc/driver/nvidia/gpus")

FATAL: dict[int, str] = {
    48: "uncorrectable memory error; the card must be reset",
    62: "a controller inside the card halted; the card must be reset",
    74: "error of a link between cards; the cards must be reset if it comes back",
    79: "the card fell off the bus; the host must be restarted",
    94: "contained memory error; a new process takes other memory",
    95: "uncontained memory error; the card must be reset",
    119: "the card's system processor does not answer; the card must be reset",
    120: "the card's system processor failed; the card must be reset",
    140: "memory error without recovery; the card must be reset",
}
"""Number -> meaning and remedy. Errors of programs (13, 31, 43, 45, 109) come back from the call that caused them and
are not listed, nor are those that only record something (63, 64, 92).
Source: NVIDIA, "Xid Errors", catalogue for Ampere and later, immediate actions."""

LINKS = 74
"""The one error that matters only where several cards work together."""

_LINE = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)\): (\d+)\b")
_MAX_RECORD = 8192


@dataclass(frozen=True, slots=True)
class CardError:
    """One error: the card's PCI address, the driver's number, and what it means."""

    card: str
    number: int
    meaning: str

    def __str__(self) -> str:
        return f"card {self.card} reported Xid {self.number}: {self.meaning}"


def fatal(line: str, cards: Sequence[str]) -> CardError | None:
    """The error that a line of the driver reports, if one of ``cards`` cannot be used on after it.

    Args:
        line: the text of a record.
        cards: PCI addresses of the served cards; none = any card.
    """
    found = _LINE.match(line)
    if found is None:
        return None
    card, number = found[1], int(found[2])
    meaning = FATAL.get(number)
    if meaning is None or (number == LINKS and len(cards) == 1):
        return None
    served = not cards or any(_place(card) == _place(other) for other in cards)
    return CardError(card, number, meaning) if served else None


def served_cards(visible: str, folder: Path = DRIVER_CARDS) -> tuple[str, ...]:
    """PCI addresses of the cards that a process sees; empty where they cannot be told, which means any card.

    Args:
        visible: the process's ``CUDA_VISIBLE_DEVICES``: indices in the order of the bus, or beginnings of ids.
        folder: where the driver describes its cards.
    """
    addresses = sorted(path.name for path in folder.glob("*"))
    found: list[str] = []
    for name in filter(None, (part.strip() for part in visible.split(","))):
        if name.isdigit():
            matching = addresses[int(name) : int(name) + 1]
        else:
            matching = [address for address in addresses if _id_of(folder / address).startswith(name)]
        if not matching:
            return ()
        found += matching[:1]
    return tuple(found)


class KernelLog:
    """The kernel's log from now on."""

    def __init__(self, cards: Sequence[str], path: Path = KERNEL_LOG) -> None:
        """Open the log and pass over what it holds.

        Raises:
            OSError: it cannot be read here.
        """
        self._cards = tuple(cards)
        self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            os.lseek(self._descriptor, 0, os.SEEK_END)
        except OSError:
            os.close(self._descriptor)
            raise

    def fileno(self) -> int:
        """The descriptor, readable when there are new records."""
        return self._descriptor

    def read(self) -> list[CardError]:
        """Fatal errors of the cards since the last call.

        Raises:
            OSError: the log cannot be read any more.
        """
        errors: list[CardError] = []
        while True:
            try:
                record = os.read(self._descriptor, _MAX_RECORD)
            except BlockingIOError:
                return errors
            except BrokenPipeError:
                continue  # records were overwritten before they were read; the next call gives the oldest left
            if not record:
                return errors
            error = _reported(record.decode(errors="replace"), self._cards)
            if error is not None:
                errors.append(error)

    def close(self) -> None:
        """Close the log."""
        os.close(self._descriptor)


def _reported(record: str, cards: Sequence[str]) -> CardError | None:
    """The error in a record of the log, if it comes from the kernel: programs can write there as well.

    Source: the kernel's documentation of /dev/kmsg: the first number is the level and, times 8, the facility; that of
    the kernel is 0 and cannot be written by programs.
    """
    header, _, text = record.partition(";")
    level = header.partition(",")[0]
    return fatal(text, cards) if level.isdigit() and int(level) < 8 else None


def _id_of(card: Path) -> str:
    for line in (card / "information").read_text(errors="replace").splitlines():
        if line.startswith("GPU UUID:"):
            return line.partition(":")[2].strip()
    return ""


def _place(address: str) -> tuple[int, ...]:
    """Domain, bus and device of a PCI address, with or without a function, in digits of any number."""
    parts = [int(part, 16) for part in address.partition(".")[0].split(":") if part]
    return (0,) * (3 - len(parts)) + tuple(parts)
