"""MemoryPlan: the bytes a plan needs on each device, by what they hold, and the proof that programs keep to it.

Owns the arithmetic and the two contracts that a build holds XLA's figures against. Reads a plan, its target and its
card; never imports jax.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from pallas_kernels.card import find_card
from pallas_kernels.kv_layout import BASE_BITS, STRETCH
from planner.axes import AXES
from planner.batch import NUM_FLOATS, NUM_INTS, NUM_TOP_LOGPROBS
from planner.buckets import Bucket, Phase
from planner.host_tier import PAGES_ON_THE_WAY
from planner.kv import energy_bytes, slot_bytes
from planner.pages import fullest
from planner.plan import MOVED_BYTES, Plan
from planner.target import find_target
from planner.weights import WeightSpec, weight_specs

TEMPORARIES = 0.03
"""Share of a device's memory that the temporaries of a program may take."""

LENGTHS = (32 * 1024, 64 * 1024, 128 * 1024)
"""Positions of the sequences whose number is told."""


class MemoryPlanError(ValueError):
    """A plan, or a program of it, does not fit in memory; the message names the bytes and what to change."""


@runtime_checkable
class Cost(Protocol):
    """XLA's figures of a program on one device, in bytes."""

    @property
    def argument_bytes(self) -> int:
        """Of its arguments."""
        ...

    @property
    def output_bytes(self) -> int:
        """Of its results."""
        ...

    @property
    def alias_bytes(self) -> int:
        """Of results that lie where arguments lay."""
        ...

    @property
    def temp_bytes(self) -> int:
        """Of what it needs beside both."""
        ...


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes on one device.

    ``workspace_bytes`` is what programs need beside weights, pages and slots: the largest one's own as XLA assigned it,
    or the most that they may have. ``reserve_bytes`` are left to the driver and the libraries; ``usable_bytes`` is the
    rest of the device, 0 where it is not known, as on a CPU.
    """

    weights_bytes: int
    pages_bytes: int
    slots_bytes: int
    workspace_bytes: int
    reserve_bytes: int = 0
    usable_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """All of it but the reserve."""
        return self.weights_bytes + self.pages_bytes + self.slots_bytes + self.workspace_bytes

    @property
    def fits(self) -> bool:
        """Whether it is within the usable bytes, where they are known."""
        return not self.usable_bytes or self.total_bytes <= self.usable_bytes


def memory_plan(plan: Plan, workspace_bytes: int | None = None, usable_bytes: int = 0) -> MemoryPlan:
    """Add up a plan.

    Args:
        plan: what is served.
        workspace_bytes: temporaries and outputs of the largest program, known once programs are compiled; None: the
            most that programs of a GPU may have, and nothing on a CPU.
        usable_bytes: a bound below the target's own; 0 = none.
    """
    target, served = find_target(plan.target), plan.served
    specs = weight_specs(served, plan.weight_form).values()
    weights = sum(_bytes_on_one(spec, plan.devices) for spec in specs)
    weights += energy_bytes(plan.kv_format, served) // plan.model_devices
    slots = plan.slots * (4 + 2 * 4 * served.vocab + slot_bytes(plan.kv_format, served) // plan.model_devices)
    device = find_card(target.card).memory_bytes if target.card else 0
    usable = min(usable_bytes or target.usable_bytes, target.usable_bytes)
    return MemoryPlan(
        weights_bytes=weights,
        pages_bytes=plan.num_pages // plan.context_devices * plan.page_bytes,
        slots_bytes=slots,
        workspace_bytes=workspace_allowance(plan) if workspace_bytes is None else workspace_bytes,
        reserve_bytes=max(0, device - usable),
        usable_bytes=usable,
    )


def workspace_allowance(plan: Plan) -> int:
    """Bytes that a plan for a GPU sets aside for programs; 0 on a CPU, whose memory is the system's.

    The share that temporaries may take, twice what the launches of a step exchange with the host, since a step is
    dispatched before the one before has been read, and the pages that are on their way between pool and host: as many
    bytes whatever the format, so that formats differ in nothing but what they hold.
    """
    target = find_target(plan.target)
    if not target.card:
        return 0
    moving = PAGES_ON_THE_WAY * max(MOVED_BYTES, plan.page_bytes) if plan.moved_pages else 0
    return int(TEMPORARIES * find_card(target.card).memory_bytes) + 2 * _exchanged_bytes(plan) + moving


def prefill_rows(plan: Plan) -> int:
    """Prompt chunks that one launch of a plan should hold at most, so that temporaries keep to their share; at least 1.

    On a GPU a prefill over a bitmask pool unpacks a stretch of the history of every row, one layer at a time, to bf16:
    two thirds of the share are for that. Other plans take as many as their lattice has.
    """
    target, most = find_target(plan.target), plan.lattice.prefill_slots
    if not target.card or plan.kv_format not in BASE_BITS:
        return most
    heads = plan.served.kv_heads // plan.model_devices
    pages = fullest(plan.table_width, plan.shard_pages, plan.context_devices)
    history = 2 * 2 * min(pages * plan.page_size, STRETCH) * heads * plan.architecture.head_dim
    return max(1, min(most, int(2 / 3 * TEMPORARIES * find_card(target.card).memory_bytes) // history))


def pool_bytes(plan: Plan, usable_bytes: int = 0) -> int:
    """Bytes that a plan leaves for the page pool of one device of a GPU target.

    Args:
        plan: its number of pages does not matter.
        usable_bytes: a bound below the target's own; 0 = none.

    Raises:
        MemoryPlanError: the target's memory is not known, or nothing is left.
    """
    memory = memory_plan(plan, usable_bytes=usable_bytes)
    if not memory.usable_bytes:
        raise MemoryPlanError(f"target {plan.target} has no memory of its own to fill; say how much pages may take")
    left = memory.usable_bytes - (memory.total_bytes - memory.pages_bytes)
    if left <= 0:
        raise MemoryPlanError(
            f"{memory.usable_bytes} usable bytes of each device hold no pages beside {memory.weights_bytes} bytes of "
            f"weights, {memory.slots_bytes} of slots and {memory.workspace_bytes} of workspace: take more devices than "
            f"{plan.devices}, fewer slots than {plan.slots}, or a target with more memory"
        )
    return left


def resident(plan: Plan, length: int) -> int:
    """How many sequences of so many positions a plan holds at once; 0 where its context is shorter.

    Every sequence begins on the device that has most free pages, as the page pool chooses.
    """
    if length > plan.context:
        return 0
    devices, on_one = plan.context_devices, plan.num_pages // plan.context_devices
    pages = -(-length // plan.page_size)
    shard = plan.shard_pages if devices > 1 else pages
    parts = [min(shard, pages - first) for first in range(0, pages, shard)]
    free, found = [on_one] * devices, 0
    while found < plan.slots:
        home = max(range(devices), key=lambda device: (free[device], -device))
        for index, part in enumerate(parts):
            free[(home + index) % devices] -= part
        if min(free) < 0:
            break
        found += 1
    return found


def check(plan: Plan, costs: Mapping[Bucket, Cost], usable_bytes: int = 0) -> None:
    """Hold XLA's figures of every program against the plan.

    Everything donated must lie where it lay. On a GPU temporaries stay within their share of the device, and arguments,
    temporaries and results that are no aliases within the usable bytes.

    Args:
        plan: what was compiled.
        costs: of every program.
        usable_bytes: a bound below the target's own; 0 = none.

    Raises:
        MemoryPlanError: they do not; every program and its bytes are named.
    """
    memory, target = memory_plan(plan, usable_bytes=usable_bytes), find_target(plan.target)
    donated = memory.pages_bytes + memory.slots_bytes
    most = int(TEMPORARIES * find_card(target.card).memory_bytes) if target.card else 0
    faults: list[str] = []
    for bucket, cost in costs.items():
        if bucket.phase is not Phase.EMPTY and cost.alias_bytes < donated:
            faults.append(
                f"{bucket.name}: {cost.alias_bytes} bytes of the {donated} donated are updated in place; the rest is "
                "held twice"
            )
        if most and cost.temp_bytes > most:
            faults.append(
                f"{bucket.name}: {cost.temp_bytes} bytes of temporaries pass {most}, {TEMPORARIES:.0%} of the device: "
                "lower the prefill chunk, its rows, or the slots"
            )
        held = cost.argument_bytes + cost.temp_bytes + cost.output_bytes - cost.alias_bytes
        if memory.usable_bytes and held > memory.usable_bytes:
            faults.append(
                f"{bucket.name}: {held} bytes of arguments, temporaries and results pass the {memory.usable_bytes} "
                f"usable ones of {plan.target}: make the page pool {held - memory.usable_bytes} bytes smaller"
            )
    if faults:
        raise MemoryPlanError("programs do not keep to the memory plan:\n  " + "\n  ".join(faults))


def _bytes_on_one(spec: WeightSpec, devices: int) -> int:
    """Bytes of a weight on each device: a part of it if an axis is cut, else all of it."""
    return spec.num_bytes // devices if any(AXES[axis] for axis in spec.axes) else spec.num_bytes


def _exchanged_bytes(plan: Plan) -> int:
    """Bytes of what the host gives the largest launches of a step and gets back."""
    row = 4 * (NUM_INTS + plan.table_width + NUM_FLOATS) + 4 * (2 + 2 * NUM_TOP_LOGPROBS)
    chunk = plan.lattice.prefill_chunks[-1]
    rows = plan.slots + min(plan.lattice.prefill_slots, chunk)
    entering = plan.slots * (4 + 2 * 4 * plan.architecture.vocab)
    return rows * row + 4 * chunk + entering
