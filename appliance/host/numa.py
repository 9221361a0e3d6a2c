"""Which CPUs are near which GPUs, and the placement of the appliance's processes that follows.

Owns the reading of the kernel's own description (sysfs, /proc/irq) and the choice of CPUs. Reads files under a root
that is an argument; changes nothing but the calling process's CPU mask. Never imports jax.
Source: the kernel's ABI documents of sysfs-devices-node, sysfs-bus-pci and /proc/irq.
"""

import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

NVIDIA = "0x10de"
_DISPLAYS = ("0x0300", "0x0302")
"""Beginnings of the PCI classes of GPUs: with a display, and for computing alone."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU on the PCI bus; ``node`` is -1 where the kernel does not know it. ``irqs``: interrupt -> its CPUs."""

    address: str
    node: int
    irqs: dict[int, frozenset[int]]


@dataclass(frozen=True, slots=True)
class Topology:
    """A host: the CPUs of every NUMA node, and its GPUs in the order of addresses, which is that of CUDA's ids."""

    nodes: dict[int, frozenset[int]]
    gpus: tuple[Gpu, ...]


@dataclass(frozen=True, slots=True)
class Placement:
    """The CPUs that all processes keep to, and why; ``cpus`` is empty where they stay as they are.

    ``faults`` are what keeps memory and interrupts from the GPUs' own node, each with its remedy.
    """

    cpus: frozenset[int]
    evidence: str
    faults: tuple[tuple[str, str], ...] = ()


def read_topology(root: Path = Path("/")) -> Topology:
    """The host as the kernel describes it under ``root``; empty where it does not."""
    nodes = {
        int(folder.name.removeprefix("node")): cpus_of((folder / "cpulist").read_text())
        for folder in (root / "sys/devices/system/node").glob("node[0-9]*")
    }
    devices = sorted((root / "sys/bus/pci/devices").glob("*"), key=lambda device: device.name)
    gpus = tuple(_gpu(root, device) for device in devices if _is_gpu(device))
    return Topology(dict(sorted(nodes.items())), gpus)


def choose(topology: Topology, devices: Sequence[int], allowed: Collection[int]) -> Placement:
    """Where the processes of an appliance with these GPUs belong.

    Args:
        topology: of the host.
        devices: places of its GPUs in ``topology.gpus``; none for a CPU.
        allowed: CPUs that this process may use.
    """
    own = frozenset(allowed)
    if not devices:
        return Placement(frozenset(), f"no GPU to be near; {len(topology.nodes)} NUMA nodes, {len(own)} CPUs")
    missing = [index for index in devices if index >= len(topology.gpus)]
    if missing:
        fault = f"GPU {missing[0]} of {len(topology.gpus)} does not exist", "set gpu.device_id and engine.devices"
        return Placement(frozenset(), "", (fault,))
    gpus = [topology.gpus[index] for index in devices]
    unknown = [gpu.address for gpu in gpus if gpu.node not in topology.nodes]
    if unknown and len(topology.nodes) > 1:
        fault = (
            f"the kernel does not know the NUMA node of {', '.join(unknown)}",
            "turn on NUMA (ACPI SRAT) in the firmware",
        )
        return Placement(frozenset(), "", (fault,))
    nodes = sorted({gpu.node for gpu in gpus if gpu.node in topology.nodes} or topology.nodes)
    near = frozenset[int]().union(*(topology.nodes[node] for node in nodes)) if nodes else own
    shown = f"GPUs {_shown(devices)} on NUMA node {_shown(nodes)}, CPUs {_shown(near & own)}"
    if not near & own:
        fault = (
            f"none of the CPUs {_shown(near)} near the GPUs may be used here, only {_shown(own)}",
            "widen the CPU set of this service (CPUAffinity, cpuset)",
        )
        return Placement(frozenset(), shown, (fault,))
    return Placement(near & own, shown, tuple(_far_interrupts(gpus, topology)))


def keep_to(placement: Placement) -> None:
    """Bind the calling process, and those it starts, to a placement's CPUs; memory follows by first touch."""
    if placement.cpus:
        os.sched_setaffinity(0, placement.cpus)


def cpus_of(text: str) -> frozenset[int]:
    """The CPUs of a list as the kernel writes it, as ``0-3,8``."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def _is_gpu(device: Path) -> bool:
    return _line(device / "vendor") == NVIDIA and _line(device / "class").startswith(_DISPLAYS)


def _gpu(root: Path, device: Path) -> Gpu:
    irqs: dict[int, frozenset[int]] = {}
    for entry in sorted((device / "msi_irqs").glob("*"), key=lambda path: int(path.name)):
        cpus = _line(root / "proc/irq" / entry.name / "effective_affinity_list")
        if cpus:
            irqs[int(entry.name)] = cpus_of(cpus)
    return Gpu(device.name, int(_line(device / "numa_node") or -1), irqs)


def _far_interrupts(gpus: Iterable[Gpu], topology: Topology) -> Iterable[tuple[str, str]]:
    for gpu in gpus:
        near = topology.nodes.get(gpu.node, frozenset())
        far = sorted(irq for irq, cpus in gpu.irqs.items() if near and not cpus & near)
        if far:
            yield (
                f"interrupts {_shown(far)} of {gpu.address} go to CPUs off its node {gpu.node}",
                f"echo {_shown(near)} > /proc/irq/{far[0]}/smp_affinity_list, or ban them in irqbalance",
            )


def _line(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _shown(numbers: Iterable[int]) -> str:
    """Numbers as the kernel writes them."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)
