"""The model: brought onto the host where it is not there yet, before the appliance starts.

Owns where it may come from: archives of ``zccp models export`` on a disk with the label ``zccp-models``, for hosts
without a network, else what the reference names. Everything is done as the appliance's account.
"""

import json
import subprocess
from pathlib import Path

import yaml

from images.host.commands import mounted
from images.host.seed import ACCOUNT, DATA, RUN, SeedError

MEDIUM = Path("/dev/disk/by-label/zccp-models")
CONFIGURATION = DATA / "zccp/config.yaml"
MODELS = Path("/var/lib/zccp/models")


def bring_in(configuration: Path = CONFIGURATION, models: Path = MODELS) -> None:
    """Bring the configured model in and convert it, unless that has been done.

    Raises:
        SeedError: it cannot be had.
        CommandError: the disk with models cannot be read.
    """
    reference = yaml.safe_load(configuration.read_text())["model"]["reference"]
    if MEDIUM.exists() and not is_stored(models, reference):
        with mounted(MEDIUM, RUN / "models", "ro") as folder:
            for archive in sorted(folder.glob("*.tar")):
                print(f"importing {archive.name}", flush=True)
                _zccp("models", "import", str(archive))
    if not is_stored(models, reference):
        print(f"fetching {reference} and converting it", flush=True)
        _zccp("convert")


def is_stored(models: Path, reference: str) -> bool:
    """Whether a model lies in the store with converted weights; by its reference or by its name there."""
    return any(
        reference in (path.parent.name, json.loads(path.read_text())["reference"])
        and any(path.parent.glob("weights-*/checksums.json"))
        for path in models.glob("[!.]*/model.json")
    )


def _zccp(*arguments: str) -> None:
    command = ["runuser", "-u", ACCOUNT, "--", "zccp", *arguments]
    if subprocess.run(command, check=False).returncode:
        raise SeedError(f"zccp {' '.join(arguments)} failed; its reason is in journalctl -u zccp-model")
