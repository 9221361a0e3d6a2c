"""The index of fingerprints in Redis, which the nodes of a fleet share.

Owns the connection and its bounds, the names of keys and what is done when Redis is away, slow, full or lies. A look-up
and a publication are one round trip each. Values are read up to a bound, so that nothing that lies under a key can hold
a worker up, and are checked before they are believed. Every fault costs a miss, a count and, when the state changes,
one line of log; none reaches a request. Used by one thread; never imports jax or numpy.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import structlog
from redis import Redis
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.exceptions import (
    AskError,
    AuthenticationError,
    AuthorizationError,
    ClusterError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    ResponseError,
    TimeoutError,  # noqa: A004 - the library's
)
from redis.retry import Retry

from appliance.config_cache import redis_hosts
from appliance.reuse.breaker import Breaker
from appliance.reuse.fingerprint import SCHEMA as FINGERPRINT_SCHEMA
from appliance.reuse.fingerprint import Fingerprint
from appliance.reuse.index import MAX_VALUE_BYTES, SCHEMA, Candidate, Entry, decoded, encoded, ranked

_log = structlog.get_logger("zccp.reuse")

Operation = Literal["propose", "publish"]
Outcome = Literal["ok", "error", "slow", "refused", "garbage", "skipped"]

_AWAY = 3
"""How many hosts of a cluster that are away a new client passes over, one after the other."""
_FAULTS = (RedisError, RedisClusterException, OSError, ValueError)


class IndexObserver(Protocol):
    """Where an index reports how its calls went."""

    def index_called(self, operation: Operation, outcome: Outcome, took_s: float) -> None:
        """One call is over."""
        ...

    def index_is_down(self, down: bool) -> None:
        """The index is left alone from now on, or asked again."""
        ...


def connect(url: str, timeout_s: float, *, cluster: bool = False) -> "Redis | RedisCluster":
    """A client of the Redis at ``url`` that tries nothing twice; it connects when it is first used.

    A cluster's client connects at once, to any of the hosts of its URL, and learns the others from it. One of these it
    asks what commands there are, and another where that one is away.

    Args:
        url: redis://, rediss:// or unix://, with user and password where they are needed; of a cluster with several
            hosts if some may be away.
        timeout_s: the longest time of a connection and of an answer.
        cluster: whether it is a node of a cluster.
    """
    bounds: dict[str, Any] = {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
        "driver_info": None,
    }
    if cluster:
        first, others = redis_hosts(url)
        nodes = [ClusterNode(host, port) for host, port in others]
        none, bounds["retry"] = bounds["retry"], Retry(NoBackoff(), _AWAY)
        client = RedisCluster.from_url(first, startup_nodes=nodes, require_full_coverage=False, **bounds)
        client.set_retry(none)
        return client
    return Redis.from_url(url, max_connections=2, **bounds)


class RedisIndex:
    """The index behind ``FingerprintIndex`` in a Redis or a cluster of them."""

    def __init__(
        self,
        connect: "Callable[[], Redis | RedisCluster]",
        ttl_s: float,
        slow_s: float,
        observer: IndexObserver,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare; nothing is connected before the first call.

        Args:
            connect: makes a client; tried again after it failed.
            ttl_s: time to live of an entry, kept by Redis itself.
            slow_s: a call that took longer counts as a failure, even where its result is used.
            observer: hears of every call.
            clock: seconds that never go back.
        """
        self._connect = connect
        self._ttl_ms = max(1, int(ttl_s * 1000))
        self._slow_s = slow_s
        self._observer = observer
        self._clock = clock
        self._client: Redis | RedisCluster | None = None
        self._link = Breaker(clock)
        self._writes = Breaker(clock)

    def propose(self, space: bytes, fingerprint: Fingerprint) -> tuple[Candidate, ...]:
        """See ``appliance.reuse.index.FingerprintIndex``."""
        if not self._link.allows():
            self._observer.index_called("propose", "skipped", 0.0)
            return ()
        commands = [("GETRANGE", name, 0, MAX_VALUE_BYTES) for name in _names(space, fingerprint)]
        answers = self._round_trip("propose", commands)
        held = [answer for answer in answers if answer != b""]
        entries = [entry for value in held if isinstance(value, bytes) and (entry := decoded(value)) is not None]
        if len(entries) < len(held):
            self._observer.index_called("propose", "garbage", 0.0)
        return ranked(entries)

    def publish(self, space: bytes, fingerprint: Fingerprint, entry: Entry) -> bool:
        """See ``appliance.reuse.index.FingerprintIndex``."""
        value = encoded(entry)
        if value is None or not (self._link.allows() and self._writes.allows()):
            self._observer.index_called("publish", "skipped", 0.0)
            return False
        commands = [("SET", name, value, "PX", self._ttl_ms) for name in _names(space, fingerprint)]
        answers = self._round_trip("publish", commands)
        refused = next((answer for answer in answers if isinstance(answer, Exception)), None)
        if refused is not None:
            self._observer.index_called("publish", "refused", 0.0)
            if self._writes.failed(certain=isinstance(refused, OutOfMemoryError | ReadOnlyError | NoPermissionError)):
                _log.warning("the fingerprint index takes no entries; they are not published", cause=_cause(refused))
            return False
        if answers and self._writes.succeeded():
            _log.info("the fingerprint index takes entries again")
        return bool(answers)

    def close(self) -> None:
        """See ``appliance.reuse.index.FingerprintIndex``."""
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(*_FAULTS):
                client.close()

    def _round_trip(self, operation: Operation, commands: "Sequence[tuple[Any, ...]]") -> list[Any]:
        """The answers, errors among them; none where Redis could not be asked."""
        began_s = self._clock()
        try:
            if self._client is None:
                self._client = self._connect()
            pipeline = self._client.pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command)
            answers = pipeline.execute(raise_on_error=False)
            lost = next((answer for answer in answers if _is_of_the_link(answer)), None)
        except _FAULTS as error:
            answers, lost = [], error
        took_s = self._clock() - began_s
        if lost is not None:
            self.close()
            self._observer.index_called(operation, "error", took_s)
            self._failed(lost)
            return []
        if took_s > self._slow_s:
            self._observer.index_called(operation, "slow", took_s)
            self._failed(TimeoutError(f"an answer took {1000 * took_s:.0f} ms"))
            return answers
        self._observer.index_called(operation, "ok", took_s)
        if self._link.succeeded():
            self._observer.index_is_down(False)  # noqa: FBT003
            _log.info("the fingerprint index answers again")
        return answers

    def _failed(self, error: Exception) -> None:
        if self._link.failed(certain=isinstance(error, AskError | AuthenticationError | AuthorizationError)):
            self._observer.index_is_down(True)  # noqa: FBT003
            _log.warning("the fingerprint index does not answer; requests go on without it", cause=_cause(error))


def _names(space: bytes, fingerprint: Fingerprint) -> list[str]:
    """The name of each band key: versions and digests, in one hash slot of a cluster for each space."""
    start = f"zccp:{SCHEMA}.{FINGERPRINT_SCHEMA}:{{{space.hex()}}}:"
    return [start + key.hex() for key in fingerprint.keys]


def _is_of_the_link(answer: object) -> bool:
    """Whether an answer is an error that says something of the whole Redis and not of one key."""
    return isinstance(answer, Exception) and (
        isinstance(answer, AskError | ClusterError) or not isinstance(answer, ResponseError)
    )


def _cause(error: Exception) -> str:
    """What happened, for people; never what was sent."""
    if isinstance(error, AuthenticationError | AuthorizationError):
        return "Redis refuses the user or the password of cache.redis_url"
    if isinstance(error, OutOfMemoryError):
        return "Redis is full: raise its maxmemory, or set maxmemory-policy allkeys-lru"
    if isinstance(error, ReadOnlyError):
        return "Redis is a read-only replica: cache.redis_url must name the primary"
    if isinstance(error, AskError):  # and its kind that says moved
        return "Redis is part of a cluster: set cache.redis_cluster"
    return f"{type(error).__name__}: {str(error)[:200]}"
