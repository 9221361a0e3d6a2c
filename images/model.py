"""What an image serves from its first boot: the programs of its target and the weights of its model.

Owns where both are kept between builds. Runs the product's own commands, so that an image holds what any build host
would make.
"""

import json
import shutil
import sys
from pathlib import Path

import yaml

from images.debian import run
from images.recipe import Variant

ISA_LIMIT = {"cpu_x86_64_v3": "--xla_cpu_max_isa=AVX2"}


def build_programs(work: Path, variant: Variant, signing_key: Path) -> Path:
    """A release of programs, signed; those that are current are kept. Its folder.

    Raises:
        BuildError: the build failed.
    """
    out = work / "programs"
    flags = {"XLA_FLAGS": ISA_LIMIT[variant.target]} if variant.target in ISA_LIMIT else {}
    run([sys.executable, "-m", "appliance.cli", "build", "--architecture", variant.model, "--target", variant.target,
         "--kv-format", variant.kv_format, "--slots", str(variant.slots), "--max-context", str(variant.context),
         "--out", str(out), "--signing-key", str(signing_key), "--json"], flags)  # fmt: skip
    return out


def convert_weights(work: Path, variant: Variant) -> Path:
    """The folder of the variant's model in a model store, with the weights that are served and without their source.

    Raises:
        BuildError: the model cannot be fetched or converted.
    """
    home, file = work / "home", work / "convert.yaml"
    file.write_text(yaml.safe_dump({"paths": {"home": str(home), "run": str(work / "run")}}))
    form = "int8" if variant.accelerator == "none" else "bf16"
    command = [sys.executable, "-m", "appliance.cli", "convert", variant.model, "--form", form]
    run([*command, "--config", str(file), "--json"])
    (name,) = [path.name for path in (home / "models").iterdir() if _record(path).get("reference") == variant.model]
    kept = work / "models" / name
    shutil.rmtree(kept.parent, ignore_errors=True)
    shutil.copytree(home / "models" / name, kept, ignore=shutil.ignore_patterns("source"))
    return kept


def _record(folder: Path) -> dict[str, str]:
    file = folder / "model.json"
    return json.loads(file.read_text()) if file.is_file() else {}
