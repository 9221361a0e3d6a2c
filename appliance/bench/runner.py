"""Runner: finds a bench by name, gives it its options, and prints what it found.

Owns the list of benches, their common options and the exit codes: 0 measured (met or not), 1 the bench failed, 2 wrong
use or a bench that cannot run here. Benches that travel with the package are modules of ``appliance.bench``; those that
need a checkout are modules of ``tests/bench``. A bench module holds ``OPTIONS``, its click parameters, and ``run``.
"""

import contextlib
import importlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, Self, TextIO, cast

import click

from appliance.bench.report import Findings, PlotError, make_report, plot, write_table
from appliance.config import ApplianceConfig, load
from appliance.config_rules import ConfigError

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

TRAVELLING = ("build", "ingest", "kernels", "kv-quality", "start", "step")
"""Benches that are part of the package."""
CHECKOUT = ("chaos", "connections", "old-stack", "parity", "peers", "reuse", "soak")
"""Benches that need a checkout of the project."""

ROOT = Path(__file__).resolve().parents[2]
"""Where a checkout would be."""


class BenchError(RuntimeError):
    """A bench could not finish; the message gives the cause and what to do."""


class BenchUseError(BenchError):
    """A bench cannot run here or was asked for wrongly; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class BenchContext:
    """What every bench gets: the configuration, and ``progress(what, done, total)`` to say how far it is."""

    config: ApplianceConfig
    progress: Callable[[str, int, int], None]


class Bench(Protocol):
    """What a bench module holds."""

    OPTIONS: Sequence[click.Parameter]
    """Its own options; each is an argument of ``run``."""

    def run(self, context: BenchContext, **options: Any) -> Findings:
        """Measure.

        Raises:
            BenchError: something that it needs failed.
        """
        ...


def main(name: str, options: Sequence[str], root: Path = ROOT, out: TextIO | None = None) -> int:
    """Run the bench ``name`` with its command-line ``options``.

    Args:
        name: one of ``TRAVELLING`` or ``CHECKOUT``.
        options: ``--json``, ``--plot FILE``, ``--config FILE`` and the bench's own.
        root: the checkout.
        out: where the report goes; standard output by default.

    Returns:
        The exit code.
    """
    report_to = sys.stdout if out is None else out
    return _guarded(name, options, root, report_to)


def _guarded(name: str, options: Sequence[str], root: Path, out: TextIO) -> int:
    try:
        _command(name, find(name, root), out)(args=list(options), prog_name=f"zccp bench {name}", standalone_mode=False)
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.ClickException as error:
        return _fail(error.format_message(), 2, options, out)
    except ConfigError as error:
        return _fail("\n      ".join(error.problems), 2, options, out)
    except BenchUseError as error:
        return _fail(str(error), 2, options, out)
    except (BenchError, PlotError, OSError) as error:
        return _fail(str(error), 1, options, out)
    return 0


def find(name: str, root: Path = ROOT) -> Bench:
    """The module of a bench.

    Raises:
        BenchUseError: there is no such bench, or it needs a checkout and this is none.
    """
    if name in TRAVELLING:
        return cast("Bench", importlib.import_module(f"appliance.bench.{name.replace('-', '_')}"))
    if name not in CHECKOUT:
        known = ", ".join((*TRAVELLING, *CHECKOUT))
        raise BenchUseError(f"there is no bench {name!r}; the benches are {known}")
    module = name.replace("-", "_")
    file = root / "tests" / "bench" / f"{module}.py"
    if not file.is_file():
        raise BenchUseError(f"the bench {name} needs a checkout of the project: {file} does not exist; run it from one")
    return cast("Bench", _module(file, f"tests.bench.{module}", root))


def _module(file: Path, dotted: str, root: Path) -> ModuleType:
    """A module of the checkout, with the checkout on the path so that it finds its neighbours."""
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    try:
        module = importlib.import_module(dotted)
    except ImportError as error:
        raise BenchUseError(
            f"{file} needs {error.name or error}, which is not installed; run make setup for the development packages"
        ) from error
    if Path(module.__file__ or "").resolve() != file.resolve():
        raise BenchUseError(f"{dotted} was found at {module.__file__}, not at {file}; a package named tests hides it")
    return module


def _command(name: str, bench: Bench, out: TextIO) -> click.Command:
    common: list[click.Parameter] = [
        click.Option(["--json", "as_json"], is_flag=True, help="End standard output with one JSON object on one line."),
        click.Option(["--plot", "picture"], type=click.Path(path_type=Path), help="Draw the results into a file."),
        click.Option(["--config", "config_file"], type=click.Path(path_type=Path), help="YAML file of the appliance."),
    ]

    def callback(*, as_json: bool, picture: Path | None, config_file: Path | None, **own: Any) -> None:
        # the report alone goes to standard output, whatever a bench or a library prints
        with contextlib.redirect_stdout(sys.stderr), _ShownProgress() as progress:
            findings = bench.run(BenchContext(load(config_file), progress.update), **own)
        report = make_report(name, findings)
        if picture is not None:
            plot(report, picture)
        if as_json:
            out.write(report.to_json() + "\n")
            out.flush()
        else:
            write_table(report, out)

    text = bench.__doc__ or ""
    settings = {"help_option_names": ["-h", "--help"], "max_content_width": 110}
    return click.Command(
        name, params=[*bench.OPTIONS, *common], callback=callback, help=text.split("\n\n")[0], context_settings=settings
    )


def _fail(message: str, code: int, options: Sequence[str], out: TextIO) -> int:
    if "--json" in options:
        out.write(json.dumps({"error": message}) + "\n")
    click.echo(f"zccp: {message}", err=True)
    return code


class _ShownProgress:
    """A bar on a terminal, one line a stage elsewhere; always on standard error."""

    def __init__(self) -> None:
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._stage = ""

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            from rich.console import Console  # noqa: PLC0415 - only on a terminal
            from rich.progress import Progress  # noqa: PLC0415

            self._bar = Progress(console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task("starting", total=None)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, what: str, done: int, total: int) -> None:
        """``done`` of ``total`` units of ``what``."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=what, completed=done, total=total or None)
        elif what != self._stage:
            click.echo(what, err=True)
        self._stage = what
