"""A real Redis server of a test's own, which it can stop, freeze, fill and start again.

Tests that need it are skipped by name where there is none, except where ``ZCCP_REQUIRE_REDIS`` is set.
"""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from redis import Redis
from redis.exceptions import RedisError

from tests.support.front import wait_for
from tests.support.live_server import free_port

SERVER = shutil.which("redis-server")
BUS = 10_000
"""How far above the port of a node of a cluster its port for the other nodes lies."""
REQUIRED = bool(os.environ.get("ZCCP_REQUIRE_REDIS"))  # noqa: TID251
needs_redis = pytest.mark.skipif(
    SERVER is None and not REQUIRED, reason="redis-server is not installed (Debian: redis-server)"
)


@dataclass
class RedisServer:
    """A server on the loopback; ``options`` are those of its command line.

    ``node_port`` is where the nodes of a cluster name it: that of TLS where they use it.
    """

    folder: Path
    port: int
    options: list[str] = field(default_factory=list)
    password: str = ""
    node_port: int = 0
    process: "subprocess.Popen[bytes] | None" = None

    @property
    def url(self) -> str:
        return f"redis://{f':{self.password}@' if self.password else ''}127.0.0.1:{self.port}/0"

    def start(self) -> None:
        assert SERVER is not None, "ZCCP_REQUIRE_REDIS is set and there is no redis-server"
        common = ["--bind", "127.0.0.1", "--port", str(self.port), "--dir", str(self.folder), "--save", ""]
        more = ["--enable-debug-command", "yes", "--unixsocket", str(self.folder / "redis.sock"), *self.options]
        command = [SERVER, *common, *more]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        wait_for(self._answers)

    def client(self) -> Redis:
        """A client with no bounds, for what a test itself does."""
        return Redis(host="127.0.0.1", port=self.port, password=self.password or None, protocol=2)

    def send(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(20)
            self.process = None

    def _answers(self) -> bool:
        try:
            with Redis(unix_socket_path=str(self.folder / "redis.sock"), password=self.password or None) as client:
                return bool(client.ping())
        except RedisError:  # whatever it says before it is ready
            assert self.process is not None
            assert self.process.poll() is None, "redis-server ended at its start"
            return False


@contextmanager
def redis_server(folder: Path, *options: str, password: str = "", start: bool = True) -> Iterator[RedisServer]:
    """Run a server."""
    given = [*options, *(("--requirepass", password) if password else ())]
    server = RedisServer(folder, free_port(), given, password)
    try:
        if start:
            server.start()
        yield server
    finally:
        if server.process is not None:
            server.send(signal.SIGCONT)
        server.kill()


@contextmanager
def redis_cluster(folder: Path, count: int, *, password: str, tls: Path | None = None) -> Iterator[list[RedisServer]]:
    """Servers that can be a cluster (``joined``); each knows itself alone. ``tls`` holds cert.pem and key.pem."""
    options = ["--cluster-enabled", "yes", "--cluster-require-full-coverage", "no", "--cluster-node-timeout", "1000"]
    if tls is not None:
        pem = str(tls / "cert.pem")
        options += ["--tls-cert-file", pem, "--tls-key-file", str(tls / "key.pem"), "--tls-ca-cert-file", pem]
        options += ["--tls-auth-clients", "no", "--tls-cluster", "yes", "--tls-replication", "yes"]
    options += ["--requirepass", password, "--masterauth", password]
    with ExitStack() as stack:
        servers: list[RedisServer] = []
        for number in range(count):
            own = folder / f"node-{number}"
            own.mkdir()
            port, more = bus_port(), []
            if tls is not None:
                more = ["--tls-port", str(bus_port())]
            server = RedisServer(own, port, [*options, *more], password, node_port=int(more[1]) if more else port)
            stack.callback(server.kill)
            server.start()
            servers.append(server)
        yield servers


def bus_port() -> int:
    """A free port that leaves room for that of the bus."""
    return next(port for _ in range(1000) if (port := free_port()) + BUS < 1 << 16)


def joined(servers: list[RedisServer], tls: Path | None = None) -> None:
    """Make one cluster of servers, and wait until each of them says that it is whole."""
    addresses = [f"127.0.0.1:{server.node_port}" for server in servers]
    trust = ["--tls", "--cacert", str(tls / "cert.pem")] if tls is not None else []
    command = ["redis-cli", *trust, "--cluster", "create", *addresses, "--cluster-yes"]
    environment = {"PATH": os.defpath, "REDISCLI_AUTH": servers[0].password}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    wait_for(lambda: all(whole(server) for server in servers))


def whole(server: RedisServer) -> bool:
    """Whether a node says that its cluster is whole."""
    with server.client() as client:
        state = client.execute_command("CLUSTER INFO")
    return state["cluster_state"] == "ok"
