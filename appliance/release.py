"""Release: a folder of program stores that another host built, one for each format of keys and values.

Owns which of them a node takes, and the settings that come with it: what the configuration leaves open is as the
programs were built. Reads manifests before their signatures are checked, for settings only; whoever loads programs
checks them. Never imports jax.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from appliance.config import ApplianceConfig
from appliance.config_rules import ConfigError
from appliance.model.record import ModelRecord
from appliance.planning import choose, plan_for, signing_key_file, store_directory
from planner.formats import KvFormat
from planner.plan import Plan
from planner.signing import MANIFEST, SigningKeyError, local_key, public_key

PUBLIC_KEY = "public-key.pem"
"""The public half of the key that signed a release, for whoever configures nodes."""


class ReleaseError(ValueError):
    """A folder holds no programs that this configuration can take; the message says what is there."""


def plans_in(directory: Path) -> dict[KvFormat, Plan]:
    """The plan of each store in a release; nothing in it is trusted yet.

    Raises:
        ReleaseError: there is none, or one is damaged.
    """
    found: dict[KvFormat, Plan] = {}
    for kv_format in KvFormat:
        file = directory / kv_format / MANIFEST
        if not file.is_file():
            continue
        try:
            found[kv_format] = Plan.from_json(json.loads(file.read_bytes())["plan"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ReleaseError(
                f"{file} is no manifest of a program store ({error}); build the release again"
            ) from error
    if not found:
        raise ReleaseError(
            f"{directory} holds no programs; build some with: zccp build --architecture NAME --target NAME --out "
            f"{directory}"
        )
    return found


def adopt(config: ApplianceConfig) -> ApplianceConfig:
    """The configuration with everything that it leaves open as the programs of ``programs.directory`` were built.

    Without such a directory it stays as it is.

    Raises:
        ReleaseError: the release has no programs in the format that the configuration names.
        ConfigError: a setting says otherwise than the programs.
        PlanError: ``engine.kv_format: auto`` finds none that holds the longest context.
    """
    if not config.programs.directory:
        return config
    directory, engine = Path(config.programs.directory), config.engine
    plan = _chosen(plans_in(directory), directory, engine.kv_format)
    built: Mapping[str, object] = {
        "target": plan.target,
        "context": plan.context,
        "slots": plan.slots,
        "prefill_chunk": plan.prefill_budget,
        "prefill_rows": plan.lattice.prefill_slots,
        "page_size": plan.page_size,
        "kv_format": str(plan.kv_format),
        "weight_form": str(plan.weight_form),
        "implementation": plan.implementation,
        "devices": plan.devices,
        "context_devices": plan.context_devices,
    }
    given = {**msgspec.structs.asdict(engine), "page_size": config.page_size}
    if engine.kv_format == "auto":
        given["kv_format"] = None
    defaults = msgspec.structs.asdict(type(engine)())
    problems = [
        f"engine.{name} is {given[name]}, and the programs in {directory} were built with {value}; leave it out "
        "or build them again"
        for name, value in built.items()
        if given[name] not in (defaults[name], value)
    ]
    if problems:
        raise ConfigError(problems)
    if config.gpu.paged_attention_page_size is not None:
        built = {name: value for name, value in built.items() if name != "page_size"}
    return msgspec.structs.replace(config, engine=msgspec.structs.replace(engine, **built))


def _chosen(plans: Mapping[KvFormat, Plan], directory: Path, named: str | None) -> Plan:
    if named == "auto":
        return choose(list(plans.values()))
    if named is None:
        return next(iter(plans.values()))  # formats are in order of their bits, the most first
    if named not in plans:
        raise ReleaseError(
            f"{directory} has programs for {', '.join(plans)} and none for engine.kv_format {named}: choose one of "
            "these or build it"
        )
    return plans[KvFormat(named)]


def programs_of(config: ApplianceConfig, folder: Path, record: ModelRecord) -> tuple[Plan, Path, Ed25519PublicKey]:
    """The plan to serve, where its programs lie, and the key that must have signed them.

    Args:
        config: what ``adopt`` gave.
        folder: of the model.
        record: of the model.

    Raises:
        PlanError: the settings cannot be planned.
        ReleaseError: the release is damaged.
        SigningKeyError: a key cannot be read.
    """
    plan = plan_for(config, record)
    if not config.programs.directory:
        return plan, store_directory(config.home, folder, plan), _own_key(config)
    directory = Path(config.programs.directory)
    if config.engine.kv_memory_mb is None:
        # how many pages a host leaves room for is the one number that may differ between equal settings
        plan = replace(plan, num_pages=plans_in(directory)[plan.kv_format].num_pages)
    return plan, directory / plan.kv_format, _trusted(config)


def _own_key(config: ApplianceConfig) -> Ed25519PublicKey:
    return local_key(signing_key_file(config.home)).public_key()


def _trusted(config: ApplianceConfig) -> Ed25519PublicKey:
    if not config.programs.public_key:
        return _own_key(config)
    file = Path(config.programs.public_key)
    try:
        return public_key(file.read_bytes())
    except OSError as error:
        raise SigningKeyError(f"programs.public_key {file} cannot be read: {error.strerror}") from error
