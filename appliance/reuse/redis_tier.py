"""Pages in Redis: contents that host memory gave up, for the nodes that share one.

Owns the names of keys, the form of values and the bounds of the connection. A value begins with a header that names its
version, its key and the checksum of its content, and is read up to the size that it should have, so that nothing that
lies under a key can hold more than a page up or be believed. Redis itself forgets, by time and by its own bound. A
connection that failed is dropped, so that a late answer never belongs to another question. Used by one thread.
"""

import hashlib
import struct
import zlib
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from appliance.reuse.lower_tiers import DamagedPageError, Page

if TYPE_CHECKING:
    from redis import Redis
    from redis.cluster import RedisCluster

TIMEOUT_S = 0.2
"""Longest time of a connection, and of an answer with a page in it."""

_HEADER = struct.Struct("<8s32sQI")
"""Magic with version, digest of the name, bytes of the content, CRC-32 of the content."""
_MAGIC = b"zccppg01"


class RedisTier:
    """See the module, and ``appliance.reuse.lower_tiers.PageStore``.

    Args:
        connect: makes a client that tries nothing twice; called when there is none.
        ttl_s: time for which Redis keeps a content.
        space: a digest of all that contents depend on beside their names: model, plan, programs.
    """

    label = "redis"

    def __init__(self, connect: "Callable[[], Redis | RedisCluster]", ttl_s: float, space: bytes) -> None:
        self._connect = connect
        self._ttl_ms = max(1, int(1000 * ttl_s))
        self._space = space
        self._client: Redis | RedisCluster | None = None

    def get(self, name: bytes, most_bytes: int) -> Page | None:
        """See ``PageStore.get``.

        Raises:
            DamagedPageError: something else lies under the key; it is removed.
            RedisError: Redis cannot be asked.
        """
        digest = self._digest(name)
        value = self._call("GETRANGE", _key(digest), 0, _HEADER.size + most_bytes)
        if not value:
            return None
        content = memoryview(value)[_HEADER.size :]
        if value[: _HEADER.size] != _head(digest, content):
            self._call("DEL", _key(digest))
            raise DamagedPageError
        return content

    def put(self, name: bytes, content: Page) -> bool:
        """See ``PageStore.put``; what is there already is kept for as long as a new one.

        Raises:
            RedisError: Redis does not take it.
        """
        digest = self._digest(name)
        if self._call("PEXPIRE", _key(digest), self._ttl_ms):
            return False
        self._call("SET", _key(digest), _head(digest, content) + bytes(content), "PX", self._ttl_ms)
        return True

    def close(self) -> None:
        """Let go of the connection."""
        client, self._client = self._client, None
        if client is not None:
            with suppress(Exception):
                client.close()

    def _call(self, *command: Any) -> Any:
        if self._client is None:
            self._client = self._connect()
        try:
            return self._client.execute_command(*command)
        except BaseException:
            self.close()
            raise

    def _digest(self, name: bytes) -> bytes:
        return hashlib.sha256(self._space + name).digest()


def _key(digest: bytes) -> str:
    return f"zccp:pages:{digest.hex()}"


def _head(digest: bytes, content: Page) -> bytes:
    return _HEADER.pack(_MAGIC, digest, len(content), zlib.crc32(content))
