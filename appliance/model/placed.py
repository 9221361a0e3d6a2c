"""A model's weights on the devices of a plan, restored to where each part belongs.

Owns the way from disk: what only has to be cut goes straight to its devices; what is placed in another order of
columns than it is stored in, or a layer at a time, passes through the host's memory.
"""

from pathlib import Path

import jax
import numpy as np

from appliance.model.energy import read_energy
from appliance.model.record import weights_folder
from appliance.model.store import restore
from pallas_kernels.kv_layout import BASE_BITS
from planner.decoder import QUERY_ENERGY
from planner.kv import energy_shape
from planner.plan import Plan
from planner.program import serving_devices
from planner.sharding import Placement, column_order, place_energy, place_weight, spec_of
from planner.weights import WeightSpec, by_layer, weight_specs


def load_weights(folder: Path, plan: Plan) -> dict[str, jax.Array]:
    """The weight tree that the plan's programs take, with the query energies where its format needs them.

    Args:
        folder: of the model.
        plan: what is served.

    Raises:
        DevicesError: this process has fewer devices than the plan, or of another kind.
        StoreError: weights or energies are missing or damaged.
    """
    placement = Placement.of(plan, serving_devices(plan))
    specs = weight_specs(plan.architecture, plan.weight_form)
    turned = [name for name, spec in specs.items() if _passes_host(plan, spec)]
    host = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0]) if turned else None

    def where(spec: WeightSpec) -> jax.sharding.Sharding:
        return host if host is not None and spec.name in turned else placement.sharding(spec_of(spec.axes))

    weights = restore(weights_folder(folder, plan.weight_form), specs, where)
    for name in turned:
        array = np.asarray(weights.pop(name))
        if not plan.weights_by_layer or specs[name].axes[0] != "layers":
            weights[name] = place_weight(plan, specs[name], array, placement)
            continue
        for layer, spec in enumerate(by_layer({name: specs[name]}).values()):
            weights[spec.name] = place_weight(plan, spec, array[layer], placement)
    if plan.kv_format in BASE_BITS:
        weights[QUERY_ENERGY] = place_energy(plan, read_energy(folder, energy_shape(plan.architecture)), placement)
    return weights


def _passes_host(plan: Plan, spec: WeightSpec) -> bool:
    """Whether an array is stored otherwise than it is placed."""
    return column_order(plan, spec.name) is not None or (plan.weights_by_layer and spec.axes[0] == "layers")
