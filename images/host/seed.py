"""The seed: the one file that makes an image a host, and what follows from it at every boot.

Owns the seed's form and every file that is made from it. The operator puts ``zccp/seed.yaml`` on the boot partition,
which every operating system can write. It is checked as a whole before anything is changed, then kept on the data
partition; a private key in it is taken off the boot partition. What is made goes to ``/data/host``, which stays, and to
``/run/zccp-host``, which is made again at every boot.
"""

import json
import os
import re
import secrets
import shutil
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import yaml
from msgspec import Struct

from images.host.commands import CommandError, run
from images.host.preflight import read_expected, reasons
from images.host.slots import write_durably

DATA = Path("/data/host")
RUN = Path("/run/zccp-host")
ON_ESP = Path("/efi/zccp/seed.yaml")
DEFAULTS = Path("/usr/lib/zccp-host/defaults.yaml")
REFUSED = RUN / "refused"
"""Why the host was not made what its seed says; the console shows it."""
PROBE = DATA / "probe-key"
ACCOUNT = "zccp"
REDIS_MB = 64
_HOST_NAME = re.compile(r"(?=.{1,63}$)[a-z0-9]([a-z0-9-]*[a-z0-9])?")
_PUBLIC_KEY = re.compile(r"(ssh-ed25519|ecdsa-sha2-nistp\d+|sk-\S+|ssh-rsa) [A-Za-z0-9+/=]+( .*)?")


class SeedError(RuntimeError):
    """The seed is missing or wrong; the message says what to change in it."""


class Tls(Struct, frozen=True, forbid_unknown_fields=True):
    """A certificate chain and its private key, PEM."""

    certificate: str
    key: str


class Seed(Struct, frozen=True, forbid_unknown_fields=True):
    """What a host is.

    ``authorized_keys`` are SSH keys of administrators; none = nobody logs in. ``keys`` is the document that
    ``zccp keys add`` writes: hashed keys of clients. Without ``tls`` a certificate that signs itself is made.
    ``config`` are sections of the appliance's configuration, over the image's own.
    """

    hostname: str
    keys: dict[str, Any]
    authorized_keys: tuple[str, ...] = ()
    tls: Tls | None = None
    model: str = ""
    config: dict[str, dict[str, Any]] = {}


def read_seed(text: str) -> Seed:
    """A seed, checked.

    Raises:
        SeedError: a key is unknown, missing or has a value that it cannot have.
    """
    try:
        seed = msgspec.convert(yaml.safe_load(text), Seed)
    except (yaml.YAMLError, msgspec.ValidationError) as error:
        raise SeedError(f"seed.yaml: {error}") from None
    if not _HOST_NAME.fullmatch(seed.hostname):
        raise SeedError(f"seed.yaml: hostname {seed.hostname!r} must be 1 to 63 of a-z, 0-9 and -, not at its ends")
    wrong = [number for number, key in enumerate(seed.authorized_keys) if not _PUBLIC_KEY.fullmatch(key.strip())]
    if wrong:
        raise SeedError(f"seed.yaml: authorized_keys[{wrong[0]}] is no public SSH key")
    if not seed.keys:
        raise SeedError("seed.yaml: keys is empty, so nobody could call; put the file of zccp keys add there")
    return seed


def apply_seed() -> None:
    """Make everything that the seed says.

    Raises:
        SeedError: the image is not for this machine, there is no seed, or it is wrong; nothing has been changed then.
        CommandError: a tool of the host failed.
    """
    against = reasons(read_expected())
    if against:
        raise SeedError("this machine cannot serve: " + "; ".join(against))
    given = ON_ESP.read_text(encoding="utf-8") if ON_ESP.is_file() else None
    kept = DATA / "seed.yaml"
    if given is None and not kept.is_file():
        place = ON_ESP.relative_to("/efi")
        raise SeedError(f"there is no {place} on the boot partition; put one there and start again")
    text = given if given is not None else kept.read_text(encoding="utf-8")
    seed = read_seed(text)
    for folder, mode in ((DATA, 0o755), (DATA / "zccp", 0o750), (DATA / "tls", 0o700)):
        folder.mkdir(mode=mode, parents=True, exist_ok=True)
        folder.chmod(mode)
    shutil.chown(DATA / "zccp", "root", ACCOUNT)
    if given is not None:
        write_durably(kept, text.encode())
        _take_off(seed)
    socket.sethostname(seed.hostname)
    _identity(seed)
    _certificate(seed)
    _appliance(seed)


def _take_off(seed: Seed) -> None:
    """Leave on the boot partition that the seed was taken, and nothing secret."""
    told = {"hostname": seed.hostname, "model": seed.model, "taken": True}
    ON_ESP.with_name("seed.taken.yaml").write_text(yaml.safe_dump(told))
    size = ON_ESP.stat().st_size
    with ON_ESP.open("r+b") as file:
        file.write(bytes(size))
        file.flush()
        os.fsync(file.fileno())
    ON_ESP.unlink()


