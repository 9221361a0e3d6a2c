"""What a fleet needs before it begins: a root file system, wheels, releases, a model, certificates, keys, an inventory.

Owns ``build/rollout``, where all that takes long is kept from run to run under a name made of what it was made from.
"""

import datetime
import hashlib
import ipaddress
import json
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tests.rollout.fleet import Host, address_of, run
from tests.support.real_model import HOME, smollm2
from tests.support.running_appliance import write_config, zccp

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "build" / "rollout"
SUITE = "bookworm"
PACKAGES = (
    "systemd", "systemd-sysv", "dbus", "libpam-systemd", "openssh-server", "python3", "python3-venv", "python3-apt",
    "sudo", "openssl", "nginx-light", "redis-server", "iproute2", "procps", "ca-certificates", "curl",
    "prometheus-node-exporter",
)  # fmt: skip
"""What the hosts have from the start: they have no way to a mirror, so that the roles find their packages installed."""
ENGINE = {"slots": 4, "context": 1024, "kv_format": "int8", "kv_memory_mb": 64}
PACKAGED = ("api", "appliance", "planner", "pallas_kernels", "pyproject.toml", "README.md", "LICENSE")
NODE_NAME = "zccp.internal"
REDIS = {"redis_password": "fleetfleetfleetfleetfleet", "redis_maxmemory_mb": 64}


def sources() -> str:
    """Where apt of this machine has Debian's packages from, in the form of sources.list, for ``SUITE`` alone."""
    wanted = ("--format", "deb $(REPO_URI) $(RELEASE) $(COMPONENT)", "Created-By: Packages", "Origin: Debian")
    lines = sorted(set(run("apt-get", "indextargets", *wanted).splitlines()))
    return "".join(f"{line}\n" for line in lines if line.split()[2].startswith(SUITE))


def base() -> Path:
    """The root file system that hosts start from."""
    listed = sources()
    assert listed, f"apt of this machine has no {SUITE}"
    folder = KEPT / f"base-{_short(listed + ' '.join(PACKAGES))}"
    if not (folder / "usr").exists():
        run("apt-get", "update", "-qq")
        part = folder.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        file = KEPT / "sources.list"
        KEPT.mkdir(parents=True, exist_ok=True)
        file.write_text(listed)
        without = [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("doc", "man", "locale")]
        included = f"--include={','.join(PACKAGES)}"
        command = ("mmdebstrap", "--quiet", "--variant=apt", "--mode=root", included, *without, SUITE)
        run("nice", "-n", "10", *command, str(part), str(file), timeout_s=1800)
        part.rename(folder)
    return folder


def wheels() -> Path:
    """Every wheel of the lock that the hosts' Python needs, which is older than this one's."""
    lock = ROOT / "requirements.lock"
    folder = KEPT / f"wheels-{_short(lock.read_text())}"
    if not folder.exists():
        part = folder.with_suffix(".part")
        run(sys.executable, str(ROOT / "images" / "wheels.py"), str(lock), str(part), timeout_s=1800)
        part.rename(folder)
    return folder


def wheel(version: str, folder: Path, change: Mapping[str, tuple[str, str]] | None = None) -> Path:
    """This checkout as a wheel of some version, with texts of files replaced: path -> (old, new)."""
    tree = folder / f"tree-{version}"
    tree.mkdir(parents=True)
    for name in PACKAGED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tree / name)
    project = tree / "pyproject.toml"
    lines = project.read_text().splitlines()
    project.write_text("\n".join(f'version = "{version}"' if line.startswith("version = ") else line for line in lines))
    for path, (old, new) in (change or {}).items():
        text = (tree / path).read_text()
        assert old in text, f"{path} has no {old!r}"
        (tree / path).write_text(text.replace(old, new, 1))
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(folder))
    run(sys.executable, "-m", "pip", "wheel", *options, str(tree))
    shutil.rmtree(tree)
    return folder / f"zccp-{version}-py3-none-any.whl"


@dataclass(frozen=True)
class Archive:
    """A checked archive for the role model_store."""

    file: Path
    place: str
    name: str

    def item(self, seen_in: str) -> dict[str, str]:
        """Its entry in ``model_store_archives`` of hosts that see its folder at ``seen_in``."""
        with self.file.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return {"path": f"{seen_in}/{self.file.name}", "sha256": digest, "place": self.place, "name": self.name}


def archives() -> list[Archive]:
    """The small model and its programs, built for this machine's CPU and signed with a key made for it."""
    parts = [path for name in ("planner", "pallas_kernels") for path in sorted((ROOT / name).rglob("*"))]
    sources_text = "".join(path.read_text() for path in parts if path.is_file() and path.suffix != ".pyc")
    folder = KEPT / f"archives-{_short(sources_text + str(ENGINE) + (ROOT / 'requirements.lock').read_text())}"
    made = [
        Archive(folder / "model.tar", "models", "smollm2-135m"),
        Archive(folder / "programs.tar", "releases", "programs"),
    ]
    if not folder.exists():
        part = folder.with_suffix(".part")
        part.mkdir(parents=True, exist_ok=True)
        for archive, source in zip(made, _model_and_programs(part), strict=True):
            with tarfile.open(part / archive.file.name, "w") as tar:
                tar.add(source, archive.name, filter=_wanted)
        part.rename(folder)
    return made


