"""A real nginx with the configuration that the appliance prints, in front of whatever listens at the sockets it names.

Tests that need it are skipped by name where there is no nginx, except where ``ZCCP_REQUIRE_NGINX`` is set.
"""

import asyncio
import datetime
import ipaddress
import os
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from api.body_file import HandedOver
from appliance.config import ApplianceConfig, build
from appliance.handoff import BodyDirectory, directories
from appliance.http_server import at_port, at_socket
from appliance.nginx import nginx_config
from appliance.reservation import listen_at_port, listen_at_socket, reserve_port
from tests.support.api_rig import Rig
from tests.support.live_server import free_port
from tests.support.logs import whole_lines

NGINX = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/local/sbin:/usr/sbin:/sbin")  # noqa: TID251
REQUIRED = bool(os.environ.get("ZCCP_REQUIRE_NGINX"))  # noqa: TID251
needs_nginx = pytest.mark.skipif(NGINX is None and not REQUIRED, reason="nginx is not installed (Debian: nginx-light)")


@dataclass(frozen=True)
class Front:
    """A running nginx: its address, its configuration's source, its folder."""

    url: str
    config: ApplianceConfig
    folder: Path
    process: "subprocess.Popen[bytes]"

    @property
    def port(self) -> int:
        return self.config.proxy.port

    @property
    def certificate(self) -> str:
        return self.config.proxy.certificate

    def bodies(self) -> list[str]:
        """What lies in the directory of bodies."""
        return names(self.config.proxy.bodies)

    def log(self, name: str = "access.log") -> str:
        return whole_lines(self.folder / name)

    def curl(self, path: str, *options: str, data: bytes = b"") -> "subprocess.CompletedProcess[bytes]":
        """One request by curl, over HTTP/2 where there is TLS; options as curl has them."""
        body = ("--data-binary", "@-", "-H", "content-type: application/json") if data else ()
        trust = ("--cacert", self.certificate) if self.certificate else ()
        command = ["curl", "--silent", "--show-error", "--no-buffer", *trust, *body, *options, f"{self.url}{path}"]
        return subprocess.run(command, input=data, capture_output=True, timeout=60, check=False)


def names(folder: Path) -> list[str]:
    """What lies in a folder."""
    return sorted(path.name for path in folder.iterdir())


@contextmanager
def shared_folder() -> Iterator[Path]:
    """A short path in memory, as sockets and bodies need it."""
    with tempfile.TemporaryDirectory(prefix="zccp-test-", dir="/dev/shm") as folder:
        yield Path(folder)


def proxy_sections(folder: Path, *, tls: bool = True) -> dict[str, object]:
    """The ``proxy`` section for a test whose nginx has ``folder`` to itself."""
    section: dict[str, object] = {
        "directory": str(folder / "sockets"),
        "body_directory": str(folder / "bodies"),
        "log_directory": str(folder),
        "port": free_port(),
    }
    if tls:
        write_certificate(folder)
        section |= {"certificate": str(folder / "cert.pem"), "certificate_key": str(folder / "key.pem")}
    return section


@contextmanager
def nginx(
    config: ApplianceConfig,
    folder: Path,
    change: Callable[[str], str] = lambda text: text,
    printed: Callable[[ApplianceConfig], str] = nginx_config,
) -> Iterator[Front]:
    """Run nginx; ``change`` edits what the appliance prints, for what cannot be configured in it."""
    assert NGINX is not None, "ZCCP_REQUIRE_NGINX is set and there is no nginx"
    file = folder / "nginx.conf"
    file.write_text(change(printed(config)))
    options = ["-e", str(folder / "error.log"), "-g", f"daemon off; pid {folder}/pid;", "-c", str(file)]
    process = subprocess.Popen([NGINX, *options], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    scheme = "https" if config.proxy.certificate else "http"
    try:
        wait_for(lambda: _listens(config.proxy.port) or process.poll() is not None)
        assert process.poll() is None, (folder / "error.log").read_text()
        yield Front(f"{scheme}://127.0.0.1:{config.proxy.port}", config, folder, process)
    finally:
        process.terminate()
        process.wait(20)


@dataclass(frozen=True)
class Fronted:
    """One application three ways: through nginx, at its own port, and at the private socket."""

    front: Front
    rig: Rig
    direct: str
    socket: Path
    loop: asyncio.AbstractEventLoop

    def soon(self, action: Callable[[], object]) -> None:
        """Do something on the application's loop."""
        self.loop.call_soon_threadsafe(action)


@contextmanager
def fronted(
    rig: Rig,
    *,
    tls: bool = True,
    workers: int = 1,
    proxy: Mapping[str, object] | None = None,
    change: Callable[[str], str] = lambda text: text,
    **server: object,
) -> Iterator[Fronted]:
    """Serve a rig in a thread as ``worker-0`` of an appliance, with a real nginx in front."""
    with shared_folder() as folder:
        port = free_port()
        given = {
            "server": {"port": port, "workers": workers, **server},
            "proxy": {**proxy_sections(folder, tls=tls), **(proxy or {})},
            "paths": {"home": str(folder / "home")},
        }
        config = build(given, {})
        assert rig.settings.max_body_bytes == config.max_body_bytes
        with (
            directories(config.proxy),
            _served(rig, config, port) as loop,
            nginx(config, folder, change) as front,
        ):
            yield Fronted(front, rig, f"http://127.0.0.1:{port}", config.proxy.socket_of(0), loop)


@contextmanager
def _served(rig: Rig, config: ApplianceConfig, port: int) -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    bodies = BodyDirectory(config.proxy.bodies)
    reservation = reserve_port("127.0.0.1", port)
    private = HandedOver(rig.app, bodies.take, rig.settings)
    servers = [
        at_port(rig.app, listen_at_port(reservation), http2=False, max_connections=128),
        at_socket(private, listen_at_socket(config.proxy.socket_of(0)), max_connections=128),
    ]
    ended = asyncio.Event()

    async def serve() -> None:
        tasks = [server.start() for server in servers]
        await ended.wait()
        assert all([await server.stop(5) for server in servers])
        await asyncio.gather(*tasks)

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    try:
        wait_for(lambda: _listens(port) and config.proxy.socket_of(0).is_socket())
        yield loop
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(20)
        assert not thread.is_alive(), "the servers still have open answers after 20 s"
        loop.close()
        bodies.close()
        reservation.close()


def wait_for(condition: Callable[[], object], within_s: float = 20.0) -> None:
    """Wait until something holds.

    Raises:
        AssertionError: it does not within a generous while.
    """
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, condition
        time.sleep(0.01)


def write_certificate(folder: Path) -> None:
    """A certificate for the loopback that signs itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "zccp test")])
    now = datetime.datetime.now(datetime.UTC)
    names = x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    (folder / "cert.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (folder / "key.pem").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True
