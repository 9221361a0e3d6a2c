"""The kernel module of an accelerator's driver, built for the image's kernel on a host that has neither.

Owns the tree in which it is built, with compiler and headers, which stays outside the image. DKMS signs the modules
with a key of that tree; the public half goes onto the boot partition, for hosts with secure boot.
"""

import shutil
from pathlib import Path

from images.debian import BuildError, bootstrap, entered, in_tree, kernel_of, run
from images.recipe import Recipe, Variant

FOLDER = Path("updates/dkms")
PUBLIC_KEY = Path("var/lib/dkms/mok.pub")
LIBRARY = "libcuda1"


def build_module(work: Path, recipe: Recipe, variant: Variant) -> Path | None:
    """The tree with the built module; None where the variant has none. What was built before is kept.

    Raises:
        BuildError: Debian's packages cannot be installed, or the module does not build for their kernel.
    """
    if variant.module is None:
        return None
    builder = work / "builder"
    kernels = [package for package in variant.packages if package.startswith("linux-image")]
    tools = (*kernels, variant.module.headers, "dkms", "kmod", "openssl")
    bootstrap(builder, recipe.release, tools, variant.components, recipe.epoch)
    kernel = kernel_of(builder)
    if not _modules(builder, kernel):
        with entered(builder):
            install = ["apt-get", "install", "--yes", "--no-install-recommends", variant.module.package]
            in_tree(builder, ["apt-get", "update", "--quiet"])
            in_tree(builder, install, {"DEBIAN_FRONTEND": "noninteractive"})
            in_tree(builder, ["dkms", "autoinstall", "-k", kernel])
    if not _modules(builder, kernel):
        raise BuildError(f"{variant.module.package} built no module for {kernel}; see {builder}/var/lib/dkms/*/*/build")
    return builder


def put_module(builder: Path, tree: Path) -> list[Path]:
    """Put the built modules where the tree's kernel finds them; what was put there.

    Raises:
        BuildError: the trees have different kernels, or the tree's libraries are of another version than the modules.
    """
    kernel = kernel_of(tree)
    if kernel != kernel_of(builder):
        raise BuildError(f"the module is for {kernel_of(builder)}, the image has {kernel}; remove {builder} and build")
    library = run(["dpkg-query", f"--admindir={tree}/var/lib/dpkg", "-W", "-f=${Version}", LIBRARY])
    for module in _modules(builder, kernel):
        inside = f"/{module.relative_to(builder)}"
        said = run(["chroot", str(builder), "modinfo", "-F", "version", inside]).strip()
        if said and library.partition("-")[0] != said:  # the driver refuses libraries of any other version
            raise BuildError(f"{module.name} is of driver {said}, {LIBRARY} of {library}; name packages of one version")
    place = tree / "lib/modules" / kernel / FOLDER
    place.mkdir(parents=True, exist_ok=True)
    put = [Path(shutil.copy(module, place)) for module in _modules(builder, kernel)]
    run(["chroot", str(tree), "depmod", kernel])
    return put


def _modules(tree: Path, kernel: str) -> list[Path]:
    return sorted((tree / "lib/modules" / kernel / FOLDER).glob("*.ko*"))
