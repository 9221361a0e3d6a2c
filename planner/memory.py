"""MemoryPlan: the bytes a plan needs on a device, by what they hold. Arithmetic only; never imports jax."""

from dataclasses import dataclass

from planner.kv import energy_bytes, slot_bytes
from planner.plan import Plan
from planner.weights import weight_specs


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes on one device. ``workspace_bytes`` is the largest program's own, as XLA assigned it."""

    weights_bytes: int
    pages_bytes: int
    slots_bytes: int
    workspace_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.weights_bytes + self.pages_bytes + self.slots_bytes + self.workspace_bytes


def memory_plan(plan: Plan, workspace_bytes: int = 0) -> MemoryPlan:
    """Add up a plan.

    Args:
        plan: what is served.
        workspace_bytes: temporaries and outputs of the largest program, known once programs are compiled.
    """
    weights = sum(spec.num_bytes for spec in weight_specs(plan.architecture, plan.weight_form).values())
    slots = plan.slots * (4 + 2 * 4 * plan.architecture.vocab + slot_bytes(plan.kv_format, plan.architecture))
    weights += energy_bytes(plan.kv_format, plan.architecture)
    return MemoryPlan(weights, plan.num_pages * plan.page_bytes, slots, workspace_bytes)
