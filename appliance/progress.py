"""How a long verb shows what it is doing.

Owns the bar on a terminal and the lines elsewhere, both on standard error. Never writes results.
"""

import sys
from typing import Any, Self

import click


class ProgressView:
    """Shows what is going on: a bar on a terminal, a line a stage elsewhere; always on standard error."""

    def __init__(self) -> None:
        """Show nothing yet."""
        self._bar: Any = None
        self._task: Any = None
        self._stage = ""

    def __enter__(self) -> Self:
        """Start the bar where there is a terminal."""
        if sys.stderr.isatty():
            from rich.console import Console  # noqa: PLC0415
            from rich.progress import Progress  # noqa: PLC0415

            self._bar = Progress(console=Console(stderr=True), transient=True)
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()

    def update(self, what: str, done: int, total: int) -> None:
        """``done`` of ``total`` units of ``what``."""
        if self._bar is None:
            if what != self._stage:
                click.echo(what, err=True)
        elif self._task is None:
            self._task = self._bar.add_task(what, total=total or None, completed=done)
        else:
            self._bar.update(self._task, description=what, total=total or None, completed=done)
        self._stage = what
