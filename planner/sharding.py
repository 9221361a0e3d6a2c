"""Sharding: how the arrays of a plan are cut over its devices, and what devices exchange in a step.

Owns the order in which columns of weights lie before they are cut, and the collectives of a step; which axes are cut
stands in ``planner.axes``. Devices form a mesh of "model" by "context". Weights are cut over all of them; pages lie on
the context device that owns their shard of a context, and their key/value heads are cut over the model devices.
Device (m, c) has block ``m * context + c`` of whatever is cut over both, so that what the context devices of one m have
together is one block of what is cut over "model" alone.

Source: tensor parallelism as in Megatron-LM, arXiv 1909.08053; the merge of attention by log-sum-exp as in
FlashDecoding.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from jaxtyping import Array, Bool, Float, Int32, Shaped

from pallas_kernels.kv_layout import BASE_BITS
from pallas_kernels.softmax import Partial, finish
from planner.architecture import ModelArchitecture
from planner.axes import AXES, CONTEXT, ENERGY_AXES, MODEL, Axes
from planner.formats import KvFormat
from planner.plan import Plan
from planner.weights import WeightSpec


@runtime_checkable
class Device(Protocol):
    """What matters of a device; the library's own type is known at run time only."""

    id: int
    platform: str


class DevicesError(ValueError):
    """A process has fewer devices than a plan; the message has both numbers."""


@dataclass(frozen=True, slots=True)
class Spread:
    """How many devices a step runs on, and what each of them exchanges with the others.

    ``model`` and ``context`` are the sizes of the mesh; ``shard_pages`` the pages of a shard, used where context is
    spread. The methods are called inside the step; on one device they give back what they get.
    """

    model: int = 1
    context: int = 1
    shard_pages: int = 1

    @property
    def devices(self) -> int:
        """All of them."""
        return self.model * self.context

    def summed(self, x: Float[Array, "*n"]) -> Float[Array, "*n"]:
        """The sum of what all devices have, each a part of a product."""
        return jax.lax.psum(x, (MODEL, CONTEXT)) if self.devices > 1 else x

    def together(self, x: Shaped[Array, "rows part"]) -> Shaped[Array, "rows whole"]:
        """Columns that are cut over all devices, side by side."""
        return jax.lax.all_gather(x, (MODEL, CONTEXT), axis=1, tiled=True) if self.devices > 1 else x

    def looked_up(
        self, table: Float[Array, "part embed"], ids: Int32[Array, " tokens"]
    ) -> Float[Array, "tokens embed"]:
        """Rows of a table whose rows are cut over all devices; ids outside of it give its nearest row."""
        if self.devices == 1:
            return table.at[ids].get(mode="clip")
        rows = table.shape[0]
        place = jnp.clip(ids, 0, rows * self.devices - 1) - jax.lax.axis_index((MODEL, CONTEXT)) * rows
        found = table.at[place].get(mode="clip")
        return self.summed(jnp.where(((place >= 0) & (place < rows))[:, None], found, 0))

    def heads_of_pages(
        self,
        q: Float[Array, "tokens q_heads head_dim"],
        k: Float[Array, "tokens kv_heads head_dim"],
        v: Float[Array, "tokens kv_heads head_dim"],
    ) -> tuple[Array, Array, Array]:
        """The heads of this device and of all others that hold other pages of the same heads."""
        if self.context == 1:
            return q, k, v
        tokens, kv_heads, head_dim = k.shape
        mixed = jnp.concatenate([q.reshape(tokens, kv_heads, -1, head_dim), k[:, :, None], v[:, :, None]], axis=2)
        mixed = jax.lax.all_gather(mixed, CONTEXT, axis=1, tiled=True)
        return mixed[:, :, :-2].reshape(tokens, -1, head_dim), mixed[:, :, -2], mixed[:, :, -1]

    def merged(self, part: Partial) -> Float[Array, "tokens heads head_dim"]:
        """Attention over the pages of all context devices, of the heads that this device goes on with.

        ``part`` has the softmax over this device's pages, [tokens, heads of the pages].
        """
        peak = jax.lax.pmax(part.peak, CONTEXT)
        factor = jnp.exp(part.peak - peak)
        total, weighted = (
            jax.lax.psum_scatter(x, CONTEXT, scatter_dimension=1, tiled=True)
            for x in (part.total * factor, part.weighted * factor[..., None])
        )
        return finish(Partial(total, total, weighted))


ONE = Spread()


class HeldPart(NamedTuple):
    """What one context device holds of each row's context.

    ``page_table`` has the pages of its shards back to back, ``lengths`` the positions in them. ``begins`` says whether
    the sequence's first position is among them, and is None where contexts are not spread. ``written`` is the whole
    table with its own pages only, to write to.
    """

    page_table: Int32[Array, "rows held"]
    lengths: Int32[Array, " rows"]
    begins: Bool[Array, " rows"] | None
    written: Int32[Array, "rows width"]


