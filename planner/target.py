"""Target: the device that programs are compiled for. Reads the JSON files of ``planner.targets``; never imports jax."""

import json
from dataclasses import dataclass
from importlib import resources

DEFAULT_TARGET = "cpu_native"
"""The host that serves, where none is named."""


class UnknownTargetError(ValueError):
    """No target of that name; the message lists those there are."""


class TargetHostError(ValueError):
    """This process would compile other instruction sets than the target's; the message says how to start it."""


@dataclass(frozen=True, slots=True)
class Target:
    """One kind of device, and the hosts that carry it.

    Of CPUs: ``features`` are the instruction sets that a program may use; empty means those of the building host, which
    then become part of every program's key. ``max_isa`` caps what XLA generates (its ``xla_cpu_max_isa`` option).

    Of GPUs: ``card`` names the description for the compiler in ``pallas_kernels.cards``. ``usable_bytes`` of its memory
    are left to programs. ``bf16_flops`` are those of dense products a second. ``link_bytes_per_second`` is what a
    device sends to the others of its host, ``host_bytes_per_second`` what it exchanges with the host, each in one
    direction. A host has at most ``max_devices``, of which ``devices_per_socket`` are near each CPU socket. ``sources``
    say where the numbers come from.
    """

    name: str
    platform: str
    description: str
    max_isa: str = ""
    features: tuple[str, ...] = ()
    card: str = ""
    usable_bytes: int = 0
    memory_bytes_per_second: int = 0
    bf16_flops: int = 0
    link_bytes_per_second: int = 0
    host_bytes_per_second: int = 0
    max_devices: int = 8
    devices_per_socket: int = 0
    sources: tuple[str, ...] = ()


def target_names() -> tuple[str, ...]:
    """All targets, sorted."""
    files = resources.files("planner.targets").iterdir()
    return tuple(sorted(file.name.removesuffix(".json") for file in files if file.name.endswith(".json")))


def find_target(name: str) -> Target:
    """The target of that name.

    Raises:
        UnknownTargetError: there is none.
    """
    if name not in target_names():
        raise UnknownTargetError(f"target {name!r} is unknown; targets: {', '.join(target_names())}")
    data = json.loads(resources.files("planner.targets").joinpath(f"{name}.json").read_text())
    lists: dict[str, tuple[str, ...]] = {key: tuple(data.pop(key, ())) for key in ("features", "sources")}
    return Target(name=name, **lists, **data)
