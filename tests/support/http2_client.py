"""A small HTTP/2 client without TLS, as a correct one behaves: it heeds GOAWAY and sends again what the server names.

Owns one connection at a time. Knows frames and headers only as far as a request and its status need them. Source: RFC
9113, sections 4 and 6; RFC 7541, section 6 and appendix A.
"""

import json
import select
import socket
import struct

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, ACK, END_HEADERS = 1, 1, 4
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
STATUS_200 = 0x88
_WINDOW = 1 << 30


class Http2Client:
    """Sends one request after the other over one connection, and over a new one after a GOAWAY."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._socket: socket.socket | None = None
        self._last_allowed: int | None = None
        self._stream = -1
        self.connections = 0

    def post(self, path: str, body: object) -> bytes:
        """The body of the answer.

        Raises:
            ConnectionError: the connection ended without a word, or the status is not 200.
        """
        while True:
            self._read_what_is_there()
            if self._socket is None:
                self._connect()
            answer = self._exchange(path, json.dumps(body).encode())
            if answer is not None:
                return answer
            self.close()  # the server said that it did not take this one

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _connect(self) -> None:
        self._socket = socket.create_connection(("127.0.0.1", self._port), timeout=30)
        self._last_allowed, self._stream, self.connections = None, -1, self.connections + 1
        self._socket.sendall(
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(SETTINGS, 0, 0, struct.pack(">HI", 4, _WINDOW))
        )
        self._socket.sendall(_frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", _WINDOW)))

    def _exchange(self, path: str, body: bytes) -> bytes | None:
        assert self._socket is not None
        self._stream += 2
        fields = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "x"}
        fields["content-type"] = "application/json"
        block = b"".join(b"\0" + _text(name) + _text(value) for name, value in fields.items())
        sent = _frame(HEADERS, END_HEADERS, self._stream, block) + _frame(DATA, END_STREAM, self._stream, body)
        try:
            self._socket.sendall(sent)
        except OSError as error:
            raise ConnectionError(f"sending broke: {error}") from error
        answer = b""
        while True:
            kind, flags, stream, payload = self._frame()
            if self._last_allowed is not None and self._last_allowed < self._stream:
                return None
            if stream != self._stream:
                continue
            if kind == RST_STREAM:
                raise ConnectionError(f"stream {stream} was reset: {payload.hex()}")
            if kind == HEADERS and payload[0] != STATUS_200:
                raise ConnectionError(f"status is not 200: {payload[:4].hex()}")
            answer += payload if kind == DATA else b""
            if flags & END_STREAM and kind in (DATA, HEADERS):
                return answer

    def _read_what_is_there(self) -> None:
        """Hear what came since the last answer; a connection that is to end is ended."""
        while self._socket is not None and self._last_allowed is None and select.select([self._socket], [], [], 0)[0]:
            self._frame()
        if self._last_allowed is not None:
            self.close()

    def _frame(self) -> tuple[int, int, int, bytes]:
        """The next frame; those that concern the connection are dealt with."""
        assert self._socket is not None
        head = self._bytes(9)
        length, kind, flags, stream = int.from_bytes(head[:3]), head[3], head[4], int.from_bytes(head[5:])
        payload = self._bytes(length)
        if kind in (SETTINGS, PING) and not flags & ACK:
            self._socket.sendall(_frame(kind, ACK, 0, payload if kind == PING else b""))
        if kind == GOAWAY:
            self._last_allowed = int.from_bytes(payload[:4])
        return kind, flags, stream, payload

    def _bytes(self, count: int) -> bytes:
        assert self._socket is not None
        got = b""
        while len(got) < count:
            part = self._socket.recv(count - len(got))
            if not part:
                raise ConnectionError(f"the connection ended; GOAWAY named {self._last_allowed}, sent {self._stream}")
            got += part
        return got


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3) + bytes((kind, flags)) + stream.to_bytes(4) + payload


def _text(value: str) -> bytes:
    return bytes((len(value),)) + value.encode()
