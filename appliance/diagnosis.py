"""The known failures of an appliance that serves, each told in one line: cause, evidence, remedy.

Owns what counts as each failure. The evidence is what the running appliance says of itself at ``/health`` and
``/metrics``, nginx's log, and the driver of the card; it reads these, asks Redis whether it is there, and changes
nothing. Where nothing runs it says so and judges only what needs nothing that runs.
"""

import json
import re
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import redis
from prometheus_client.parser import text_string_to_metric_families

from appliance.config import ApplianceConfig, client_key
from appliance.config_cache import without_secrets
from appliance.findings import Finding
from appliance.proxy_probe import WAIT_S, local
from appliance.reuse.redis_index import connect
from planner.target import DEFAULT_TARGET, find_target

MIB = 1 << 20
FULL_SEGMENTS = 0.95
"""Share of the segments in use from which on the next burst finds none."""
REFUSED_SHARE = 0.001
"""Share of requests that may have found no segment: now and then a burst is larger than what an appliance is for."""
LEAST_PROMPT_TOKENS = 50_000
LOW_HIT_RATE = 0.1
"""Share of prompt ids, of at least so many, below which reuse does next to nothing."""
LEAST_STREAMS = 20
RESET_SHARE = 0.05
"""Share of requests, of at least so many, that clients gave up before their end."""
GROWN_BYTES, GROWN_SHARE = 512 * MIB, 0.5
"""Growth of a process since it was ready, in bytes and beside what it had, from which on it is no warming up."""
LOOK_AGAIN_S = 1.0
"""Time after which pages without a sequence are looked at again: what has just ended gives its pages back by then."""
LOG_BYTES = 4 * MIB
"""How much of the end of nginx's log is read."""

_NO_MEMORY = re.compile(r"(?i)out of (?:device )?memory|RESOURCE_EXHAUSTED|cannot allocate memory|MemoryError")


@dataclass(frozen=True, slots=True)
class Sight:
    """What the running appliance shows.

    ``health`` is None where nothing answers and ``samples`` is None where the metrics cannot be read; ``why`` then says
    why. ``samples`` are the metrics by name, and by name and label values, added up.
    """

    url: str
    health: dict[str, Any] | None = None
    samples: Counter[str] | None = None
    why: str = ""
    again: Counter[str] = field(default_factory=Counter[str])


def look(config: ApplianceConfig) -> Sight:
    """Ask the appliance of this configuration; its metrics twice if they have to be compared."""
    url = f"http://{local(config.server.host)}:{config.server.port}"
    key = client_key()
    headers = {"authorization": f"Bearer {key}"} if key else {}
    with httpx.Client(base_url=url, headers=headers, timeout=WAIT_S) as client:
        try:
            health = client.get("/health").json()
            if "free_pages" not in health:
                return Sight(url, why=f"not running: what answers at {url} is something else")
        except (httpx.HTTPError, ValueError):
            return Sight(url, why=f"not running: nothing answers at {url}")
        try:
            reply = client.get("/metrics")
            if reply.status_code in (401, 403):
                why = f"{url}/metrics needs an admin key; put one into ZCCP_API_KEY"
                return Sight(url, health, why=why)
            samples = read_metrics(reply.raise_for_status().text)
            again = samples
            if _idle_pages(samples):
                time.sleep(LOOK_AGAIN_S)
                again = read_metrics(client.get("/metrics").raise_for_status().text)
        except (httpx.HTTPError, ValueError) as error:
            return Sight(url, health, why=f"{url}/metrics cannot be read: {error}")
    return Sight(url, health, samples, again=again)


def read_metrics(text: str) -> "Counter[str]":
    """Every sample of an exposition under its name, added up over labels, and under ``name{value}`` for each label.

    Raises:
        ValueError: it is no exposition.
    """
    found: Counter[str] = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] += sample.value  # pyright: ignore[reportArgumentType] - a Counter adds any number
            for value in sample.labels.values():
                found[f"{sample.name}{{{value}}}"] += sample.value  # pyright: ignore[reportArgumentType]
    return found


