"""The table of axes, the order of columns, and what a device holds of a context, against statements without arrays."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from pallas_kernels.kv_layout import BASE_BITS
from planner.architecture import ModelArchitecture
from planner.axes import CONTEXT
from planner.formats import KvFormat, WeightForm
from planner.pages import PagePool
from planner.plan import Plan, make_plan
from planner.program import numerics_of, placed_weight_specs, serving_devices, state_shapes, state_specs, weight_shapes
from planner.sharding import DevicesError, Spread, column_order, held_part, part_of, pool_axes
from planner.weights import weight_specs

MODEL = ModelArchitecture(
    family="llama", layers=2, embed=32, ffw=48, q_heads=16, kv_heads=2, head_dim=4, vocab=64, context=512,
    norm_eps=1e-6, rope_theta=10_000.0, query_scale=0.5, qkv_bias=True,
)  # fmt: skip


def plan_of(architecture: ModelArchitecture = MODEL, kv_format: KvFormat = KvFormat.FLOAT32, **changes: int) -> Plan:
    return make_plan(
        architecture, target="cpu_native", weight_form=WeightForm.FLOAT32, kv_format=kv_format, context=0, slots=2,
        prefill_chunk=64, prefill_slots=2, page_size=128, kv_bytes=0, implementation="xla", **changes,
    )  # fmt: skip


def test_weights_are_cut_over_all_devices_and_pages_by_their_own():
    plan = plan_of(replace(MODEL, head_dim=8), KvFormat.BMQ4, devices=8, context_devices=2)
    both, whole = ("model", "context"), PartitionSpec()
    specs = placed_weight_specs(plan)
    assert specs["qkv"] == specs["gate_up"] == PartitionSpec(None, None, both)
    assert specs["o"] == specs["down"] == PartitionSpec(None, both, None)
    assert (specs["embed"], specs["head"]) == (PartitionSpec(both, None), PartitionSpec(None, both))
    assert specs["query_energy"] == PartitionSpec(None, "model", None)
    assert specs["attn_norm"] == PartitionSpec(None, None)
    state = state_specs(plan)
    assert state.pages.words == PartitionSpec(None, "context", "model")
    assert state.pages.recent == PartitionSpec(None, None, "model")
    assert state[1:] == (whole, whole, whole)


@pytest.mark.parametrize("kv_format", KvFormat)
@pytest.mark.parametrize(("devices", "context_devices"), [(1, 1), (4, 1), (8, 2), (8, 8)])
def test_every_array_can_be_cut_as_the_table_says(kv_format, devices, context_devices):
    plan = plan_of(replace(MODEL, head_dim=8), kv_format, devices=devices, context_devices=context_devices)
    mesh = {"model": devices // context_devices, "context": context_devices}
    shapes = [*weight_shapes(plan).items(), *enumerate(jax.tree.leaves(state_shapes(plan)))]
    specs = [*placed_weight_specs(plan).values(), *jax.tree.leaves(state_specs(plan))]
    for (name, leaf), spec in zip(shapes, specs, strict=True):
        for size, axes in zip(leaf.shape, spec, strict=False):
            names = (axes,) if isinstance(axes, str) else axes or ()
            assert size % int(np.prod([mesh[axis] for axis in names])) == 0, name
    assert len(pool_axes(kv_format)) == (2 if kv_format in BASE_BITS else 1)
    part = part_of(plan)
    assert (part.q_heads * devices, part.ffw * devices) == (16, 48)
    assert part.kv_heads * devices == max(2, devices)
    assert numerics_of(plan).spread == Spread(devices // context_devices, context_devices, 256)


def test_columns_stay_on_one_device():
    plan = plan_of()
    assert all(column_order(plan, name) is None for name in weight_specs(MODEL, WeightForm.FLOAT32))


def test_each_device_has_its_gate_beside_what_it_gates():
    order = column_order(plan_of(devices=4), "gate_up.codes")
    assert [piece.tolist() for piece in order.reshape(8, 12)] == [
        list(range(start, start + 12)) for start in (0, 48, 12, 60, 24, 72, 36, 84)
    ]


@pytest.mark.parametrize("name", ["qkv", "qkv_bias", "qkv.codes", "qkv.scale"])
def test_repeated_heads_share_the_queries_of_one(name):
    assert column_order(plan_of(devices=2), name) is None
    heads = column_order(plan_of(devices=8), name).reshape(8, 4, 4)
    for head, columns in enumerate(heads):
        source = head // 4 * 10  # heads of the model: eight queries, a key, a value
        rows = [source + head % 4 * 2, source + head % 4 * 2 + 1, source + 8, source + 9]
        assert columns.tolist() == [list(range(4 * row, 4 * row + 4)) for row in rows]


def test_other_weights_keep_their_columns():
    plan = plan_of(devices=8)
    turned = [name for name in weight_specs(MODEL, WeightForm.INT8) if column_order(plan, name) is not None]
    assert turned == ["qkv.codes", "qkv.scale", "qkv_bias", "gate_up.codes", "gate_up.scale"]


SIZE = 4  # of a page


@settings(max_examples=25)
@given(
    st.integers(2, 4),
    st.integers(1, 3),
    st.integers(1, 12),
    st.lists(st.tuples(st.integers(0, 12 * SIZE), st.integers(0, 3)), min_size=3, max_size=3),
)
def test_a_device_holds_its_shards_in_order(devices, shard, width, rows):
    pool = PagePool(40 * devices, SIZE, devices, shard)
    table = np.full((3, width), pool.unused, np.int32)
    lengths = [min(length, width * SIZE) for length, _ in rows]
    for row, (length, (_, home)) in enumerate(zip(lengths, rows, strict=True)):
        pages = pool.take(pool.pages_for(length), home % devices)
        table[row, : len(pages)] = pages
    spread = Spread(1, devices, shard)

    def one(_: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(held_part(spread, jnp.asarray(table), jnp.asarray(lengths, jnp.int32), 40, SIZE))

    pages, held, begins, written = map(np.asarray, jax.vmap(one, axis_name=CONTEXT)(jnp.arange(devices)))
    assert held.sum(axis=0).tolist() == lengths
    assert begins.sum(axis=0).tolist() == [1, 1, 1], "one device begins, also where nothing is"
    for device in range(devices):
        for row, length in enumerate(lengths):
            own = [
                (int(page), min(SIZE, length - index * SIZE))
                for index, page in enumerate(table[row])
                if page // 40 == device and index * SIZE < length
            ]
            assert held[device, row] == sum(count for _, count in own)
            assert pages[device, row, : len(own)].tolist() == [page % 40 for page, _ in own]
            assert begins[device, row] == (table[row, 0] // 40 % devices == device)
            kept = [page - 40 * device if page // 40 == device else 40 for page in table[row].tolist()]
            assert written[device, row].tolist() == kept


CARD = {"platform": "gpu", "device_kind": "NVIDIA A100-SXM4-80GB", "compute_capability": "8.0"}


@pytest.mark.parametrize(
    ("changes", "given", "message"),
    [
        ({}, None, ""),
        ({}, 83_000_000_000, ""),
        (
            {"device_kind": "NVIDIA H200", "compute_capability": "9.0"}, 150_000_000_000,
            "NVIDIA A100-SXM4-80GB of compute capability 8.0; GPU 1 here is NVIDIA H200 of 9.0: take programs that",
        ),
        (
            {"device_kind": "NVIDIA A100-SXM4-40GB"}, 1_000_000,
            r"the plan takes \d+ bytes of a GPU, and GPU 1 here, NVIDIA A100-SXM4-40GB, gives 1000000: take",
        ),
    ],
)  # fmt: skip
def test_only_cards_like_those_of_the_target_serve(monkeypatch, changes, given, message):
    plan = replace(plan_of(devices=2), target="a100_sxm_80")
    good = SimpleNamespace(id=0, memory_stats=lambda: None, **CARD)
    other = SimpleNamespace(id=1, memory_stats=lambda: given and {"bytes_limit": given}, **{**CARD, **changes})
    unused = SimpleNamespace(id=2, memory_stats=lambda: {"bytes_limit": 0}, **CARD)
    monkeypatch.setattr(jax, "devices", lambda: [good, other, unused])
    with pytest.raises(DevicesError, match=message) if message else nullcontext():
        assert serving_devices(plan) == [good, other, unused]


def test_a_plan_for_cards_does_not_serve_on_a_cpu():
    plan = replace(plan_of(), target="a100_sxm_80")
    with pytest.raises(DevicesError, match="the plan is for target a100_sxm_80, whose devices are of kind gpu"):
        serving_devices(plan)
