"""The root file system of an image: Debian's packages, the application with its packages, and what makes it a host.

Owns what is put into the tree and in which order. Reads the recipe, the lock and the roles' templates of units, which
are the same for images and for hosts that Ansible sets up.
"""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import yaml

from images.debian import bootstrap, entered, in_tree, kernel_of, run
from images.driver import put_module
from images.recipe import Recipe, Variant

REPOSITORY = Path(__file__).parent.parent
HERE = Path(__file__).parent
ROLES = REPOSITORY / "ansible/roles"
OPT = Path("/opt/zccp")
HOST = Path("/usr/lib/zccp-host")
UNITS = (
    "zccp-seed", "zccp-model", "zccp-health", "zccp-console", "zccp", "zccp-shared-memory", "nginx", "redis-server",
    "ssh", "nftables", "systemd-networkd", "systemd-resolved", "systemd-timesyncd",
)  # fmt: skip
PROGRAMS = HOST / "programs"
Progress = Callable[[str], None]


def make_tree(
    tree: Path, work: Path, recipe: Recipe, variant: Variant, version: str, builder: Path | None, progress: Progress
) -> None:
    """Make the tree of a variant.

    Args:
        tree: where; made anew.
        work: keeps wheels, Debian's tree and built programs for the next time.
        recipe: of all variants.
        variant: which.
        version: of the application.
        builder: the tree in which the driver's module was built, if there is one.
        progress: is told each step.

    Raises:
        BuildError: a step failed.
    """
    base = work / "base"
    progress("Debian's packages")
    bootstrap(base, recipe.release, (*recipe.packages, *variant.packages), variant.components, recipe.epoch)
    shutil.rmtree(tree, ignore_errors=True)
    run(["cp", "-a", "--reflink=auto", str(base), str(tree)])
    if builder is not None:
        put_module(builder, tree)
    progress("the application")
    _application(tree, work, variant.lock, version)
    progress("packages of the operator")
    _extra(tree)
    progress("settings of the host")
    _settings(tree, variant)
    _clean(tree)
    progress("boot files")
    with entered(tree):
        in_tree(tree, ["update-initramfs", "-c", "-k", kernel_of(tree)], {"SOURCE_DATE_EPOCH": str(recipe.epoch)})
    for name in (tree / "boot").glob("initrd.img-*.bak"):
        name.unlink()


def _application(tree: Path, work: Path, name: str, version: str) -> None:
    """The packages of the lock of this name, each checked, and this repository's own wheel."""
    wheels, own = work / "wheels", work / "wheel"
    python = tree / "usr/bin/python3.11"
    pip = [sys.executable, "-m", "pip"]
    lock = REPOSITORY / name
    quiet = ["--quiet", "--no-input", "--disable-pip-version-check", "--no-deps"]
    version_of = run([str(python), "-c", "import platform; print(platform.python_version())"]).strip()
    run([sys.executable, str(HERE / "wheels.py"), str(lock), str(wheels), "--python", version_of])
    shutil.rmtree(own, ignore_errors=True)
    run([*pip, "wheel", *quiet, "--wheel-dir", str(own), str(REPOSITORY)])
    folder = OPT / "releases" / version
    with entered(tree, {Path("/run/wheels"): wheels, Path("/run/own"): own, Path("/run/lock"): lock.parent}):
        in_tree(tree, ["python3", "-m", "venv", str(folder)])
        inner = [str(folder / "bin/python"), "-m", "pip", "--isolated", "install", "--no-compile", "--no-index"]
        install = [*inner, *quiet]
        in_tree(tree, [*install, "--find-links", "/run/wheels", "--require-hashes", "--requirement",
                       f"/run/lock/{name}"])  # fmt: skip
        in_tree(tree, [*install, *(f"/run/own/{wheel.name}" for wheel in own.glob("zccp-*.whl"))])
        in_tree(tree, [str(folder / "bin/python"), "-m", "compileall", "-q", "-f", "-j", "2", "--invalidation-mode",
                       "unchecked-hash", str(folder / "lib")])  # fmt: skip
    link = tree / OPT.relative_to("/") / "current"
    link.unlink(missing_ok=True)
    link.symlink_to(f"releases/{version}")
    shell = tree / "usr/local/bin/zccp"
    shell.unlink(missing_ok=True)
    shell.symlink_to(OPT / "current/bin/zccp")


def _extra(tree: Path) -> None:
    """The packages in ``images/extra``; what they depend on has to be in the image or beside them."""
    packages = sorted(path.name for path in (HERE / "extra").glob("*.deb"))
    if packages:
        with entered(tree, {Path("/run/extra"): HERE / "extra"}):
            in_tree(tree, ["dpkg", "--install", *(f"/run/extra/{name}" for name in packages)])


