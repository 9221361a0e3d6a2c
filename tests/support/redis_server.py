"""A real Redis server of a test's own, which it can stop, freeze, fill and start again.

Tests that need it are skipped by name where there is none, except where ``ZCCP_REQUIRE_REDIS`` is set.
"""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from redis import Redis
from redis.exceptions import RedisError

from tests.support.front import wait_for
from tests.support.live_server import free_port

SERVER = shutil.which("redis-server")
REQUIRED = bool(os.environ.get("ZCCP_REQUIRE_REDIS"))  # noqa: TID251
needs_redis = pytest.mark.skipif(
    SERVER is None and not REQUIRED, reason="redis-server is not installed (Debian: redis-server)"
)


@dataclass
class RedisServer:
    """A server on the loopback; ``options`` are those of its command line."""

    folder: Path
    port: int
    options: list[str] = field(default_factory=list)
    password: str = ""
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
