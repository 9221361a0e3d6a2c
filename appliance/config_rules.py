"""The rules of the configuration: what may stand where, which values go together, and what the host must offer.

Owns the checks and their messages; each names the key, its value, the rule and what to do. Reads parsed data, a
finished configuration, or the host's figures; never the environment and never a file.
"""

import difflib
import ipaddress
import os
import re
from collections.abc import Callable, Mapping
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct, inspect

from appliance.config_cache import cache_problem, without_secrets
from appliance.config_fleet import fleet_problem
from appliance.config_proxy import proxy_problem
from appliance.host.process import most_open_files
from appliance.host.segments import MIN_STRIDE_BYTES, SHARED_MEMORY

if TYPE_CHECKING:
    from appliance.config import ApplianceConfig

_SECRET_OF_URL = re.compile(r"//([^/@]*)@")

MAX_CHOICES = 8
"""Most choices of one request, each of which needs a segment of one worker."""
PROXY_IDLE_CONNECTIONS = 1024
"""Connections that nginx may keep without a request on them, beside those that ``server.max_connections`` allows."""
OWN_FILES = 128
"""Files that a worker has open without any connection, and some to spare."""
MIN_SILENCE_S = 1.0
"""Least silence after which a process may count as hung."""


class ConfigError(ValueError):
    """The configuration breaks rules; ``problems`` has one sentence for each."""

    def __init__(self, problems: list[str]) -> None:
        """Join the problems, one a line."""
        super().__init__("\n".join(problems))
        self.problems = problems


def shape_problems(data: Mapping[str, object], wanted: type[Struct]) -> list[str]:
    """What is wrong with the names, types and ranges of parsed data, with the path of each."""
    info = inspect.type_info(wanted)
    return list(_check_value(data, info, ""))


def rule_problems(config: "ApplianceConfig") -> list[str]:
    """Which rules between values are broken, and single values whose rule is more than a range."""
    return [problem for rule in _RULES if (problem := rule(config)) is not None]


def host_problems(
    config: "ApplianceConfig",
    *,
    keys_present: bool,
    free_bytes: Callable[[Path], int] | None = None,
    most_files: Callable[[], int] = most_open_files,
    memory_bytes: Callable[[], int] | None = None,
) -> list[str]:
    """What this host does not offer or must not do with this configuration.

    Args:
        config: a checked configuration.
        keys_present: whether a file of keys exists.
        free_bytes: free space of a file system; the default asks the system.
        most_files: files that a worker may have open at most; the default asks the system.
        memory_bytes: memory of the host; the default asks the system.
    """
    problems: list[str] = []
    memory = config.shared_memory
    wanted = config.segment_bytes
    free = (free_bytes or _free_bytes)(SHARED_MEMORY)
    if wanted > free:
        problems.append(
            f"shared_memory: {memory.segment_count} segments of {memory.segment_size_kb} KiB, and a spare share of"
            f" {config.num_segments - memory.segment_count} for reloads, need {wanted >> 20} MiB"
            f" and {SHARED_MEMORY} has {free >> 20} MiB free; lower segment_count or enlarge the file system"
        )
    files, most = open_files(config), most_files()
    if files > most:
        problems.append(
            f"server.max_connections {config.server.max_connections} needs {files} open files in a worker and the"
            f" system allows {most}; raise the hard limit (LimitNOFILE= of the service, or ulimit -Hn), or lower it"
        )
    tier, there = int(config.cache.host_tier_mb), (memory_bytes or _memory_bytes)() >> 20
    if tier >= there:
        problems.append(
            f"cache.host_tier_mb {tier} is not below the {there} MiB of memory that this host has; lower it, and leave"
            " room for the appliance itself"
        )
    hosts = {"server.host": config.server.host} | ({"proxy.host": config.proxy.host} if config.proxy.directory else {})
    reachable = next((key for key, host in hosts.items() if not is_loopback(host)), None)
    if reachable and not keys_present and not config.auth.allow_unauthenticated_non_loopback:
        problems.append(
            f"{reachable} {hosts[reachable]} is reachable from other machines and there is no API key in"
            f" {config.keys_file}; make one with `zccp keys add`, listen on 127.0.0.1, or set"
            " auth.allow_unauthenticated_non_loopback: true"
        )
    if config.telemetry.otlp_endpoint and not _is_installed("opentelemetry.exporter.otlp.proto.http"):
        problems.append(
            "telemetry.otlp_endpoint needs the packages of the extra otlp: install them with pip install 'zccp[otlp]',"
            " or leave the endpoint out"
        )
    return problems


