"""What a reload of the configuration changes: which settings take effect while the appliance serves, and which wait.

Owns that division and what is checked before anything changes. A setting that is not named here needs a restart, so
that a new one is never half applied. Touches no process and no socket; never imports jax.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from appliance.config import ApplianceConfig
from appliance.config_rules import host_problems, rule_problems

APPLIED = frozenset(
    {
        "server.max_connections",
        "server.max_body_mb",
        "server.keepalive_s",
        "server.write_timeout_s",
        "server.drain_s",
        "server.cors_origins",
        "server.request_timeout_s",
        "server.worker_timeout_s",
        "server.http2",
        "proxy.host",
        "proxy.port",
        "proxy.certificate",
        "proxy.certificate_key",
        "proxy.hsts_s",
        "proxy.metrics_from",
        "proxy.log_directory",
        "cache.answers_mb",
        "cache.answers_ttl_s",
        "cache.known_ids_mb",
        "shared_memory.cleanup_interval_ms",
        "model.name",
        "model.aliases",
        "engine.step_timeout_s",
        "auth.keys_file",
        "auth.allow_unauthenticated_non_loopback",
        "log.level",
        "telemetry.otlp_endpoint",
        "telemetry.trace_sample_ratio",
        "telemetry.slow_request_s",
    }
)
"""What a reload applies: what workers and the main process do by themselves. Of ``proxy`` it is what nginx does, which
the appliance only prints. ``log.level`` of the engine waits for its next start."""


class ReloadRefusedError(RuntimeError):
    """The configuration is not what it has to be; the message names every broken rule."""


@dataclass(frozen=True, slots=True)
class Change:
    """The configuration after a reload, the settings that it changes, those that wait for a restart, and nginx's."""

    config: ApplianceConfig
    applied: tuple[str, ...]
    waiting: tuple[str, ...]
    changes_nginx: bool


def accept(running: ApplianceConfig, reread: Callable[[], ApplianceConfig]) -> Change:
    """Read the configuration again and check what would serve after a reload.

    Raises:
        ReloadRefusedError: it cannot be read, or it or its mixture with what goes on breaks a rule.
    """
    try:
        change = merge(running, reread())
        config = change.config
        problems = rule_problems(config) or host_problems(
            config,
            keys_present=config.keys_file.exists(),
            free_bytes=lambda _: config.segment_bytes,  # the segments are there
        )
    except Exception as error:
        raise ReloadRefusedError(str(error) or type(error).__name__) from error
    if problems:
        raise ReloadRefusedError("; ".join(problems))
    return change


def merge(running: ApplianceConfig, fresh: ApplianceConfig) -> Change:
    """Put what a reload applies of ``fresh`` into ``running``.

    A file of keys that only follows ``paths.home`` stays where it is with the rest of the state.
    """
    applied: list[str] = []
    waiting: list[str] = []
    moved = fresh.home != running.home and fresh.keys_file == fresh.home / "keys.json"
    sections: dict[str, msgspec.Struct] = {}
    for section, old, new in _sections(running, fresh):
        taken: dict[str, object] = {}
        for key in old.__struct_fields__:
            if getattr(old, key) == getattr(new, key):
                continue
            name = f"{section}.{key}"
            if name == "auth.keys_file" and moved:
                continue
            (applied if name in APPLIED else waiting).append(name)
            if name in APPLIED:
                taken[key] = getattr(new, key)
        sections[section] = msgspec.structs.replace(old, **taken)
    config = msgspec.structs.replace(running, **sections)
    return Change(config, tuple(applied), tuple(waiting), _differs_for_nginx(running, config))


def _differs_for_nginx(one: ApplianceConfig, other: ApplianceConfig) -> bool:
    if not one.proxy.directory:
        return False
    from appliance.nginx import nginx_config  # noqa: PLC0415 - loads litestar, which the main process does not need

    return nginx_config(one) != nginx_config(other)


def _sections(one: ApplianceConfig, other: ApplianceConfig) -> Iterator[tuple[str, msgspec.Struct, msgspec.Struct]]:
    for section in one.__struct_fields__:
        yield section, getattr(one, section), getattr(other, section)
