"""Target: the device that programs are compiled for. Reads the JSON files of ``planner.targets``; never imports jax."""

import json
from dataclasses import dataclass
from importlib import resources


class UnknownTargetError(ValueError):
    """No target of that name; the message lists those there are."""


class TargetHostError(ValueError):
    """This process would compile other instruction sets than the target's; the message says how to start it."""


@dataclass(frozen=True, slots=True)
class Target:
    """One kind of device.

    ``features`` are the instruction sets that a CPU program may use; empty means those of the building host, which then
    become part of every program's key. ``max_isa`` caps what XLA generates (its ``xla_cpu_max_isa`` option).
    """

    name: str
    platform: str
    description: str
    max_isa: str = ""
    features: tuple[str, ...] = ()


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
    features: tuple[str, ...] = tuple(data.pop("features", ()))
    return Target(name=name, features=features, **data)
