"""Held-out text for kv-quality: prose and code that every Python brings along, and which nothing here was fitted to.

Owns the list. The calibration text of the package is another one.
"""

import importlib.util
import pydoc_data.topics
from dataclasses import dataclass
from pathlib import Path

from api.ports import TextCodec
from appliance.bench.runner import BenchUseError

PROSE = (
    "sequence-types", "shifting", "slicings", "specialattrs", "specialnames", "string-methods", "strings",
    "subscriptions", "truth", "try", "types", "typesfunctions", "typesmapping", "typesmethods", "typesmodules",
    "typesseq", "typesseq-mutable", "unary", "while", "with", "yield",
)  # fmt: skip
"""Topics of ``pydoc_data.topics``, in this order."""

CODE = ("tarfile", "statistics", "difflib", "heapq", "fractions", "shutil", "zipfile")
"""Modules of the standard library, in this order."""


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Ids of one kind of text, and where the text is from."""

    kind: str
    ids: list[int]
    source: str


def held_out(codec: TextCodec, count: int) -> tuple[HeldOut, HeldOut]:
    """The first ``count`` ids of prose and of code.

    Raises:
        BenchUseError: a text is missing or too short.
    """
    topics = pydoc_data.topics.topics
    missing = [name for name in PROSE if name not in topics]
    if missing:
        raise BenchUseError(f"pydoc_data.topics of this Python lacks {missing}; use a complete Python")
    prose = "\n\n".join(topics[name] for name in PROSE)
    code = "\n\n".join(_source(name) for name in CODE)
    return (
        _cut(codec, "prose", prose, count, f"pydoc_data.topics, {PROSE[0]} to {PROSE[-1]} (PSF licence)"),
        _cut(codec, "code", code, count, f"standard library: {', '.join(CODE)} (PSF licence)"),
    )


def _source(module: str) -> str:
    found = importlib.util.find_spec(module)
    origin = found.origin if found else None
    path = Path(origin) if origin else None
    if path is not None and path.name == "__init__.py" and (inner := path.with_name(f"{module}.py")).is_file():
        path = inner
    if path is None or path.suffix != ".py":
        raise BenchUseError(f"the standard library here has no source of {module}; use a complete Python")
    return path.read_text(encoding="utf-8")


def _cut(codec: TextCodec, kind: str, text: str, count: int, source: str) -> HeldOut:
    ids = list(codec.encode(text, parse_special=False))
    if len(ids) < count:
        raise BenchUseError(f"the {kind} has {len(ids)} ids, {count} were asked for; ask for fewer with --ids")
    return HeldOut(kind, ids[:count], source)
