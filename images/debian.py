"""Debian trees: made by mmdebstrap from the mirrors that apt of this host uses, and entered to run something in them.

Owns how a tree is made and entered. The mirrors come from apt's own configuration, so that no host is named anywhere.
"""

import os
import shutil
import subprocess
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

LEFT_OUT = ("/usr/share/doc/*", "/usr/share/man/*", "/usr/share/locale/*", "/usr/share/info/*")
KEPT = ("/usr/share/doc/*/copyright",)


class BuildError(RuntimeError):
    """A step of the build failed; the message names it and what to do."""


def mirrors() -> tuple[str, str]:
    """The archive and the security archive that apt is configured with.

    Raises:
        BuildError: apt has no Debian archive.
    """
    said = run(["apt-get", "indextargets", "--format", "$(REPO_URI) $(ORIGIN) $(SUITE)", "Created-By: Packages"])
    found = {tuple(line.split(" ", 2)) for line in said.splitlines() if " Debian " in line}
    archives = sorted({uri.rstrip("/") for uri, _, suite in found if "security" not in suite})
    security = sorted({uri.rstrip("/") for uri, _, suite in found if "security" in suite})
    if not archives or not security:
        raise BuildError("apt knows no Debian archive, or none of security updates; see /etc/apt, run apt-get update")
    return archives[0], security[0]


def sources(release: str, components: Sequence[str]) -> str:
    """The sources of a tree, one a line."""
    archive, security = mirrors()
    parts = " ".join(components)
    return "".join(
        f"deb {uri} {suite} {parts}\n"
        for uri, suite in ((archive, release), (archive, f"{release}-updates"), (security, f"{release}-security"))
    )


def bootstrap(tree: Path, release: str, packages: Sequence[str], components: Sequence[str], epoch: int) -> None:
    """Make a tree with apt and these packages; nothing where a tree of the same packages is there.

    Raises:
        BuildError: mmdebstrap is missing or failed.
    """
    mark = tree.with_name(f"{tree.name}.packages")
    wanted = f"{release} {' '.join(components)}: {' '.join(sorted(packages))}\n"
    if tree.is_dir() and mark.is_file() and mark.read_text() == wanted:
        return
    if shutil.which("mmdebstrap") is None:
        raise BuildError("mmdebstrap is not installed; install it: apt-get install mmdebstrap")
    mark.unlink(missing_ok=True)
    shutil.rmtree(tree, ignore_errors=True)
    listed = tree.with_name(f"{tree.name}.list")
    listed.write_text(sources(release, components))
    options = [f"--dpkgopt=path-exclude={path}" for path in LEFT_OUT]
    options += [f"--dpkgopt=path-include={path}" for path in KEPT]
    command = ["mmdebstrap", "--quiet", "--mode=root", "--variant=apt", f"--include={','.join(packages)}", *options]
    run([*command, release, str(tree), str(listed)], {"SOURCE_DATE_EPOCH": str(epoch)})
    mark.write_text(wanted)


@contextmanager
def entered(tree: Path, binds: Mapping[Path, Path] | None = None) -> Generator[None]:
    """Mount what programs expect, and ``binds`` (inside -> outside), for the block.

    Raises:
        BuildError: a mount failed; it takes root.
    """
    with ExitStack() as stack:
        for name, kind in (("proc", "proc"), ("sys", "sysfs")):
            run(["mount", "-t", kind, kind, str(tree / name)])
            stack.callback(run, ["umount", str(tree / name)])
        for inside, outside in ((Path("/dev"), Path("/dev")), *(binds or {}).items()):
            place = tree / inside.relative_to("/")
            made = not place.exists()
            place.mkdir(parents=True, exist_ok=True)
            run(["mount", "--bind", str(outside), str(place)])
            if made:
                stack.callback(place.rmdir)
            stack.callback(run, ["umount", str(place)])
        yield


def in_tree(tree: Path, command: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """Run a command in a tree that is ``entered``; its standard output.

    Raises:
        BuildError: it failed.
    """
    return run(["chroot", str(tree), *command], environment)


def kernel_of(tree: Path) -> str:
    """The version of the tree's kernel.

    Raises:
        BuildError: there is none, or more than one.
    """
    found = [path.name.removeprefix("vmlinuz-") for path in (tree / "boot").glob("vmlinuz-*")]
    if len(found) != 1:
        raise BuildError(f"{tree}/boot has kernels {found}; exactly one is wanted")
    return found[0]


def run(command: Sequence[str], environment: Mapping[str, str] | None = None, folder: Path | None = None) -> str:
    """Run a command; its standard output.

    Raises:
        BuildError: it failed; the message has the end of what it wrote.
    """
    given = {**os.environ, **(environment or {})}  # noqa: TID251 - of the tools that build
    done = subprocess.run(command, capture_output=True, text=True, env=given, cwd=folder, check=False)
    if done.returncode:
        tail = (done.stderr or done.stdout).strip()[-2000:]
        raise BuildError(f"{' '.join(command)[:200]} failed with exit code {done.returncode}: {tail}")
    return done.stdout