def open_files(config: "ApplianceConfig") -> int:
    """Files that a worker may come to hold open: connections, nginx's too with a body each, and what it has anyway."""
    server = config.server
    through_nginx = 2 * server.max_connections + PROXY_IDLE_CONNECTIONS if config.proxy.directory else 0
    return OWN_FILES + max(1, server.max_connections // server.workers) + through_nginx


def _is_installed(package: str) -> bool:
    try:
        return util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def is_loopback(host: str) -> bool:
    """Whether an address or the name localhost can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _free_bytes(path: Path) -> int:
    figures = os.statvfs(path)
    return figures.f_bavail * figures.f_frsize


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _check_value(value: object, info: inspect.Type, path: str) -> list[str]:
    match info:
        case inspect.Metadata(type=inner):
            return _check_value(value, inner, path)
        case inspect.UnionType(types=types):
            inner = next(kind for kind in types if not isinstance(kind, inspect.NoneType))
            return [] if value is None else _check_value(value, inner, path)
        case inspect.StructType():
            return _check_struct(value, info, path)
        case inspect.VarTupleType() | inspect.DictType():
            return _check_collection(value, info, path)
        case _:
            problem = _scalar_problem(value, info, path)
            return [] if problem is None else [problem]


def _check_collection(value: object, info: "inspect.VarTupleType | inspect.DictType", path: str) -> list[str]:
    if isinstance(info, inspect.DictType):
        if not isinstance(value, Mapping):
            return [_wrong_type(path, value, "a mapping")]
        problems = [f"{path} has the key {key!r}; it must be text" for key in value if not isinstance(key, str)]
        return problems + [
            p for key, item in value.items() for p in _check_value(item, info.value_type, f"{path}.{key}")
        ]
    if not isinstance(value, list | tuple):
        return [_wrong_type(path, value, "a list")]
    return [p for place, item in enumerate(value) for p in _check_value(item, info.item_type, f"{path}[{place}]")]


def _scalar_problem(value: object, info: inspect.Type, path: str) -> str | None:
    match info:
        case inspect.IntType() | inspect.FloatType():
            return _number_problem(value, info, path)
        case inspect.LiteralType(values=values):
            right = any(value == choice and type(value) is type(choice) for choice in values)
            return None if right else f"{path} is {value!r}; it must be one of {', '.join(map(str, values))}"
        case inspect.BoolType():
            return None if isinstance(value, bool) else _wrong_type(path, value, "true or false")
        case _:
            return None if isinstance(value, str) else _wrong_type(path, value, "text")


def _check_struct(value: object, info: inspect.StructType, path: str) -> list[str]:
    if value is None and path:
        return []  # a section whose keys are all commented out
    if not isinstance(value, Mapping):
        return [_wrong_type(path, value, "a mapping of keys")]
    fields = {field.encode_name: field.type for field in info.fields}
    problems: list[str] = []
    for key, item in value.items():
        place = f"{path}.{key}" if path else str(key)
        if key in fields:
            problems += _check_value(item, fields[key], place)
        else:
            close = difflib.get_close_matches(str(key), fields, 1)
            hint = f"did you mean {close[0]}?" if close else f"known keys: {', '.join(fields)}"
            problems.append(f"{place} is not a key of the configuration; {hint}")
    return problems


def _number_problem(value: object, info: "inspect.IntType | inspect.FloatType", path: str) -> str | None:
    whole = isinstance(info, inspect.IntType)
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        return _wrong_type(path, value, "a whole number" if whole else "a number")
    low, high = info.ge, info.le
    if (low is not None and not value >= low) or (high is not None and not value <= high):
        return f"{path} is {value}; it must be between {_bound(low)} and {_bound(high)}"
    return None


def _bound(value: float | None) -> str:
    """A bound in full, without the exponent or the fraction that a whole number needs not."""
    return str(int(value)) if value is not None and value == int(value) else str(value)


def _wrong_type(path: str, value: object, wanted: str) -> str:
    place = path or "the configuration"
    return f"{place} is {value!r} ({type(value).__name__}); it must be {wanted}"


def _segment_size(config: "ApplianceConfig") -> str | None:
    size_kb = config.shared_memory.segment_size_kb
    least_kb = MIN_STRIDE_BYTES // 1024
    if size_kb % 4 or size_kb < least_kb:
        return (
            f"shared_memory.segment_size_kb is {size_kb}; it must be a multiple of 4 and at least {least_kb},"
            " which holds the longest context of 131072 ids"
        )
    return None


def _segments_per_worker(config: "ApplianceConfig") -> str | None:
    count, workers = config.shared_memory.segment_count, config.server.workers
    if count // workers < MAX_CHOICES:
        return (
            f"shared_memory.segment_count {count} leaves {count // workers} segments to each of server.workers"
            f" {workers}; a request with {MAX_CHOICES} choices needs {MAX_CHOICES}: raise the one or lower the other"
        )
    return None


def _page_size(config: "ApplianceConfig") -> str | None:
    own, documented = config.engine.page_size, config.gpu.paged_attention_page_size
    if documented is not None and documented % 4:
        return f"gpu.paged_attention_page_size is {documented} bytes; it must be a multiple of 4, the bytes of one id"
    if own is not None and documented is not None and own * 4 != documented:
        return (
            f"engine.page_size {own} and gpu.paged_attention_page_size {documented} bytes (= {documented // 4} tokens)"
            " differ; give one of them"
        )
    size = config.page_size
    if size is not None and size & (size - 1):
        return f"engine.page_size is {size}; it must be a power of two between 16 and 512"
    if size is not None and config.engine.kv_format in ("bmq4", "bmq2") and size % 128:
        return f"engine.page_size is {size}; kv_format {config.engine.kv_format} needs a multiple of 128"
    return None


def _prefill_chunk(config: "ApplianceConfig") -> str | None:
    chunk = config.engine.prefill_chunk
    if chunk is not None and chunk % 16:
        return f"engine.prefill_chunk is {chunk}; it must be a multiple of 16, the alignment of chunk starts"
    return None


def _timeouts(config: "ApplianceConfig") -> str | None:
    given = {
        "engine.step_timeout_s": config.engine.step_timeout_s,
        "server.worker_timeout_s": config.server.worker_timeout_s,
    }
    for key, timeout_s in given.items():
        if 0 < timeout_s < MIN_SILENCE_S:
            return (
                f"{key} is {timeout_s:g}; it must be 0 or at least {MIN_SILENCE_S:g}, since a healthy process gives a"
                " sign of life about twice a second"
            )
    return None


def _log_prompts(config: "ApplianceConfig") -> str | None:
    if config.log.log_prompts:
        return "log.log_prompts is true; prompts are never logged, so only false is accepted"
    return None


def _fleet(config: "ApplianceConfig") -> str | None:
    return fleet_problem(config.fleet)


def _cache(config: "ApplianceConfig") -> str | None:
    return cache_problem(config.cache)


def _host(config: "ApplianceConfig") -> str | None:
    host = config.server.host
    if not host or any(character.isspace() or character in "/[]" for character in host):
        return f"server.host is {host!r}; it must be an address or a host name, without scheme, port or brackets"
    return None


def _reference(config: "ApplianceConfig") -> str | None:
    if not config.model.reference:
        return "model.reference is empty; it must be a catalogue name, a path or hf:org/name"
    return None


def _collector(config: "ApplianceConfig") -> str | None:
    endpoint = config.telemetry.otlp_endpoint
    if not endpoint or _is_collector(endpoint):
        return None
    return (
        f"telemetry.otlp_endpoint is {_SECRET_OF_URL.sub('//***@', endpoint)!r}; it must be the address of a collector"
        " without user or password, as http://localhost:4318/v1/traces"
    )


def _is_collector(endpoint: str) -> bool:
    try:
        parts = urlsplit(endpoint)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and not parts.username
    except ValueError:
        return False


def _paths(config: "ApplianceConfig") -> str | None:
    places = {"paths.home": config.home, "paths.run": config.run, "auth.keys_file": config.keys_file}
    for key, place in places.items():
        if "\0" in str(place):
            return f"{key} is {str(place)!r}; a path has no NUL character"
    return None


def _aliases(config: "ApplianceConfig") -> str | None:
    for alias, target in config.model.aliases.items():
        if not alias or alias == config.model.name:
            return f"model.aliases names {alias!r}, which is empty or the model's own name; remove it"
        if not target:
            return f"model.aliases.{alias} is empty; it must name the served model"
    return None


def _origins(config: "ApplianceConfig") -> str | None:
    for origin in config.server.cors_origins:
        try:
            parts = urlsplit(origin)
            right = parts.scheme in ("http", "https") and bool(parts.netloc) and not parts.path
        except ValueError:
            right = False
        if origin != "*" and not right:
            return f"server.cors_origins has {origin!r}; an origin is * or http(s)://host[:port] without a path"
    return None


def _proxy(config: "ApplianceConfig") -> str | None:
    proxy, server = config.proxy, config.server
    problem = proxy_problem(proxy, server.workers)
    if problem is not None or not (proxy.directory or config.fleet.nodes):
        return problem
    if not proxy.certificate and not is_loopback(proxy.host):
        return (
            f"proxy.host {proxy.host} is reachable from other machines and there is no certificate; set"
            " proxy.certificate and proxy.certificate_key, or listen on 127.0.0.1"
        )
    if proxy.directory and (proxy.host, proxy.port) == (server.host, server.port):
        return f"proxy.port and server.port are both {server.port} on {server.host}; nginx needs one of its own"
    return None


_RULES: tuple[Callable[["ApplianceConfig"], str | None], ...] = (
    _host, _origins, _segment_size, _segments_per_worker, _page_size, _prefill_chunk, _timeouts, _cache,
    _reference, _aliases, _log_prompts, _paths, _collector, _proxy, _fleet,
)  # fmt: skip


def plain(config: "ApplianceConfig") -> dict[str, object]:
    """The configuration as plain data with the password of the Redis URL hidden."""
    data: dict[str, dict[str, object]] = msgspec.to_builtins(config)
    data["cache"]["redis_url"] = without_secrets(config.cache.redis_url)
    return dict(data)
