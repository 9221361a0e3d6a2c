"""The ``cache`` section of the configuration: what is reused across requests, and the rules of its keys.

Owns the section, its defaults, its rules and how its secrets are hidden. Reads no file and no environment.
"""

import re
from collections.abc import Iterator
from typing import Annotated, Literal
from urllib.parse import parse_qsl, urlsplit

from msgspec import Meta, Struct

REDIS_QUERY = frozenset(
    {"db", "ssl_ca_certs", "ssl_ca_path", "ssl_cert_reqs", "ssl_certfile", "ssl_check_hostname", "ssl_keyfile"}
)
"""What the part of ``cache.redis_url`` after ``?`` may set; time limits and passwords have their own places."""

REDIS_PORT = 6379
_BEFORE_HOST = re.compile(r"//.*@", re.DOTALL)


class CacheConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Reuse across requests."""

    prefix_reuse: Annotated[
        bool,
        Meta(
            description="Let requests share the pages of prompts and answers that begin alike; false = nothing is"
            " reused."
        ),
    ] = True
    share_prefixes: Annotated[
        Literal["tenant", "all"],
        Meta(description="Who shares them: the requests of one tenant, or all of the node."),
    ] = "tenant"

    host_tier_mb: Annotated[
        float,
        Meta(
            ge=0,
            le=4_194_304,
            description="Memory of the host for pages that the pool gives up, MiB; 0 = none.",
        ),
    ] = 0.0

    disk_tier_mb: Annotated[
        float,
        Meta(
            ge=0,
            le=67_108_864,
            description="Disk under paths.home for pages that host memory gives up, MiB; 0 = none.",
        ),
    ] = 0.0
    redis_tier: Annotated[
        bool, Meta(description="Keep such pages in the Redis of cache.redis_url too, for all nodes that share it.")
    ] = False
    redis_tier_ttl_s: Annotated[
        float, Meta(ge=1, le=2_592_000, description="Time for which a page is kept in Redis, s.")
    ] = 3600.0

    answers_mb: Annotated[
        float, Meta(ge=0, le=65_536, description="Memory of a worker for answers that are given again, MiB; 0 = none.")
    ] = 0.0
    answers_ttl_s: Annotated[float, Meta(ge=1, le=2_592_000, description="Time for which an answer is kept, s.")] = (
        600.0
    )

    known_ids_mb: Annotated[
        float,
        Meta(
            ge=0,
            le=4096,
            description="Memory of a worker for ids of long texts, which are then not made again, MiB.",
        ),
    ] = 32.0

    csf_enabled: (
        Annotated[
            bool, Meta(description="Make fingerprints of prompts and look for prompts alike; empty = with a Redis.")
        ]
        | None
    ) = None
    csf_minhash_hashes: Annotated[Literal[128, 256], Meta(description="Hash values of a fingerprint.")] = 128
    csf_mask_patterns: Annotated[
        tuple[str, ...],
        Meta(
            description="Volatile fields, hidden before a prompt is fingerprinted: names (patient_id, request_id, uuid,"
            " email, timestamp, date, time, ip_address, hex_id, number) and regular expressions of RE2."
        ),
    ] = ()
    volatile_headers: Annotated[
        tuple[str, ...],
        Meta(
            description="What is left out where a system prompt begins with it: names (anthropic_billing) and regular"
            " expressions of RE2 that match no more than a line."
        ),
    ] = ()
    csf_entries: Annotated[
        int,
        Meta(ge=16, le=1_048_576, description="Entries of the index in a worker's memory; Redis has its own bound."),
    ] = 4096
    csf_ttl_s: Annotated[
        float, Meta(ge=1, le=2_592_000, description="Time for which an entry of the index is kept, s.")
    ] = 3600.0
    node_name: Annotated[
        str, Meta(max_length=128, description="Name of this node in the index; empty = the host's name.")
    ] = ""
    redis_url: Annotated[
        str,
        Meta(
            description="Redis of the fingerprint index, which nodes share; of a cluster, some of its hosts with commas"
            " between them; empty = an index in each worker."
        ),
    ] = ""
    redis_cluster: Annotated[bool, Meta(description="Whether that Redis is a cluster.")] = False
    redis_timeout_ms: Annotated[
        float, Meta(ge=1, le=1000, description="Longest time of a connection to Redis and of an answer, ms.")
    ] = 10.0
    warmup_enabled: Annotated[
        bool,
        Meta(description="Compute the first tenth of a long new prompt before the rest, and publish it in the index."),
    ] = False


def fingerprints(cache: CacheConfig) -> bool:
    """Whether prompts get fingerprints: unless told, where an index is shared, since a node alone needs no proposal."""
    return bool(cache.redis_url) if cache.csf_enabled is None else cache.csf_enabled


def cache_problem(cache: CacheConfig) -> str | None:
    """The first rule that the section breaks, None where all hold."""
    return next(_problems(cache), None)


def without_secrets(url: str) -> str:
    """A Redis URL with user and password hidden."""
    return _BEFORE_HOST.sub("//***@", url)


def redis_hosts(url: str) -> tuple[str, tuple[tuple[str, int], ...]]:
    """A Redis URL with its first host alone, and the other hosts that it names, with their ports.

    Raises:
        ValueError: one of the others is no host[:port]; the message shows nothing of the URL.
    """
    scheme, separator, rest = url.partition("://")
    end = re.search(r"[/?#]|$", rest)
    authority, tail = (rest[: end.start()], rest[end.start() :]) if end else (rest, "")
    user, at, hosts = authority.rpartition("@")
    first, *others = hosts.split(",")
    found: list[tuple[str, int]] = []
    for other in others:
        parts = urlsplit(f"//{other}")
        if not parts.hostname or parts.netloc != other or parts.port == 0:
            raise ValueError("a host after a comma is no host[:port]")
        found.append((parts.hostname, parts.port or REDIS_PORT))
    return f"{scheme}{separator}{user}{at}{first}{tail}", tuple(found)


def _problems(cache: CacheConfig) -> Iterator[str]:
    yield from _url_problems(cache)
    if cache.node_name != cache.node_name.strip() or not cache.node_name.isprintable():
        yield f"cache.node_name is {cache.node_name!r}; it must be printable text without space around it"
    yield from _tier_problems(cache)
    if cache.csf_mask_patterns or cache.volatile_headers:
        yield from _pattern_problems(cache)


def _tier_problems(cache: CacheConfig) -> Iterator[str]:
    if cache.host_tier_mb and not cache.prefix_reuse:
        yield (
            f"cache.host_tier_mb is {cache.host_tier_mb:g} and cache.prefix_reuse is false, so that no page would be"
            " found there: turn reuse on, or leave the tier out"
        )
    lower = "cache.disk_tier_mb" if cache.disk_tier_mb else "cache.redis_tier" if cache.redis_tier else ""
    if lower and not cache.host_tier_mb:
        yield f"{lower} is set and cache.host_tier_mb is 0: pages come and go by way of host memory; give it some"
    if cache.redis_tier and not cache.redis_url:
        yield "cache.redis_tier is true and cache.redis_url is empty: say which Redis"


def _pattern_problems(cache: CacheConfig) -> Iterator[str]:
    from appliance.reuse.masks import MAX_PATTERNS, NAMED, MaskPatternError, compiled  # noqa: PLC0415 - where there are any
    from appliance.reuse.volatile import HEADERS  # noqa: PLC0415

    for name, given, named in (
        ("csf_mask_patterns", cache.csf_mask_patterns, NAMED),
        ("volatile_headers", cache.volatile_headers, HEADERS),
    ):
        for place, pattern in enumerate(given):
            try:
                compiled(pattern, named)
            except MaskPatternError as error:
                yield f"cache.{name}[{place}]: {error}"
        if len(given) > MAX_PATTERNS:
            yield f"cache.{name} has {len(given)} patterns; at most {MAX_PATTERNS} are taken"


def _url_problems(cache: CacheConfig) -> Iterator[str]:
    """Nothing of the URL but the names of its options is shown: it may hold a password."""
    if not cache.redis_url:
        return
    try:
        first, others = redis_hosts(cache.redis_url)
        parts = urlsplit(first)
        query = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
        port = parts.port
    except ValueError:
        yield "cache.redis_url is no URL; write @ : / and % in a password as %40 %3A %2F and %25"
        return
    if parts.scheme not in ("redis", "rediss", "unix"):
        yield "cache.redis_url must begin with redis://, rediss:// or unix://"
    elif parts.scheme == "unix" and (not parts.path or cache.redis_cluster):
        yield "cache.redis_url with unix:// needs the path of a socket, and no cluster"
    elif parts.scheme != "unix" and (not parts.hostname or port == 0 or not re.fullmatch(r"(/\d*)?", parts.path)):
        yield "cache.redis_url must be redis://[user:password@]host[:port][/database]"
    elif others and not cache.redis_cluster:
        yield "cache.redis_url names several hosts, which only a cluster has; set cache.redis_cluster, or name one"
    elif parts.scheme == "redis" and any(name.startswith("ssl_") for name, _ in query):
        yield "cache.redis_url sets options of TLS and begins with redis://; TLS is rediss://"
    wrong = next((name for name, _ in query if name not in REDIS_QUERY), None)
    if wrong is not None:
        known = ", ".join(sorted(REDIS_QUERY))
        yield f"cache.redis_url sets {wrong[:40]!r}, which has no place there; known are {known}"
