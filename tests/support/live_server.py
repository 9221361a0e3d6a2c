"""A real ASGI server on a loopback port, in a thread of this process, for clients that need a socket."""

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from granian.constants import HTTPModes, Interfaces
from granian.server.embed import Server

from appliance.http_server import LEAVE_LOGGING_ALONE


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(app: Any) -> Iterator[int]:
    """Serve ``app`` and give its port; the server ends with the block.

    Raises:
        RuntimeError: the server did not answer, or not end, within 10 s.
    """
    port = free_port()
    loop = asyncio.new_event_loop()
    server = Server(
        app,
        address="127.0.0.1",
        port=port,
        interface=Interfaces.ASGI,
        http=HTTPModes.http1,
        websockets=False,
        backpressure=512,
        log_enabled=False,
        log_dictconfig=LEAVE_LOGGING_ALONE,
    )
    thread = threading.Thread(target=lambda: loop.run_until_complete(server.serve()), daemon=True)
    thread.start()
    try:
        _wait_for(port)
        yield port
    finally:
        loop.call_soon_threadsafe(server.stop)
        thread.join(10)
        if thread.is_alive():
            raise RuntimeError("the server still has open answers after 10 s")
        loop.close()


def _wait_for(port: int) -> None:
    for _ in range(200):
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise RuntimeError(f"nothing answers on port {port} after 10 s")
