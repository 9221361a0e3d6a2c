"""Logs that are read while they are written."""

import json
from pathlib import Path
from typing import Any


def whole_lines(log: Path) -> str:
    """What a log says up to the end of its last line; of one that is being written a reader may see a part."""
    text = log.read_text()
    return text[: text.rfind("\n") + 1]


def entries(log: Path) -> list[dict[str, Any]]:
    """The JSON lines of a log so far."""
    return [json.loads(line) for line in whole_lines(log).splitlines() if line.startswith("{")]
