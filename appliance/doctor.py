"""Checks of an installation, each one line: what was looked at, what was found, what to do.

Owns the list of checks of what is installed; the known failures of what runs are in ``appliance.diagnosis``. Reads the
host, the configuration and the stores; changes nothing. What it cannot judge in this version is listed as not checked
rather than left out.
"""

import errno
import platform
import sys
from collections.abc import Callable
from importlib import metadata

from appliance.config import ApplianceConfig
from appliance.config_rules import host_problems
from appliance.findings import Finding
from appliance.keys import KeyFileError, read
from pallas_kernels.kv_layout import BASE_BITS

NOT_CHECKED = (("gpu", "drivers and clocks of GPUs"),)


Check = Callable[[ApplianceConfig], Finding]


def examine(config: ApplianceConfig) -> list[Finding]:
    """Run every check; one that breaks is a failed one."""
    findings = [Finding("config", "ok", f"home {config.home}, run {config.run}")]
    for name, check in _CHECKS:
        try:
            findings.append(check(config))
        except Exception as error:  # noqa: BLE001 - a check that cannot run is a finding, not the end
            findings.append(Finding(name, "failed", str(error) or type(error).__name__, "see the message"))
    findings += _failures(config)
    findings += [Finding(name, "not checked", f"{what}: not in this version") for name, what in NOT_CHECKED]
    return findings


def _failures(config: ApplianceConfig) -> list[Finding]:
    """The known failures of an appliance that serves."""
    from appliance.diagnosis import diagnose, look  # noqa: PLC0415 - reads httpx and redis

    try:
        return list(diagnose(config, look(config)))
    except Exception as error:  # noqa: BLE001 - as with the other checks
        return [Finding("service", "failed", str(error) or type(error).__name__, "see the message")]


def _python(_: ApplianceConfig) -> Finding:
    found = platform.python_version()
    right = sys.version_info >= (3, 11)
    return Finding("python", "ok" if right else "failed", f"Python {found}", "" if right else "install Python 3.11")


def _packages(_: ApplianceConfig) -> Finding:
    versions = {name: metadata.version(name) for name in ("jax", "jaxlib", "litestar", "granian", "tokenizers")}
    evidence = ", ".join(f"{name} {version}" for name, version in versions.items())
    if versions["jax"] != versions["jaxlib"]:
        return Finding("packages", "failed", evidence, "install jax and jaxlib of one version")
    return Finding("packages", "ok", evidence)


def _cpu(_: ApplianceConfig) -> Finding:
    from pallas_kernels.platform import cpu_features, cpu_model  # noqa: PLC0415 - only here

    features = set(cpu_features())
    fast = [name for name in ("avx2", "avx512f", "avx512_vnni", "amx_int8", "asimd", "i8mm") if name in features]
    evidence = f"{cpu_model()}; {', '.join(fast) or 'none of the instruction sets that programs use well'}"
    return Finding("cpu", "ok" if fast else "failed", evidence, "" if fast else "use a CPU with AVX2 or newer")


def _host(config: ApplianceConfig) -> Finding:
    problems = host_problems(config, keys_present=config.keys_file.exists())
    if problems:
        return Finding("host", "failed", problems[0], "; ".join(problems[1:]) or "see the message")
    return Finding("host", "ok", f"{config.num_segments} segments, {config.segment_bytes >> 20} MiB of memory, fit")


def _port(config: ApplianceConfig) -> Finding:
    from appliance.proxy_probe import is_live, local  # noqa: PLC0415 - reads httpx
    from appliance.reservation import StartError, reserve_port  # noqa: PLC0415 - only here

    try:
        reserve_port(config.server.host, config.server.port).close()
    except StartError as error:
        url = f"http://{local(config.server.host)}:{config.server.port}"
        if getattr(error.__cause__, "errno", 0) == errno.EADDRINUSE and is_live(url):
            return Finding("port", "ok", f"an appliance answers at {url}")
        cause, _, remedy = str(error).partition("; ")
        return Finding("port", "failed", cause, remedy)
    return Finding("port", "ok", f"{config.server.host} port {config.server.port} is free")


def _numa(config: ApplianceConfig) -> Finding:
    from appliance.lifecycle import place_near_gpu  # noqa: PLC0415 - only here

    placement = place_near_gpu(config)
    if placement.faults:
        causes, remedies = zip(*placement.faults, strict=True)
        evidence = "; ".join(part for part in (placement.evidence, *causes) if part)
        return Finding("numa", "failed", evidence, "; ".join(remedies))
    return Finding("numa", "ok", placement.evidence)