def _settings(tree: Path, variant: Variant) -> None:
    for overlay in ("overlay", f"overlay-{variant.accelerator}"):
        if (HERE / overlay).is_dir():
            run(["cp", "-a", "--no-preserve=ownership", f"{HERE / overlay}/.", f"{tree}/"])
    host = tree / HOST.relative_to("/")
    (host / "images/host").mkdir(parents=True, exist_ok=True)
    for module in (HERE / "host").glob("*.py"):
        shutil.copy(module, host / "images/host" / module.name)
    (host / "defaults.yaml").write_text(yaml.safe_dump(defaults(variant)))
    (host / "preflight.json").write_text(json.dumps(expected(variant)))
    for name, text in units(variant).items():
        (tree / "etc/systemd/system" / name).write_text(text)
    (tree / "etc/sysctl.d/60-zccp.conf").write_text(
        _rendered("host", "sysctl.conf.j2", {"host_sysctl": _role("host")["host_sysctl"]})
    )
    etc = tree / "etc/zccp"
    etc.mkdir(exist_ok=True)
    (etc / "config.yaml").unlink(missing_ok=True)
    (etc / "config.yaml").symlink_to("/data/host/zccp/config.yaml")
    for name in ("data", "efi"):
        (tree / name).mkdir(exist_ok=True)
    with entered(tree):
        in_tree(tree, ["systemd-sysusers"])
        in_tree(tree, ["systemctl", "enable", *UNITS, "run-zccp_bodies.mount"])
        in_tree(tree, ["systemctl", "mask", "apt-daily.timer", "apt-daily-upgrade.timer", "dpkg-db-backup.timer",
                       "e2scrub_all.timer", "fstrim.timer"])  # fmt: skip
    resolver = tree / "etc/resolv.conf"
    resolver.unlink(missing_ok=True)
    resolver.symlink_to("/run/systemd/resolve/stub-resolv.conf")
    (tree / "etc/hostname").write_text("zccp\n")
    (tree / "etc/hosts").write_text("127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n")
    (tree / "etc/initramfs-tools/conf.d/zccp").write_text("MODULES=most\nRESUME=none\n")


def defaults(variant: Variant) -> dict[str, dict[str, object]]:
    """The appliance's configuration before the seed's."""
    own: dict[str, dict[str, object]] = {
        "model": {"reference": variant.model},
        "engine": dict(variant.engine),
        "programs": {"directory": str(PROGRAMS), "public_key": str(PROGRAMS / "public-key.pem")},
    }  # fmt: skip
    for section, values in variant.config.items():
        own[section] = {**own.get(section, {}), **values}
    return own


def expected(variant: Variant) -> dict[str, object] | None:
    """What ``images.host.preflight`` holds the machine against; nothing where the image serves anywhere."""
    if variant.accelerator == "none":
        return None
    known = _role("preflight")
    return {
        "target": variant.engine["target"],
        "kinds": known["preflight_gpu_kinds"],
        "fabric_manager": known["preflight_fabric_manager"],
    }


def units(variant: Variant) -> dict[str, str]:
    """The units that Ansible's roles describe, with the settings of an image."""
    shared = variant.config.get("shared_memory", {})
    settings = {
        "zccp_accelerator": variant.accelerator,
        "application_root": str(OPT),
        "application_bodies": "/run/zccp_bodies",
        "application_home": "/var/lib/zccp",
        "application_user": "zccp",
        "application_configuration": "/etc/zccp",
        "application_drain_s": 30,
        "application_start_timeout_s": 1500,
        "host_user": "zccp",
        "host_bodies": "/run/zccp_bodies",
        "host_bodies_mb": 128,
        "host_segment_count": shared.get("segment_count", 128),
        "host_segment_size_kb": shared.get("segment_size_kb", 1024),
        "host_shared_memory_margin_mb": 128,
    }
    return {
        name: _rendered(role, file, settings)
        for name, role, file in (
            ("zccp.service", "application", "zccp.service.j2"),
            ("zccp-shared-memory.service", "host", "zccp-shared-memory.service.j2"),
            ("run-zccp_bodies.mount", "host", "bodies.mount.j2"),
        )
    }


def _rendered(role: str, template: str, settings: dict[str, Any]) -> str:
    """A role's template with the settings of an image."""
    # settings of systemd are no markup: nothing is escaped
    environment = jinja2.Environment(  # noqa: S701
        undefined=jinja2.StrictUndefined, trim_blocks=True, keep_trailing_newline=True
    )
    text = (ROLES / role / "templates" / template).read_text()
    return environment.from_string(text).render(settings).replace("Managed by Ansible.", "Of the image.")


def _role(name: str) -> dict[str, Any]:
    """The defaults of a role."""
    return yaml.safe_load((ROLES / name / "defaults/main.yml").read_text())


def _clean(tree: Path) -> None:
    """Take away what is of this build only, so that two builds are alike and no two hosts share a secret."""
    for pattern in (
        "etc/ssh/ssh_host_*", "var/log/*.log", "var/log/apt/*", "var/cache/ldconfig/aux-cache",
        "var/lib/dbus/machine-id",
        "var/cache/apt/*.bin", "var/lib/apt/lists/*_*", "etc/machine-id", "boot/initrd.img-*", "etc/.pwd.lock",
        "etc/*-", "var/lib/systemd/random-seed", "var/lib/systemd/catalog/database",
    ):  # fmt: skip
        for path in tree.glob(pattern):
            path.unlink()
    (tree / "etc/machine-id").touch()
