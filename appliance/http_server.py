"""The HTTP server of one worker: an application at a port that all workers share, or at a socket for a proxy alone.

Owns the choice of server and its settings; knows nothing of the application and opens no socket of its own: where it
listens is given to it (``appliance.reservation.Door``). Never imports jax.
"""

import asyncio
import logging
import os
import socket
from typing import Any

from granian._granian import SocketHolder
from granian.constants import HTTPModes, Interfaces
from granian.http import HTTP1Settings
from granian.server.embed import Server

from appliance.reservation import BACKLOG

LEAVE_LOGGING_ALONE: dict[str, Any] = {"incremental": True, "handlers": {}}
"""Keeps granian from setting up ``logging``, which would close every handler of the process and what they write to."""
IDLE_S = 75
"""How long a connection may rest between requests, and a request's headers take; as long as nginx keeps one."""
PROXY_IDLE_S = 120
"""How long a connection of the proxy may rest. Longer than the proxy keeps it, which else sends into a closed one."""
READ_BYTES = 256 * 1024
"""Most bytes of a body that the server hands over at once, each time with a turn of the loop; it holds about four times
as many beside the body."""


class HttpServer:
    """Serves one ASGI application on the running loop until ``stop``."""

    def __init__(self, server: Server, descriptor: int) -> None:
        """Take a server that ``at_port`` or ``at_socket`` made, and the descriptor at which it accepts."""
        self._server = server
        self._descriptor = descriptor
        self._task: asyncio.Task[None] | None = None

    def start(self) -> "asyncio.Task[None]":
        """Begin to serve; the task ends after ``stop``, or with the error that ended the server."""
        self._task = asyncio.get_running_loop().create_task(self._server.serve(), name="http-server")
        return self._task

    def take_no_more(self) -> None:
        """Accept no connection from now on; those that are open go on.

        The server has no such call, and a listening socket that processes share cannot be closed for one of them. So a
        socket that nobody knows takes the number of the descriptor: what the server asks is answered with "nothing
        there", and every new connection waits for another worker.
        """
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as quiet:
            quiet.bind("")
            quiet.listen(0)
            os.dup2(quiet.fileno(), self._descriptor, inheritable=False)

    async def stop(self, grace_s: float) -> bool:
        """Take no more connections and let running answers end; whether they all did within ``grace_s``."""
        if self._task is None:
            return True
        self._server.stop()
        done, _ = await asyncio.wait({self._task}, timeout=grace_s)
        return bool(done)


class _Server(Server):
    """The server on a socket that listens already."""

    def __init__(self, app: Any, descriptor: int, *, is_unix: bool, **settings: Any) -> None:
        super().__init__(app, **settings)
        self._holder = SocketHolder(descriptor, is_unix, BACKLOG)  # pyright: ignore[reportCallIssue] - not in its stubs

    def _init_shared_socket(self) -> None:
        """Take the socket in the place of opening one, which is all that this class changes."""
        self._ssp = None
        self._shd = self._holder


def at_port(app: Any, listener: socket.socket, *, http2: bool, max_connections: int) -> HttpServer:
    """A server at a TCP port, for clients.

    Args:
        app: the ASGI application.
        listener: a listening socket; the server takes its descriptor over and closes it at its end.
        http2: also speak HTTP/2 without TLS.
        max_connections: connections of this worker; more wait in the kernel.
    """
    return _server(
        app,
        listener,
        interface=Interfaces.ASGI,
        http=HTTPModes.auto if http2 else HTTPModes.http1,
        http1_settings=HTTP1Settings(header_read_timeout=IDLE_S * 1000, max_buffer_size=READ_BYTES),
        backpressure=max_connections,
    )


def at_socket(app: Any, listener: socket.socket, *, max_connections: int) -> HttpServer:
    """A server at a Unix socket, for a proxy.

    Args:
        app: the ASGI application.
        listener: a listening socket in a directory that nobody else may enter; taken over as well.
        max_connections: connections, idle ones of the proxy included; more wait in the kernel.
    """
    return _server(
        app,
        listener,
        interface=Interfaces.ASGINL,  # an application starts and ends once, with the server at the port
        http=HTTPModes.http1,
        http1_settings=HTTP1Settings(header_read_timeout=PROXY_IDLE_S * 1000, max_buffer_size=READ_BYTES),
        backpressure=max_connections,
    )


def _server(app: Any, listener: socket.socket, **settings: Any) -> HttpServer:
    """What all servers have in common."""
    logging.getLogger("_granian").setLevel(logging.ERROR)
    is_unix, descriptor = listener.family == socket.AF_UNIX, listener.detach()
    server = _Server(
        app,
        descriptor,
        is_unix=is_unix,
        websockets=False,
        runtime_blocking_threads=1,
        log_enabled=False,
        log_dictconfig=LEAVE_LOGGING_ALONE,
        **settings,
    )
    return HttpServer(server, descriptor)
