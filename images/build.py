"""Build an image: ``python -m images.build --variant cpu``; what it is made of stands in ``images/recipe.yaml``."""

import shutil
import sys
import time
import tomllib
from pathlib import Path

import click

from images.debian import BuildError, bootstrap
from images.disk import Contents, make_disk, make_release, put_seed
from images.driver import PUBLIC_KEY, build_module
from images.model import build_programs, convert_weights
from images.recipe import Recipe, RecipeError, read_recipe
from images.sbom import write_sbom
from images.tree import HOST, REPOSITORY, Progress, make_tree
from planner.signing import SigningKeyError, local_key, public_pem


@click.command()
@click.option("--variant", default="cpu", show_default=True, help="Kind of host.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("build/image"), show_default=True)
@click.option("--version", "given", help="Version of the release; default: the application's.")
@click.option("--signing-key", type=click.Path(path_type=Path), help="PEM file; default: key.pem in --out, made once.")
@click.option("--seed", type=click.Path(exists=True, path_type=Path), help="Seed to put onto the disk.")
def main(variant: str, out: Path, given: str | None, signing_key: Path | None, seed: Path | None) -> None:
    """Write disk.raw, and the signed folder release/ for hosts that are updated, into a folder for each variant."""
    began = time.monotonic()

    def progress(step: str) -> None:
        click.echo(f"{time.monotonic() - began:6.1f} s  {step}", err=True)

    try:
        recipe = read_recipe()
        recipe.variant(variant)
        key = signing_key or out / "key.pem"
        version = given or tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
        disk, release = _build((out / variant).absolute(), out, recipe, variant, version, key, progress)
        if seed is not None:
            put_seed(disk, out.absolute() / "tools", seed)
        progress("done")
        click.echo(f"{disk}\n{release}")
    except (BuildError, RecipeError, SigningKeyError, OSError) as error:
        print(f"images.build: {error}", file=sys.stderr)
        sys.exit(1)


def _build(
    work: Path, out: Path, recipe: Recipe, variant: str, version: str, key: Path, progress: Progress
) -> tuple[Path, Path]:
    """Everything in its order; the disk and the folder of the release."""
    kind = recipe.variant(variant)
    work.mkdir(parents=True, exist_ok=True)
    public = public_pem(local_key(key))
    progress("tools")
    tools = out.absolute() / "tools"
    bootstrap(tools, recipe.tools_release, recipe.tools, ("main",), recipe.epoch)
    progress("programs")
    programs = build_programs(work, kind, key)
    progress("weights")
    model = convert_weights(work, kind)
    progress("the driver's module")
    builder = build_module(work, recipe, kind)
    tree = work / "tree"
    make_tree(tree, work, recipe, kind, version, builder, progress)
    host = tree / HOST.relative_to("/")
    (host / "release-key.pem").write_bytes(public)
    (host / "variant").write_text(f"{variant}\n")
    progress("the bill of materials")
    sbom = work / "sbom.cdx.json"
    write_sbom(sbom, tree, recipe, variant, version)
    shutil.copy(sbom, host)
    contents = Contents(tree, tools, programs, model, sbom, builder and builder / PUBLIC_KEY)
    progress("the disk")
    disk = make_disk(work, contents, recipe, kind, version)
    progress("the release")
    release = make_release(work, disk, contents, variant, version, key)
    return disk, release


if __name__ == "__main__":
    main()
