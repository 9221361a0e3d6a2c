"""What all verbs of the command line share: ``--json``, ``--config``, errors as one line with an exit code, and tables.

Owns how results and errors are shown. Imports nothing that is slow to import.
"""

import functools
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from appliance.config import ApplianceConfig

_OWN_PACKAGES = ("api.", "appliance.", "planner.", "pallas_kernels.")


class Verbs(click.Group):
    """The command line as a whole: however it ends, there is an exit code, and one object where ``--json`` is given."""

    def main(self, args: Sequence[str] | None = None, *more: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        """Run a verb; ends the process with its exit code where ``standalone_mode``."""
        if not standalone_mode:
            return super().main(args, *more, standalone_mode=False, **extra)
        given = list(sys.argv[1:] if args is None else args)
        try:
            code = super().main(args, *more, standalone_mode=False, **extra)
        except click.ClickException as error:
            if "--json" in given and not isinstance(error, Failure):
                click.echo(json.dumps({"error": error.format_message()}))
            error.show()
            code = error.exit_code
        except click.Abort:
            click.echo("zccp: stopped before the end; what was finished is kept", err=True)
            code = 1
        except BrokenPipeError:
            os.dup2(
                os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
            )  # so that nothing is flushed to it at the end
            code = 1
        sys.exit(code if isinstance(code, int) else 0)


class Failure(click.ClickException):
    """What failed, exit code 1; with ``--json`` it is also a JSON object on standard output."""

    exit_code = 1

    def __init__(self, message: str, *, as_json: bool) -> None:
        """Keep how to show it beside the message."""
        super().__init__(message)
        self._as_json = as_json

    def show(self, file: Any = None) -> None:
        """Write the message."""
        del file
        if self._as_json:
            click.echo(json.dumps({"error": self.message}))
        click.echo(f"zccp: {self.message}", err=True)


class Misuse(Failure):
    """A wrong use or configuration, exit code 2."""

    exit_code = 2


def verb(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--json`` and turn the project's own errors into one line and an exit code."""

    @click.option("--json", "as_json", is_flag=True, help="Print one JSON object on standard output.")
    @functools.wraps(function)
    def wrapped(*args: Any, as_json: bool, **kwargs: Any) -> Any:
        from appliance.config_rules import ConfigError  # noqa: PLC0415 - verbs only
        from planner.architecture import UnsupportedArchitectureError  # noqa: PLC0415
        from planner.catalogue import UnknownArchitectureError  # noqa: PLC0415
        from planner.plan import PlanError  # noqa: PLC0415
        from planner.target import UnknownTargetError  # noqa: PLC0415

        try:
            return function(*args, as_json=as_json, **kwargs)
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise
        except ConfigError as error:
            raise Misuse("\n      ".join(error.problems), as_json=as_json) from error
        except (PlanError, UnknownArchitectureError, UnknownTargetError, UnsupportedArchitectureError) as error:
            raise Misuse(str(error), as_json=as_json) from error
        except Exception as error:
            if isinstance(error, OSError) or type(error).__module__.startswith(_OWN_PACKAGES):
                raise Failure(str(error) or type(error).__name__, as_json=as_json) from error
            raise

    return wrapped


def configured(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--config``."""
    return click.option(
        "--config", "config_file", type=click.Path(path_type=Path), help="YAML file; default: $ZCCP_CONFIG."
    )(function)


def load_config(config_file: Path | None, **sections: dict[str, Any]) -> "ApplianceConfig":
    """The configuration with the options that were given."""
    from appliance.config import load  # noqa: PLC0415

    overrides = {
        section: {key: value for key, value in values.items() if value is not None}
        for section, values in sections.items()
    }
    return load(config_file, {section: values for section, values in overrides.items() if values})


def show(values: dict[str, Any], as_json: bool) -> None:
    """One result: a line a value, or a JSON object."""
    if as_json:
        click.echo(json.dumps(values))
        return
    width = max(len(name) for name in values)
    for name, value in values.items():
        click.echo(f"{name:<{width}}  {value}")


def table(name: str, rows: Sequence[dict[str, Any]], as_json: bool) -> None:
    """Results of one kind: a table, or a JSON object with them under ``name``."""
    if as_json:
        click.echo(json.dumps({name: rows}))
        return
    if not rows:
        click.echo(f"no {name}", err=True)
        return
    texts = [[str(column) for column in rows[0]], *([_cell(value) for value in row.values()] for row in rows)]
    widths = [max(len(row[place]) for row in texts) for place in range(len(texts[0]))]
    for row in texts:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _cell(value: Any) -> str:
    return {True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool) else str(value)
