"""Weights go from disk to the devices of a plan, each part where its program wants it; run where there are eight."""

import re
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from appliance.model.energy import write_energy
from appliance.model.placed import load_weights
from appliance.model.record import weights_folder
from appliance.model.store import convert
from planner.decoder import QUERY_ENERGY
from planner.formats import KvFormat, WeightForm
from planner.kv import energy_shape
from planner.program import placed_weight_specs, weight_shapes
from planner.sharding import DevicesError, column_order
from planner.weights import random_weights, weight_specs
from tests.support.spread_engine import MODEL, plan_of

FEW = replace(MODEL, kv_heads=2, qkv_bias=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder, tree = tmp_path_factory.mktemp("model"), random_weights(FEW, 1)
    checkpoint = SimpleNamespace(architecture=FEW, files=("none",), weights=lambda progress: list(tree.items()))
    convert(checkpoint, weights_folder(folder, WeightForm.FLOAT32), WeightForm.FLOAT32)
    energy = np.random.default_rng(2).random(energy_shape(FEW), np.float32)
    write_energy(folder, energy)
    return folder, {**tree, QUERY_ENERGY: energy}


def test_each_device_gets_its_part(model):
    folder, tree = model
    plan = plan_of(FEW, devices=8, context_devices=2, kv_format=KvFormat.BMQ4, page_size=128, shard_len=128)
    weights = load_weights(folder, plan)
    shapes = {name: (array.shape, array.dtype.name) for name, array in weights.items()}
    assert shapes == {name: (leaf.shape, leaf.dtype.name) for name, leaf in weight_shapes(plan).items()}
    assert {n: array.sharding.spec for n, array in weights.items()} == placed_weight_specs(plan)
    for name in weight_specs(FEW, WeightForm.FLOAT32):
        order = column_order(plan, name)
        wanted = tree[name] if order is None else tree[name][..., order]
        np.testing.assert_array_equal(np.asarray(weights[name]), wanted)
    np.testing.assert_array_equal(np.asarray(weights[QUERY_ENERGY]), np.repeat(tree[QUERY_ENERGY], 4, axis=1))
    # device 5 is (2, 1) of the mesh: block 5 of eight, and heads of block 2 of four
    part = {name: array.addressable_shards[5].data for name, array in weights.items()}
    assert weights["qkv"].addressable_shards[5].device == jax.devices()[5]
    ffw = np.split(tree["gate_up"], 16, axis=-1)
    np.testing.assert_array_equal(part["gate_up"], np.concatenate([ffw[5], ffw[13]], axis=-1))
    np.testing.assert_array_equal(part["down"], np.split(tree["down"], 8, axis=1)[5])
    # query heads 10 and 11 of sixteen, which read key/value head 1 of two
    heads = tree["qkv"].reshape(2, 64, 2, 10, 16)[:, :, 1, [2, 3, 8, 9]].reshape(2, 64, -1)
    np.testing.assert_array_equal(part["qkv"], heads)
    np.testing.assert_array_equal(part["o"], np.split(tree["o"], 8, axis=1)[5])
    np.testing.assert_array_equal(part["head"], np.split(tree["head"], 8, axis=-1)[5])
    np.testing.assert_array_equal(part[QUERY_ENERGY], tree[QUERY_ENERGY][:, [1, 1]])


def test_weights_go_a_layer_at_a_time_where_programs_take_them_so(model):
    folder, tree = model
    plan = replace(plan_of(FEW, devices=4), implementation="pallas")
    weights = load_weights(folder, plan)
    assert {name: array.shape for name, array in weights.items()} == {
        name: leaf.shape for name, leaf in weight_shapes(plan).items()
    }
    assert {n: array.sharding.spec for n, array in weights.items()} == placed_weight_specs(plan)
    for name in ("qkv", "qkv_bias", "o", "gate_up", "ffw_norm"):
        order = column_order(plan, name)
        for layer in range(FEW.layers):
            wanted = tree[name][layer] if order is None else tree[name][layer][..., order]
            np.testing.assert_array_equal(np.asarray(weights[f"{name}.{layer}"]), wanted)
    np.testing.assert_array_equal(np.asarray(weights["head"]), tree["head"])


def test_one_device_gets_everything_as_it_is(model):
    folder, tree = model
    weights = load_weights(folder, plan_of(FEW))
    for name, array in weights.items():
        assert array.devices() == {jax.devices()[0]}
        np.testing.assert_array_equal(np.asarray(array), tree[name])


def test_more_devices_than_there_are(model):
    plan = replace(plan_of(FEW, devices=8), devices=16)
    with pytest.raises(DevicesError, match=re.escape("the plan has 16 devices and this process has 8: plan for fewer")):
        load_weights(model[0], plan)
