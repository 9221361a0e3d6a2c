"""The HTTP server leaves what is not its own alone."""

import io
import logging
from pathlib import Path

from appliance.http_server import at_port, at_socket
from appliance.reservation import listen_at_socket, reserve_port


async def nothing(scope, receive, send):
    """An application that is never asked."""


def test_making_a_server_closes_no_handler_and_no_stream_of_others(tmp_path: Path) -> None:
    class Closing(logging.StreamHandler):
        """Closes its stream with itself, as some libraries' handlers close stderr."""

        def close(self) -> None:
            self.stream.close()
            super().close()

    stream = io.StringIO()
    handler = Closing(stream)
    logger = logging.getLogger("zccp.test")
    logger.addHandler(handler)
    try:
        with reserve_port("127.0.0.1", 0) as port, listen_at_socket(tmp_path / "socket") as private:
            at_port(nothing, port, http2=False, max_connections=8)
            at_socket(nothing, private, max_connections=8)
        logger.warning("still here")
    finally:
        logger.removeHandler(handler)
    assert stream.getvalue() == "still here\n"
