"""An API worker's packet channel to the engine: one Unix SOCK_SEQPACKET socket driven by the event loop.

Owns the socket, the queue of packets that the kernel would not take yet, and its registration with the loop. Knows
messages only as packets in and out; never blocks, never retries a connection, never imports jax.
"""

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from pathlib import Path

from appliance.host.address import socket_address
from appliance.host.wire import MAX_PACKET_BYTES, ToEngine, ToWorker, WireError, decode_to_worker, encode


class ChannelError(ConnectionError):
    """The channel cannot be opened or used; the message gives the cause."""


class Channel:
    """One open connection. ``lost`` is called once, with the cause, when it ends for any reason but ``close``."""

    def __init__(
        self,
        peer: socket.socket,
        received: Callable[[ToWorker], None],
        lost: Callable[[str], None],
        max_queued: int,
    ) -> None:
        """Take over a connected, non-blocking socket and begin to read.

        Args:
            peer: the socket; closed by this object.
            received: called for every message, on the loop's thread.
            lost: called at the end.
            max_queued: packets that may wait for the kernel before the channel counts as stuck.
        """
        self._socket = peer
        self._received = received
        self._lost = lost
        self._max_queued = max_queued
        self._queue: deque[bytes] = deque()
        self._buffer = bytearray(MAX_PACKET_BYTES + 1)
        self._view = memoryview(self._buffer)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(peer.fileno(), self._readable)

    @property
    def is_open(self) -> bool:
        """Whether messages can still be sent."""
        return self._socket.fileno() >= 0

    def send(self, message: ToEngine) -> None:
        """Send or queue one message.

        Raises:
            ChannelError: the channel is closed, or so much is queued that the engine must be stuck.
            WireError: the message is larger than a packet may be.
        """
        if not self.is_open:
            raise ChannelError("the channel to the engine is closed")
        packet = encode(message)
        if not self._queue and self._try_send(packet):
            return
        if not self.is_open:
            raise ChannelError("the engine closed the channel")
        if len(self._queue) >= self._max_queued:
            self._end(f"{len(self._queue)} packets wait for the engine; it does not read")
            raise ChannelError("the engine does not read its channel")
        if not self._queue:
            self._loop.add_writer(self._socket.fileno(), self._writable)
        self._queue.append(packet)

    def close(self) -> None:
        """Close without calling ``lost``. Idempotent."""
        if self.is_open:
            self._loop.remove_reader(self._socket.fileno())
            self._loop.remove_writer(self._socket.fileno())
            self._socket.close()
            self._queue.clear()

    def _end(self, cause: str) -> None:
        if self.is_open:
            self.close()
            self._lost(cause)

    def _try_send(self, packet: bytes) -> bool:
        try:
            self._socket.send(packet, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        except OSError as error:
            self._end(f"sending to the engine failed: {error.strerror}")
            return False
        return True

    def _writable(self) -> None:
        while self._queue and self._try_send(self._queue[0]):
            self._queue.popleft()
        if not self._queue and self.is_open:
            self._loop.remove_writer(self._socket.fileno())

    def _readable(self) -> None:
        while self.is_open:
            try:
                length = self._socket.recv_into(self._buffer)
            except BlockingIOError:
                return
            except OSError as error:
                self._end(f"reading from the engine failed: {error.strerror}")
                return
            if length == 0:
                self._end("the engine closed the connection")
                return
            try:
                message = decode_to_worker(self._view[:length])
            except WireError as error:
                self._end(str(error))
                return
            self._received(message)


def connect(path: Path) -> socket.socket:
    """Open a non-blocking connection to the engine's socket; a Unix socket connects at once or not at all.

    Raises:
        ChannelError: nothing listens there, or its backlog is full.
    """
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    peer.setblocking(False)  # noqa: FBT003 - the only signature it has
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MAX_PACKET_BYTES)
    try:
        with socket_address(path) as address:
            peer.connect(address)
    except OSError as error:
        peer.close()
        # clients of the API read this: the socket's name, and not where it is
        raise ChannelError(f"no engine at {path.name}: {error.strerror or error}") from error
    return peer
