"""What an image serves from its first boot: the programs of its target and the weights of its model.

Owns where both are kept between builds. Runs the product's own commands, so that an image holds what any build host
would make.
"""

import shutil
import sys
from pathlib import Path

import yaml

from appliance.model.archive import import_model
from images.debian import run
from images.recipe import Variant
from planner.target import find_target

ZCCP = (sys.executable, "-m", "appliance.cli")


def build_programs(work: Path, variant: Variant, signing_key: Path) -> Path:
    """A release of programs, signed; those that are current are kept. Its folder.

    Raises:
        BuildError: the build failed.
    """
    out, target = work / "programs", str(variant.engine["target"])
    flags = {"XLA_FLAGS": f"--xla_cpu_max_isa={isa}"} if (isa := find_target(target).max_isa) else {}
    given = ["--architecture", variant.model, "--out", str(out), "--signing-key", str(signing_key)]
    run([*ZCCP, "build", *given, "--config", str(_configuration(work, variant)), "--json"], flags)
    return out


def convert_weights(work: Path, variant: Variant) -> Path | None:
    """The folder of the variant's model in a model store, with the weights that are served and without their source.

    None where the image is to hold no weights.

    Raises:
        BuildError: the model cannot be fetched or converted.
    """
    if not variant.weights:
        return None
    archive, configuration = work / "model.tar", str(_configuration(work, variant))
    run([*ZCCP, "convert", variant.model, "--config", configuration, "--json"])
    run([*ZCCP, "models", "export", variant.model, str(archive), "--config", configuration, "--json"])
    shutil.rmtree(work / "models", ignore_errors=True)
    return import_model(archive, work / "models")


def _configuration(work: Path, variant: Variant) -> Path:
    """What the product's commands are told, in a file."""
    file = work / "build.yaml"
    paths = {"home": str(work / "home"), "run": str(work / "run")}
    file.write_text(yaml.safe_dump({"paths": paths, "engine": variant.engine}))
    return file
