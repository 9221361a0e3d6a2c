"""What a worker reuses with: the parts of ``appliance.reuse`` put together as the configuration says.

Owns the choice between the index in memory and the one in Redis, whose client is loaded only where it is used.
"""

import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from appliance.config_cache import CacheConfig
from appliance.model.record import read_record
from appliance.reuse.index import EmbeddedIndex, FingerprintIndex
from appliance.reuse.proposals import IndexMetrics, Proposals
from appliance.telemetry import FingerprintMetrics

if TYPE_CHECKING:
    from appliance.reuse.fingerprint import Fingerprinter

SLOW_CALLS = 5
"""A call of the index that took so many times the longest answer counts as a failure: it came in small pieces."""


def proposals_of(
    cache: CacheConfig, token_bytes: Callable[[int], bytes], model: str, metrics: FingerprintMetrics
) -> Proposals:
    """The look-ups of one worker.

    Args:
        cache: the section of a checked configuration.
        token_bytes: the text of an id.
        model: what the ids belong to, the same on every node that serves it.
        metrics: where to count.
    """

    def make() -> "tuple[Fingerprinter, FingerprintIndex]":
        from appliance.reuse.fingerprint import Fingerprinter  # noqa: PLC0415 - numpy, which takes a while
        from appliance.reuse.masks import Masks  # noqa: PLC0415

        masks = Masks(cache.csf_mask_patterns)
        return Fingerprinter(cache.csf_minhash_hashes, masks), _index(cache, metrics)

    return Proposals(
        token_bytes,
        make,
        metrics,
        node=cache.node_name or socket.gethostname(),
        model=model,
        warmup=cache.warmup_enabled,
    )


def model_identity(folder: Path, name: str) -> str:
    """What ids of a stored model belong to: its name and its files, and the same on every node that has them."""
    if not folder.is_dir():
        return name
    return ":".join((name, *sorted(file.sha256 for file in read_record(folder).source_files)))


def _index(cache: CacheConfig, metrics: FingerprintMetrics) -> FingerprintIndex:
    if not cache.redis_url:
        return EmbeddedIndex(cache.csf_entries, cache.csf_ttl_s, time.monotonic)
    from appliance.reuse.redis_index import RedisIndex, connect  # noqa: PLC0415 - 8 MiB a process

    timeout_s = cache.redis_timeout_ms / 1000
    client = partial(connect, cache.redis_url, timeout_s, cluster=cache.redis_cluster)
    return RedisIndex(client, cache.csf_ttl_s, SLOW_CALLS * timeout_s, IndexMetrics(metrics))