def diagnose(config: ApplianceConfig, sight: Sight) -> Iterator[Finding]:
    """One finding for each known failure."""
    yield _service(sight)
    yield _segments(config, sight)
    yield _memory_limit(config, sight)
    yield _hit_rate(sight)
    yield _resets(config, sight)
    yield _growth(sight)
    yield _redis(config)


def _service(sight: Sight) -> Finding:
    if sight.health is None:
        return Finding("service", "not checked", sight.why)
    status, reason = sight.health["status"], sight.health.get("reason", "")
    if status == "ready":
        return Finding("service", "ok", f"{sight.health['model']} is ready at {sight.url}")
    cause = f"it answers at {sight.url} and takes no requests: {status}, {reason or 'without a reason'}"
    return Finding("service", "failed", cause, "wait while it loads; else see its log, which has the whole cause")


def _unseen(name: str, sight: Sight) -> Finding:
    return Finding(name, "not checked", sight.why)


def _segments(config: ApplianceConfig, sight: Sight) -> Finding:
    if sight.samples is None:
        return _unseen("segments", sight)
    total = config.shared_memory.segment_count
    used, refused = sight.samples["zccp_segments_used"], sight.samples["zccp_segments_refused_total"]
    evidence = f"{used:.0f} of {total} segments in use, {refused:.0f} requests found none"
    if used < FULL_SEGMENTS * total and refused <= REFUSED_SHARE * sight.samples["zccp_requests_total"]:
        return Finding("segments", "ok", evidence)
    return Finding(
        "segments",
        "failed",
        f"segments are exhausted: {evidence}",
        "raise shared_memory.segment_count, send fewer requests at a time, or add a node",
    )


def _memory_limit(config: ApplianceConfig, sight: Sight) -> Finding:
    remedy = "lower gpu.memory_limit_mb (on a CPU engine.kv_memory_mb) or engine.slots, and build again"
    said = str(sight.health.get("reason", "")) if sight.health is not None else ""
    if _NO_MEMORY.search(said):
        return Finding("memory", "failed", f"the memory limit is too high: the engine ended: {said}", remedy)
    target, limit = find_target(config.engine.target or DEFAULT_TARGET), config.gpu.memory_limit_mb
    if not target.card:
        return Finding("memory", "ok", "no GPU is used, gpu.memory_limit_mb has no effect")
    usable = target.usable_bytes // MIB
    if limit is not None and limit > usable:
        cause = f"gpu.memory_limit_mb is too high: {limit} MiB, a card of target {target.name} leaves {usable}"
        return Finding("memory", "failed", cause, remedy)
    wanted = limit if limit is not None else usable
    free = _free_mb(config)
    if not free:
        return Finding("memory", "not checked", f"{wanted} MiB wanted; nvidia-smi does not say what is free")
    if sight.health is None and min(free) < wanted:
        cause = f"gpu.memory_limit_mb is too high: {wanted} MiB wanted, {min(free)} MiB free while nothing of ours runs"
        return Finding("memory", "failed", cause, "end what else uses the card, or lower gpu.memory_limit_mb")
    return Finding("memory", "ok", f"{wanted} MiB wanted of each card, {min(free)} MiB free now")