def _identity(seed: Seed) -> None:
    """The host's own keys and id, which outlive a change of slot."""
    host_key = DATA / "ssh_host_ed25519_key"
    if not host_key.exists():
        run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(host_key)])
    authorized = DATA / "authorized_keys"
    if seed.authorized_keys:
        write_durably(authorized, "".join(f"{key.strip()}\n" for key in seed.authorized_keys).encode())
    else:
        authorized.unlink(missing_ok=True)
    kept, there = DATA / "machine-id", Path("/etc/machine-id")
    if not kept.exists():  # the id that the manager made for this boot stays, since the journal is under it
        write_durably(kept, there.read_bytes(), 0o644)
    wanted = kept.read_text()
    run(["mount", "-o", "remount,rw", "/"])
    try:
        with suppress(CommandError):  # of the id that was made for this boot
            run(["umount", "/etc/machine-id"])
        if there.read_text() != wanted:
            there.write_text(wanted)
    finally:
        with suppress(CommandError):
            run(["mount", "-o", "remount,ro", "/"])


def _certificate(seed: Seed) -> None:
    chain, key = DATA / "tls/fullchain.pem", DATA / "tls/key.pem"
    if seed.tls is not None:
        write_durably(key, seed.tls.key.encode())
        write_durably(chain, seed.tls.certificate.encode(), 0o644)
    elif not chain.exists():
        run([
            "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days",
            "825", "-subj", f"/CN={seed.hostname}", "-addext", f"subjectAltName=DNS:{seed.hostname},IP:127.0.0.1",
            "-keyout", str(key), "-out", str(chain),
        ])  # fmt: skip


def _appliance(seed: Seed) -> None:
    """Configuration, keys, nginx and Redis."""
    folder = DATA / "zccp"
    keys = folder / "keys.json"
    _for_account(keys, json.dumps(seed.keys).encode())
    password = DATA / "redis-password"
    if not password.exists():
        write_durably(password, secrets.token_hex(24).encode())
    document = configuration(yaml.safe_load(DEFAULTS.read_text()), seed, password.read_text())
    _for_account(folder / "config.yaml", yaml.safe_dump(document, sort_keys=True).encode())
    home = Path("/var/lib/zccp")
    home.mkdir(mode=0o750, exist_ok=True)
    run(["chown", "-R", f"{ACCOUNT}:{ACCOUNT}", str(home)])
    try:
        printed = run(["runuser", "-u", ACCOUNT, "--", "zccp", "config", "--nginx"])
    except CommandError:
        told = "seed.yaml: the configuration that follows from it is refused; zccp config says why"
        raise SeedError(told) from None
    _probe_key()
    (RUN / "nginx.conf").write_text(printed)
    redis = RUN / "redis.conf"
    redis.write_text(f"requirepass {password.read_text()}\nmaxmemory {REDIS_MB}mb\n")
    redis.chmod(0o640)
    shutil.chown(redis, "root", "redis")


def configuration(defaults: dict[str, Any], seed: Seed, redis_password: str) -> dict[str, Any]:
    """The appliance's configuration: the image's, the seed's over it, and what the host itself decides over both."""
    host: dict[str, dict[str, Any]] = {
        "paths": {"home": "/var/lib/zccp", "run": "/run/zccp"},
        "auth": {"keys_file": str(DATA / "zccp/keys.json")},
        "cache": {"redis_url": f"redis://:{redis_password}@127.0.0.1:6379/0"},
        "server": {"host": "127.0.0.1", "port": 8000},
        "proxy": {
            "directory": "/run/zccp/proxy", "body_directory": "/run/zccp_bodies",
            "host": "0.0.0.0",  # noqa: S104 - the port that clients come to, behind the firewall
            "port": 443,
            "certificate": str(DATA / "tls/fullchain.pem"), "certificate_key": str(DATA / "tls/key.pem"),
            "log_directory": "/var/log/nginx",
        },
    }  # fmt: skip
    if seed.model:
        host["model"] = {"reference": seed.model}
    merged: dict[str, Any] = {}
    for layer in (defaults, seed.config, host):
        for section, values in layer.items():
            merged[section] = {**merged.get(section, {}), **values}
    return merged


def _probe_key() -> None:
    """A key with little rights, for the host's own question whether the appliance answers."""
    made = run(["zccp", "keys", "add", "host-health", "--requests-per-minute", "60", "--json"])
    write_durably(PROBE, json.loads(made)["key"].encode())
    _for_account(DATA / "zccp/keys.json", (DATA / "zccp/keys.json").read_bytes())


def _for_account(path: Path, content: bytes) -> None:
    """A file that root writes and the appliance reads."""
    write_durably(path, content, 0o640)
    path.chmod(0o640)
    shutil.chown(path, "root", ACCOUNT)
