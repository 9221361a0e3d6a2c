"""The HTTP server of one worker: an application on a port that all workers share, or on a socket for a proxy alone.

Owns the choice of server and its settings; knows nothing of the application. Each worker listens on its own socket with
SO_REUSEPORT, so the kernel spreads connections; at a Unix socket the proxy spreads them. Never imports jax.
"""

import asyncio
import logging
from pathlib import Path
from typing import Any

from granian.constants import HTTPModes, Interfaces
from granian.http import HTTP1Settings
from granian.server.embed import Server

LEAVE_LOGGING_ALONE: dict[str, Any] = {"incremental": True, "handlers": {}}
"""Keeps granian from setting up ``logging``, which would close every handler of the process and what they write to."""
IDLE_S = 75
"""How long a connection may rest between requests, and a request's headers take; as long as nginx keeps one."""
PROXY_IDLE_S = 120
"""How long a connection of the proxy may rest. Longer than the proxy keeps it, which else sends into a closed one."""
PROXY_BACKLOG = 4096
"""Connections of the proxy that wait; one that finds no place fails at once, unlike at a TCP port."""

READ_BYTES = 256 * 1024
"""Most bytes of a body that the server hands over at once, each time with a turn of the loop; it holds about four times
as many beside the body."""


class HttpServer:
    """Serves one ASGI application on the running loop until ``stop``."""

    def __init__(self, server: Server) -> None:
        """Take a server that ``at_port`` or ``at_socket`` made."""
        self._server = server
        self._task: asyncio.Task[None] | None = None

    def start(self) -> "asyncio.Task[None]":
        """Begin to serve; the task ends after ``stop``, or with the error that ended the server."""
        self._task = asyncio.get_running_loop().create_task(self._server.serve(), name="http-server")
        return self._task

    async def stop(self, grace_s: float) -> bool:
        """Take no more connections and let running answers end; whether they all did within ``grace_s``."""
        if self._task is None:
            return True
        self._server.stop()
        done, _ = await asyncio.wait({self._task}, timeout=grace_s)
        return bool(done)


def at_port(app: Any, host: str, port: int, *, http2: bool, max_connections: int) -> HttpServer:
    """A server at a TCP port, for clients.

    Args:
        app: the ASGI application.
        host: address to listen on.
        port: TCP port, not 0.
        http2: also speak HTTP/2 without TLS.
        max_connections: connections of this worker; more wait in the kernel.
    """
    return _server(
        app,
        interface=Interfaces.ASGI,
        address="127.0.0.1" if host == "localhost" else host,
        port=port,
        http=HTTPModes.auto if http2 else HTTPModes.http1,
        http1_settings=HTTP1Settings(header_read_timeout=IDLE_S * 1000, max_buffer_size=READ_BYTES),
        backlog=1024,
        backpressure=max_connections,
    )


def at_socket(app: Any, path: Path, *, max_connections: int) -> HttpServer:
    """A server at a Unix socket of mode 0600, for a proxy; a socket that a dead worker left there makes way.

    Args:
        app: the ASGI application.
        path: where the socket is made, in a directory that nobody else may enter.
        max_connections: connections, idle ones of the proxy included; more wait in the kernel.
    """
    path.unlink(missing_ok=True)
    return _server(
        app,
        interface=Interfaces.ASGINL,  # an application starts and ends once, with the server at the port
        uds=path,
        http=HTTPModes.http1,
        http1_settings=HTTP1Settings(header_read_timeout=PROXY_IDLE_S * 1000, max_buffer_size=READ_BYTES),
        backlog=PROXY_BACKLOG,
        backpressure=max_connections,
    )


def _server(app: Any, *, uds: Path | None = None, **settings: Any) -> HttpServer:
    """What all servers have in common."""
    logging.getLogger("_granian").setLevel(logging.ERROR)
    server = Server(
        app,
        uds=uds,
        websockets=False,
        runtime_blocking_threads=1,
        log_enabled=False,
        log_dictconfig=LEAVE_LOGGING_ALONE,
        **settings,
    )
    server.uds_permissions = 0o600
    return HttpServer(server)