def _free_mb(config: ApplianceConfig) -> list[int]:
    """MiB free on each served card, as its driver says; empty where it cannot be asked."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    first, devices = config.gpu.device_id, config.engine.devices
    command = [program, f"--id={','.join(map(str, range(first, first + devices)))}"]
    command += ["--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    with suppress(OSError, ValueError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)  # noqa: S603 - no input
        return [int(line) for line in done.stdout.split()]
    return []


def _hit_rate(sight: Sight) -> Finding:
    if sight.samples is None:
        return _unseen("reuse", sight)
    cached, computed = sight.samples["zccp_cached_prompt_tokens_total"], sight.samples["zccp_prompt_tokens_total"]
    total = cached + computed
    evidence = f"{cached:.0f} of {total:.0f} prompt ids were reused"
    if total < LEAST_PROMPT_TOKENS or cached >= LOW_HIT_RATE * total:
        return Finding("reuse", "ok", evidence)
    remedy = (
        "put what differs between requests at the end of prompts, name fields that change in cache.csf_mask_patterns,"
        " and send the requests of one tenant to one node"
    )
    return Finding("reuse", "failed", f"the hit rate is low: {evidence}", remedy)


def _resets(config: ApplianceConfig, sight: Sight) -> Finding:
    remedy = (
        "raise the time limits of clients and of what stands between them and nginx, or stream answers, so that a"
        " connection does not rest"
    )
    log = Path(config.proxy.log_directory) / "access.log"
    seen = _http2_of(log) if config.proxy.directory else None
    if seen is not None:
        total, reset = seen
        evidence = f"{reset} of the last {total} requests over HTTP/2 were reset before their end ({log})"
    elif sight.samples is not None:
        name = "zccp_requests_finished_total"
        total, reset = sight.samples[name], sight.samples[f"{name}{{cancelled}}"]
        evidence = f"{reset:.0f} of {total:.0f} requests were given up by their clients"
    else:
        return _unseen("resets", sight)
    if total < LEAST_STREAMS or reset <= RESET_SHARE * total:
        return Finding("resets", "ok", evidence)
    return Finding("resets", "failed", f"clients reset their streams: {evidence}", remedy)


def _http2_of(log: Path) -> tuple[int, int] | None:
    """Requests over HTTP/2 in the end of nginx's log, and how many had no end of their own; None without a log."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - LOG_BYTES))
            text = file.read()
    except OSError:
        return None
    total = reset = 0
    for line in text.splitlines():
        with suppress(ValueError, AttributeError):
            entry = json.loads(line)
            is_http2 = entry.get("protocol") == "HTTP/2.0"
            total += is_http2
            reset += is_http2 and entry.get("completed") != "OK"
    return total, reset


def _idle_pages(samples: "Counter[str]") -> float:
    """Pages in use although no sequence runs or waits."""
    busy = samples["zccp_requests_running"] or samples["zccp_requests_waiting"]
    return 0 if busy else samples["zccp_kv_pages_used"]


def _growth(sight: Sight) -> Finding:
    if sight.samples is None:
        return _unseen("growth", sight)
    samples = sight.samples
    used, total = samples["zccp_kv_pages_used"], samples["zccp_kv_pages_total"]
    if _idle_pages(samples) and _idle_pages(sight.again):
        cause = f"device memory leaks: {used:.0f} of {total:.0f} pages in use and no sequence runs or waits"
        return Finding("growth", "failed", cause, "restart the engine's process, and report it with the log")
    parts = [f"{used:.0f} of {total:.0f} pages for {samples['zccp_requests_running']:.0f} running sequences"]
    grown: list[str] = []
    for process in ("engine", "workers"):
        now = samples[f"zccp_resident_bytes{{{process}}}"]
        then = samples[f"zccp_resident_bytes_when_ready{{{process}}}"]
        parts.append(f"{process} {now / MIB:.0f} MiB, {then / MIB:.0f} when ready")
        if then and now - then > max(GROWN_BYTES, GROWN_SHARE * then):
            grown.append(process)
    if not grown:
        return Finding("growth", "ok", "; ".join(parts))
    cause = f"memory of the host grows ({', '.join(grown)}): {'; '.join(parts)}"
    remedy = "lower cache.known_ids_mb and server.max_body_mb if it is the workers, and reload; else report it"
    return Finding("growth", "failed", cause, remedy)


def _redis(config: ApplianceConfig) -> Finding:
    cache = config.cache
    if not cache.redis_url:
        return Finding("redis", "ok", "no Redis: cache.redis_url is empty")
    try:
        with closing(connect(cache.redis_url, WAIT_S, cluster=cache.redis_cluster)) as client:
            client.ping()
    except (redis.RedisError, ValueError) as error:
        cause = f"Redis cannot be reached: {type(error).__name__}: {without_secrets(str(error))}"
        return Finding("redis", "failed", cause, "start it, or correct cache.redis_url")
    return Finding("redis", "ok", "Redis answers at cache.redis_url")
