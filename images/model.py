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

ZCCP = (sys.executable, "-m", "appliance.cli")
ISA_LIMIT = {"cpu_x86_64_v3": "--xla_cpu_max_isa=AVX2"}


def build_programs(work: Path, variant: Variant, signing_key: Path) -> Path:
    """A release of programs, signed; those that are current are kept. Its folder.

    Raises:
        BuildError: the build failed.
    """
    out = work / "programs"
    flags = {"XLA_FLAGS": ISA_LIMIT[variant.target]} if variant.target in ISA_LIMIT else {}
    run([*ZCCP, "build", "--architecture", variant.model, "--target", variant.target,
         "--kv-format", variant.kv_format, "--slots", str(variant.slots), "--max-context", str(variant.context),
         "--out", str(out), "--signing-key", str(signing_key), "--json"], flags)  # fmt: skip
    return out


def convert_weights(work: Path, variant: Variant) -> Path | None:
    """The folder of the variant's model in a model store, with the weights that are served and without their source.

    None where the image is to hold no weights.

    Raises:
        BuildError: the model cannot be fetched or converted.
    """
    if not variant.weights:
        return None
    home, file, archive = work / "home", work / "convert.yaml", work / "model.tar"
    paths = {"home": str(home), "run": str(work / "run")}
    file.write_text(yaml.safe_dump({"paths": paths, "engine": {"target": variant.target}}))
    run([*ZCCP, "convert", variant.model, "--config", str(file), "--json"])
    run([*ZCCP, "models", "export", variant.model, str(archive), "--config", str(file), "--json"])
    shutil.rmtree(work / "models", ignore_errors=True)
    return import_model(archive, work / "models")
