"""Bodies that a proxy hands over as files: the application behind the socket that only the proxy can reach.

Owns the name of the header that points at a file, and the mapping that stands in for the body. Reads descriptors that a
callable of its maker opens; never opens a path. The header means something here alone: an application that is served
without this one around it never looks at it, so nobody else can have a file opened.

The file is mapped read-only and decoded in place, no byte of it is copied. Its memory goes back to the system as soon
as nothing refers to the mapping any more, although the proxy keeps the file open for as long as the answer lasts.
"""

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from mmap import MAP_POPULATE, MAP_SHARED, PROT_READ, mmap
from typing import Any, cast
from weakref import finalize

from litestar.types import ASGIApp, Message, Receive, Scope, Send

from api.body import too_large
from api.errors import ApiError, HandoffError
from api.settings import ApiSettings

HEADER = b"x-zccp-body"

OpenBody = Callable[[bytes], int]
"""A readable and writable descriptor of the file that a header names, which then has no name any more.

Raises ``HandoffError`` for anything but a file that the proxy itself has put where its files belong.
"""

_log = logging.getLogger(__name__)


class HandedOver:
    """ASGI wrapper for the private socket: the file that a request names takes the place of its body."""

    __slots__ = ("_app", "_open_body", "_settings")

    def __init__(self, app: ASGIApp, open_body: OpenBody, settings: ApiSettings) -> None:
        """Wrap ``app``; ``settings`` bounds the size of a body."""
        self._app = app
        self._open_body = open_body
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run one request; its file is gone afterwards, whether or not somebody wanted it."""
        headers: list[tuple[bytes, bytes]] = list(cast("Any", scope).get("headers", ()))
        names = [value for name, value in headers if name == HEADER]
        if not names:
            await self._app(scope, receive, send)
            return
        request_id = next((value for name, value in headers if name == b"x-request-id"), b"").decode("latin-1")
        body = _FileBody(b",".join(names), request_id, self._open_body, self._settings, receive)
        try:
            await self._app(scope, cast("Receive", body.receive), send)
        finally:
            body.discard()


class _FileBody:
    """The messages of one request whose body is a file."""

    __slots__ = ("_name", "_open_body", "_receive", "_request_id", "_settings", "_taken")

    def __init__(
        self, name: bytes, request_id: str, open_body: OpenBody, settings: ApiSettings, receive: Receive
    ) -> None:
        self._name = name
        self._request_id = request_id
        self._open_body = open_body
        self._settings = settings
        self._receive = receive
        self._taken = False

    async def receive(self) -> Message:
        """The whole body at first; then what the server has to say, which is that the client has left."""
        if self._taken:
            return cast("Message", await self._receive())
        self._taken = True
        try:
            body = _mapped(self._open_body(self._name), self._settings)
        except HandoffError as error:
            _log.warning("body refused: %s", error.message, extra={"request_id": self._request_id})
            raise
        return cast("Message", {"type": "http.request", "body": body, "more_body": False})

    def discard(self) -> None:
        """Remove the file of a request whose body nobody asked for."""
        if not self._taken:
            self._taken = True
            with suppress(ApiError):
                os.close(self._open_body(self._name))


def _mapped(descriptor: int, settings: ApiSettings) -> bytes | mmap:
    """The content of a file, which keeps the descriptor for as long as anything refers to it.

    Raises:
        BodyTooLargeError: it passes ``max_body_bytes``; nothing has been mapped then.
    """
    mapping = None
    try:
        size = os.fstat(descriptor).st_size
        if size > settings.max_body_bytes:
            raise too_large(size, settings)
        if not size:
            return b""
        mapping = mmap(descriptor, size, flags=MAP_SHARED | MAP_POPULATE, prot=PROT_READ)
        finalize(mapping, _free, descriptor)
        return mapping
    finally:
        if mapping is None:
            os.close(descriptor)


def _free(descriptor: int) -> None:
    """Give the memory of a file back that nobody maps any more, and close it."""
    with suppress(OSError):
        os.ftruncate(descriptor, 0)
    os.close(descriptor)