def _model_and_programs(folder: Path) -> tuple[Path, Path]:
    config = write_config(folder, HOME, {"engine": ENGINE})
    model, release = smollm2(), folder / "programs"
    converted = zccp("convert", "--form", "int8", "--json", "--config", str(config), timeout_s=1800)
    assert converted.returncode == 0, converted.stderr
    key = ("--signing-key", str(folder / "operator.pem"))
    options = ("--config", str(config), "--kv-format", str(ENGINE["kv_format"]), "--out", str(release), *key)
    built = zccp("build", "--json", *options, timeout_s=1800)
    assert built.returncode == 0, built.stderr
    return model, release


def _wanted(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if "/weights-float32" in info.name else info


def certificates(folder: Path, addresses: Sequence[str]) -> None:
    """An authority (ca.pem) and one certificate of it for all hosts (fleet.pem, fleet-key.pem)."""
    now = datetime.datetime.now(datetime.UTC)

    def name(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])

    def begun(subject: str, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(name(subject))
            .issuer_name(name("fleet authority"))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=2))
        )

    own, host = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    names = [x509.DNSName(NODE_NAME), *(x509.IPAddress(ipaddress.ip_address(address)) for address in addresses)]
    authority = begun("fleet authority", own).add_extension(
        x509.BasicConstraints(ca=True, path_length=0), critical=True
    )
    signed = begun("fleet", host).add_extension(x509.SubjectAlternativeName(names), critical=False)
    pem = serialization.Encoding.PEM
    (folder / "ca.pem").write_bytes(authority.sign(own, hashes.SHA256()).public_bytes(pem))
    (folder / "fleet.pem").write_bytes(signed.sign(own, hashes.SHA256()).public_bytes(pem))
    plain = serialization.NoEncryption()
    private = host.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain)
    (folder / "fleet-key.pem").write_bytes(private)


def api_key(folder: Path) -> str:
    """A key of a tenant; its hash stands in keys.json of the folder."""
    config = write_config(folder, folder)
    made = zccp("keys", "add", "fleet", "--admin", "--json", "--config", str(config))
    assert made.returncode == 0, made.stderr
    return str(json.loads(made.stdout)["key"])


def inventory(folder: Path, groups: Mapping[str, Mapping[str, Host]], values: Mapping[str, object]) -> Path:
    """An inventory of hosts by group and name; values are of the appliances."""
    hosts = {group: {name: {"ansible_host": host.address} for name, host in of.items()} for group, of in groups.items()}
    secured = {"certificate": str(folder / "fleet.pem"), "certificate_key": str(folder / "fleet-key.pem")}
    front = {"node_ca": str(folder / "ca.pem"), "node_name": NODE_NAME, "config": {"server": {"max_connections": 2048}}}
    children: dict[str, dict[str, object]] = {
        "appliances": {"vars": dict(values)},
        "index": {"vars": {f"redis_{name}": value for name, value in secured.items()}
                  | {"redis_authority": str(folder / "ca.pem")}},
        "balancers": {"vars": {f"balancer_{name}": value for name, value in (secured | front).items()}},
        "monitoring": {},
    }  # fmt: skip
    document = {
        "all": {
            "vars": {"ansible_user": "root", "ansible_become_method": "sudo", **REDIS},
            "children": {group: {"hosts": hosts.get(group, {}), **more} for group, more in children.items()},
        }
    }
    path = folder / f"hosts-{_short(str(hosts))}.yml"
    path.write_text(yaml.safe_dump(document))
    return path


def index_url(numbers: Sequence[int]) -> str:
    """The URL of a cluster on hosts of these numbers."""
    hosts = ",".join(address_of(number) for number in numbers)
    return f"rediss://:{REDIS['redis_password']}@{hosts}?ssl_ca_certs=/etc/zccp/index-ca.pem"


def playbook_environment(fleet_key: Path) -> dict[str, str]:
    """The environment of ``ansible-playbook`` for hosts of this run."""
    trust = "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
    return {
        "PATH": f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": str(fleet_key.parent),
        "LC_ALL": "C.UTF-8",
        "ANSIBLE_CONFIG": str(ROOT / "ansible" / "ansible.cfg"),
        "ANSIBLE_PRIVATE_KEY_FILE": str(fleet_key),
        "ANSIBLE_SSH_ARGS": f"-o ControlMaster=auto -o ControlPersist=120s {trust}",
        "ANSIBLE_NOCOLOR": "1",
    }


def keep(source: Path, folder: Path) -> None:
    """Move what a host has made into a folder that is kept."""
    part = folder.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    subprocess.run(["cp", "--archive", source, part], check=True)
    part.replace(folder)


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
