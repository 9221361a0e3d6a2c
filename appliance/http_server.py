"""The HTTP server of one worker: the application on a port that all workers share.

Owns the choice of server and its settings; knows nothing of the application. Each worker listens on its own socket with
SO_REUSEPORT, so the kernel spreads connections. Never imports jax.
"""

import asyncio
import logging
from typing import Any

from granian.constants import HTTPModes, Interfaces
from granian.http import HTTP1Settings
from granian.server.embed import Server

LEAVE_LOGGING_ALONE: dict[str, Any] = {"incremental": True, "handlers": {}}
"""Keeps granian from setting up ``logging``, which would close every handler of the process and what they write to."""

READ_BYTES = 64 * 1024
"""Most bytes of a body that the server hands over at once; it holds more than twice as many beside the body."""


class HttpServer:
    """Serves one ASGI application on the running loop until ``stop``."""

    def __init__(self, app: Any, host: str, port: int, *, http2: bool, max_connections: int) -> None:
        """Prepare.

        Args:
            app: the ASGI application.
            host: address to listen on.
            port: TCP port, not 0.
            http2: also speak HTTP/2 without TLS.
            max_connections: connections of this worker; more wait in the kernel.
        """
        logging.getLogger("_granian").setLevel(logging.ERROR)
        self._server = Server(
            app,
            address="127.0.0.1" if host == "localhost" else host,
            port=port,
            interface=Interfaces.ASGI,
            http=HTTPModes.auto if http2 else HTTPModes.http1,
            http1_settings=HTTP1Settings(header_read_timeout=30_000, max_buffer_size=READ_BYTES),
            websockets=False,
            backlog=1024,
            backpressure=max_connections,
            runtime_blocking_threads=1,
            log_enabled=False,
            log_dictconfig=LEAVE_LOGGING_ALONE,
        )
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