def held_part(
    spread: Spread,
    page_table: Int32[Array, "rows width"],
    lengths: Int32[Array, " rows"],
    num_pages: int,
    page_size: int,
) -> HeldPart:
    """The part of every row's context that lies on this device.

    Page ids count through the pools of all context devices. Shard s of a row lies on the device s further than that of
    its first page, in turn.

    Args:
        spread: the devices.
        page_table: page ids of each row, in order of position.
        lengths: positions of each row that are in pages.
        num_pages: pages of one device.
        page_size: positions of a page.
    """
    if spread.context == 1:
        return HeldPart(page_table, lengths, None, page_table)
    rows, width = page_table.shape
    size, index = min(spread.shard_pages, width), jax.lax.axis_index(CONTEXT)
    shards = -(-width // size)
    local = page_table - index * num_pages
    local = jnp.where((local >= 0) & (local < num_pages), local, num_pages)
    first = (index - page_table[:, 0] // num_pages) % spread.context
    number = first[:, None] + spread.context * jnp.arange(-(-shards // spread.context), dtype=jnp.int32)
    by_shard = jnp.pad(local, ((0, 0), (0, shards * size - width)), constant_values=num_pages).reshape(rows, shards, -1)
    mine = jnp.take_along_axis(by_shard, jnp.minimum(number, shards - 1)[:, :, None], axis=1)
    held = jnp.clip(lengths[:, None] - number * (size * page_size), 0, size * page_size)
    return HeldPart(mine.reshape(rows, -1), held.sum(axis=1, dtype=jnp.int32), first == 0, local)


# ---------------------------------------------------------------------- placement


def spread_of(plan: Plan) -> Spread:
    """How a plan's steps are spread."""
    return Spread(plan.model_devices, plan.context_devices, plan.shard_pages)


def part_of(plan: Plan) -> ModelArchitecture:
    """The model whose linear layers one device computes."""
    whole, n = plan.served, plan.devices
    if n == 1:
        return whole
    return replace(whole, q_heads=whole.q_heads // n, kv_heads=whole.kv_heads // n, ffw=whole.ffw // n)


def spec_of(axes: Axes) -> PartitionSpec:
    """How an array with these logical axes is cut.

    Raises:
        KeyError: the table does not have an axis.
    """
    return PartitionSpec(*(AXES[axis] or None for axis in axes))


@dataclass(frozen=True, slots=True)
class Placement:
    """The devices of a plan and where arrays go on them."""

    devices: tuple[Device, ...]
    mesh: Mesh

    @classmethod
    def of(cls, plan: Plan, devices: Sequence[Device]) -> "Placement":
        """The first devices of a process, as many as the plan has.

        Raises:
            DevicesError: there are fewer.
        """
        if len(devices) < plan.devices:
            raise DevicesError(
                f"the plan has {plan.devices} devices and this process has {len(devices)}: plan for fewer, or start it "
                "where there are as many (on a CPU: XLA_FLAGS=--xla_force_host_platform_device_count="
                f"{plan.devices})"
            )
        taken = tuple(devices[: plan.devices])
        grid = np.array(taken, dtype=object).reshape(plan.model_devices, plan.context_devices)
        return cls(taken, Mesh(grid, (MODEL, CONTEXT)))

    def sharding(self, spec: PartitionSpec) -> jax.sharding.Sharding:
        """Where the parts of an array go."""
        first, *others = self.devices
        return NamedSharding(self.mesh, spec) if others else SingleDeviceSharding(first)


def pool_axes(kv_format: KvFormat) -> tuple[Axes, ...]:
    """The logical axes of the arrays of a page pool, in the order of its leaves."""
    words: Axes = ("layers", "pages", "page_heads")
    return (words, ("layers", "slots", "page_heads")) if kv_format in BASE_BITS else (words,)


# ---------------------------------------------------------------------- weights at load


def column_order(plan: Plan, name: str) -> np.ndarray | None:
    """Which column of a weight each column is before the plan cuts it over devices; None = it stays as it is.

    Key/value heads are repeated where devices outnumber them, and each device has its part of the gate's columns next
    to the same part of the others.

    Args:
        plan: the devices.
        name: of the weight, as ``planner.weights`` has it, with or without the ending of an int8 form.
    """
    kind, arch, served = name.partition(".")[0], plan.architecture, plan.served
    if kind == "gate_up" and plan.devices > 1:
        return np.arange(2 * arch.ffw).reshape(2, plan.devices, -1).swapaxes(0, 1).reshape(-1)
    if kind in ("qkv", "qkv_bias") and served.kv_heads != arch.kv_heads:
        repeats = served.kv_heads // arch.kv_heads
        heads = np.arange(arch.kv_heads * (arch.group + 2)).reshape(arch.kv_heads, -1)
        queries = heads[:, : arch.group].reshape(served.kv_heads, -1)
        both = np.repeat(heads[:, arch.group :], repeats, axis=0)
        columns = np.concatenate([queries, both], axis=1).reshape(-1, 1) * arch.head_dim + np.arange(arch.head_dim)
        return columns.reshape(-1)
    return None


def place_weight(plan: Plan, spec: WeightSpec, array: np.ndarray, placement: Placement) -> jax.Array:
    """Put a model's weight on a plan's devices, its columns in the order that they are cut in.

    Args:
        plan: the devices.
        spec: of the weight of the model itself.
        array: the weight; at most one device's part of it is copied at a time.
        placement: where it goes.
    """
    sharding, order = placement.sharding(spec_of(spec.axes)), column_order(plan, spec.name)
    if order is None:
        return jax.device_put(array, sharding)

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None, "the shape has dimensions"
        return array[index[:-1]][..., order[index[-1]]]

    return jax.make_array_from_callback((*array.shape[:-1], len(order)), sharding, part)


def place_energy(plan: Plan, energy: np.ndarray, placement: Placement) -> jax.Array:
    """Put the query energies of a model, float32 [layers, kv_heads, head_dim], on a plan's devices."""
    repeated = np.repeat(energy, plan.served.kv_heads // plan.architecture.kv_heads, axis=1)
    return jax.device_put(repeated, placement.sharding(spec_of(ENERGY_AXES)))


def over_mesh(function: Callable[..., Any], placement: Placement, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """A step that every device runs on its own part of the arguments; a step of one device stays as it is."""
    if len(placement.devices) == 1:
        return function
    return jax.shard_map(function, mesh=placement.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