def _keys(config: ApplianceConfig) -> Finding:
    path = config.keys_file
    if not path.exists():
        return Finding("keys", "ok", f"no keys file {path}: requests from this machine need no key")
    try:
        keys = read(path).keys
    except KeyFileError as error:
        return Finding("keys", "failed", str(error), "restore the file or move it away")
    if path.stat().st_mode & 0o077:
        return Finding("keys", "failed", f"others can read {path}", f"chmod 600 {path}")
    return Finding("keys", "ok", f"{len(keys)} keys in {path}")


def _proxy(config: ApplianceConfig) -> Finding:
    from appliance.handoff import HandoffDirectoryError  # noqa: PLC0415 - only here
    from appliance.proxy_probe import ProxyProbeError, probe  # noqa: PLC0415 - reads httpx

    if not config.proxy.directory:
        return Finding("proxy", "ok", "no nginx in front: proxy.directory is empty")
    try:
        evidence = probe(config)
    except (HandoffDirectoryError, ProxyProbeError) as error:
        cause, _, remedy = str(error).partition("; ")
        return Finding("proxy", "failed", cause, remedy)
    if evidence is None:
        return Finding("proxy", "not checked", f"no worker listens in {config.proxy.directory}: start the appliance")
    return Finding("proxy", "ok", evidence)


def _model(config: ApplianceConfig) -> Finding:
    from appliance.model.energy import read_energy  # noqa: PLC0415 - reads jax
    from appliance.model.library import ModelLibrary  # noqa: PLC0415 - reads numpy
    from appliance.model.record import read_record, weights_folder  # noqa: PLC0415 - reads numpy
    from appliance.model.store import StoreError, check_weights  # noqa: PLC0415 - reads jax
    from appliance.planning import plan_for  # noqa: PLC0415 - reads numpy
    from appliance.release import adopt  # noqa: PLC0415 - reads cryptography
    from planner.kv import energy_shape  # noqa: PLC0415 - only here

    reference = config.model.reference
    folder = ModelLibrary(config.home).folder(reference)
    if not (folder / "model.json").is_file():
        return Finding("model", "failed", f"{reference} is not in {folder.parent}", f"zccp models pull {reference}")
    record = read_record(folder)
    plan = plan_for(adopt(config), record)
    form = plan.weight_form
    if not weights_folder(folder, form).is_dir():
        return Finding("model", "failed", f"{record.name} has no {form} weights", f"zccp convert {reference}")
    try:
        check_weights(weights_folder(folder, form))
        if plan.kv_format in BASE_BITS:
            read_energy(folder, energy_shape(plan.architecture))
    except StoreError as error:
        cause, _, remedy = str(error).rpartition("; ")
        return Finding("model", "failed", cause, remedy)
    return Finding("model", "ok", f"{record.name}, {form} weights, in {folder}")


def _programs(config: ApplianceConfig) -> Finding:
    from appliance.model.library import ModelLibrary  # noqa: PLC0415 - reads numpy
    from appliance.model.record import read_record  # noqa: PLC0415 - reads numpy
    from appliance.planning import signing_key_file  # noqa: PLC0415 - reads numpy
    from appliance.release import adopt, programs_of  # noqa: PLC0415 - reads cryptography
    from planner.store import StoreError, open_store  # noqa: PLC0415 - reads jax

    folder = ModelLibrary(config.home).folder(config.model.reference)
    built = bool(config.programs.directory) or signing_key_file(config.home).is_file()
    if not (folder / "model.json").is_file() or not built:
        return Finding("programs", "failed", "no programs have been built", "zccp build")
    plan, directory, key = programs_of(adopt(config), folder, read_record(folder))
    try:
        store = open_store(directory, plan, key)
        store.verify()
    except StoreError as error:
        return Finding("programs", "failed", str(error), "zccp build")
    return Finding("programs", "ok", f"{len(store.entries)} programs for {plan.target} in {directory}")


_CHECKS: tuple[tuple[str, Check], ...] = (
    ("python", _python),
    ("packages", _packages),
    ("cpu", _cpu),
    ("host", _host),
    ("port", _port),
    ("numa", _numa),
    ("keys", _keys),
    ("proxy", _proxy),
    ("model", _model),
    ("programs", _programs),
)
