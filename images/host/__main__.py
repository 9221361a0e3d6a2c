"""``zccp-host``: what an appliance does about the machine that it runs on."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import click

from images.host import console, health, update
from images.host.commands import CommandError
from images.host.model import bring_in
from images.host.seed import REFUSED, SeedError, apply_seed
from images.host.slots import SlotError, booted, entries

VARIANT = Path("/usr/lib/zccp-host/variant")
_Value = TypeVar("_Value")
_KNOWN = (CommandError, SlotError, update.UpdateError)


@click.group()
def main() -> None:
    """The host's side of the appliance."""


@main.command()
def seed() -> None:
    """Make this host what its seed says; at every boot."""
    REFUSED.unlink(missing_ok=True)
    _refused_or(apply_seed)


@main.command()
def model() -> None:
    """Bring the model in where it is not there yet."""
    _refused_or(bring_in)


@main.command(name="health")
def ask_health() -> None:
    """Wait until the appliance answers; leave a version on trial that does not."""
    sys.exit(health.decide(health.check()))


@main.command(name="console")
def show_console() -> None:
    """Keep the text on the console true."""
    console.show()


@main.command(name="update")
@click.argument("release", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--reboot", is_flag=True, help="Restart into it at once.")
def install(release: Path, *, reboot: bool) -> None:
    """Write the signed RELEASE (a folder) into the other slot; it boots from there at the next restart, on trial."""
    version = _told(lambda: update.install(release, VARIANT.read_text().strip(), update.bar))
    click.echo(f"{version} is in the other slot and boots at the next restart", err=True)
    if reboot:
        subprocess.run(["systemctl", "reboot"], check=False)


@main.command()
def rollback() -> None:
    """Boot the version before at the next restart."""
    click.echo(f"{_told(update.roll_back)} boots at the next restart", err=True)


@main.command()
def status() -> None:
    """Show the slots."""
    running = _told(booted)
    for entry in entries():
        state = "proven" if entry.tries_left is None else f"on trial, {entry.tries_left} tries left"
        click.echo(f"{entry.label}  {entry.version}  {state}{'  (running)' if entry.label == running else ''}")


def _refused_or(work: Callable[[], None]) -> None:
    """Do work; what stands against it also goes to the console."""
    try:
        work()
    except (CommandError, SeedError) as error:
        REFUSED.write_text(str(error))
        raise SystemExit(f"zccp-host: {error}") from None


def _told(work: Callable[[], _Value]) -> _Value:
    """What work gives; what it knows to be wrong ends the program with the message alone."""
    try:
        return work()
    except _KNOWN as error:
        print(f"zccp-host: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
