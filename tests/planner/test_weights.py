import numpy as np
import pytest

from planner.architecture import ModelArchitecture, RopeKind, RopeScaling, UnsupportedArchitectureError
from planner.formats import WeightForm
from planner.weights import by_layer, random_weights, weight_specs

PLAIN = ModelArchitecture(
    family="llama", layers=3, embed=24, ffw=40, q_heads=6, kv_heads=2, head_dim=4, vocab=50, context=64,
    norm_eps=1e-5, rope_theta=1e4, query_scale=0.5,
)  # fmt: skip
FULL = ModelArchitecture(
    family="gemma3", layers=3, embed=24, ffw=40, q_heads=6, kv_heads=2, head_dim=4, vocab=50, context=64,
    norm_eps=1e-5, rope_theta=1e4, query_scale=0.5, qkv_bias=True, qk_norm=True, post_norms=True, tied_embeddings=True,
    windows=(8, 0, 8), local_rope=(True, False, True),
    rope_scaling=RopeScaling(RopeKind.LINEAR, 8.0, factors=(1.0, 2.5)),
)  # fmt: skip


def test_plain_float32_tree_exactly():
    specs = weight_specs(PLAIN, WeightForm.FLOAT32)
    assert {name: spec.shape for name, spec in specs.items()} == {
        "embed": (50, 24),
        "attn_norm": (3, 24),
        "qkv": (3, 24, 2 * 5 * 4),
        "o": (3, 24, 24),
        "ffw_norm": (3, 24),
        "gate_up": (3, 24, 80),
        "down": (3, 40, 24),
        "final_norm": (24,),
        "head": (24, 50),
    }
    assert {spec.dtype for spec in specs.values()} == {"float32"}
    assert specs["qkv"].axes == ("layers", "embed", "kv_heads")
    assert specs["down"].axes == ("layers", "ffw", "embed")


def test_a_tree_by_layer_is_the_same_without_the_axis_of_layers():
    stacked = weight_specs(PLAIN, WeightForm.BF16)
    apart = by_layer(stacked)
    assert [name for name in apart if name.startswith("o.")] == ["o.0", "o.1", "o.2"]
    assert (apart["o.2"].shape, apart["o.2"].axes, apart["o.2"].dtype) == ((24, 24), ("kv_heads", "embed"), "bfloat16")
    assert {name for name in apart if "." not in name} == {"embed", "final_norm", "head"}
    assert len(apart) == 6 * 3 + 3
    assert sum(spec.num_bytes for spec in apart.values()) == sum(spec.num_bytes for spec in stacked.values())


def test_optional_parts_follow_the_architecture():
    specs = weight_specs(FULL, WeightForm.FLOAT32)
    assert "head" not in specs
    assert {n: specs[n].shape for n in ("qkv_bias", "q_norm", "k_norm", "post_attn_norm", "post_ffw_norm")} == {
        "qkv_bias": (3, 40),
        "q_norm": (3, 4),
        "k_norm": (3, 4),
        "post_attn_norm": (3, 24),
        "post_ffw_norm": (3, 24),
    }


@pytest.mark.parametrize("architecture", [PLAIN, FULL], ids=["plain", "full"])
def test_parameters_agree_with_the_tree(architecture):
    specs = weight_specs(architecture, WeightForm.FLOAT32)
    assert sum(spec.num_bytes for spec in specs.values()) == 4 * architecture.parameters()


def test_bf16_narrows_matrices_only():
    specs = weight_specs(FULL, WeightForm.BF16)
    assert {name for name, spec in specs.items() if spec.dtype == "bfloat16"} == {
        "embed",
        "qkv",
        "o",
        "gate_up",
        "down",
    }
    assert specs["embed"].num_bytes == 50 * 24 * 2


@pytest.mark.parametrize("architecture", [PLAIN, FULL], ids=["untied", "tied"])
def test_int8_has_codes_and_a_scale_an_output(architecture):
    specs = weight_specs(architecture, WeightForm.INT8)
    for name in ("qkv", "o", "gate_up", "down"):
        codes, scale = specs[f"{name}.codes"], specs[f"{name}.scale"]
        assert name not in specs
        assert (codes.dtype, scale.dtype) == ("int8", "float32")
        assert scale.shape == (codes.shape[0], codes.shape[2])
        assert scale.axes == (codes.axes[0], codes.axes[2])
    assert (specs["head.codes"].shape, specs["head.scale"].shape) == ((24, 50), (50,))
    assert specs["embed"].dtype == "float32"


def test_random_weights_fit_the_tree_and_repeat():
    weights = random_weights(FULL, 7)
    assert {n: (w.shape, w.dtype.name) for n, w in weights.items()} == {
        n: (s.shape, "float32") for n, s in weight_specs(FULL, WeightForm.FLOAT32).items()
    }
    again, other = random_weights(FULL, 7), random_weights(FULL, 8)
    assert all(np.array_equal(weights[name], again[name]) for name in weights)
    assert not np.array_equal(weights["qkv"], other["qkv"])
    assert abs(weights["down"].std() - 40**-0.5) < 0.01
    assert abs(weights["final_norm"].mean() - 1) < 0.1


@pytest.mark.parametrize("architecture", [PLAIN, FULL], ids=["plain", "full"])
def test_architecture_survives_json(architecture):
    document = architecture.to_json()
    assert ModelArchitecture.from_json(document) == architecture
    assert ModelArchitecture.from_json(document).to_json() == document


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"novel": 1}, "novel"),
        ({"activation": "relu"}, "relu"),
        ({"layers": 0}, "layers is 0"),
        ({"vocab": None}, "vocab"),
    ],
)
def test_foreign_architecture_documents_are_refused(change, match):
    with pytest.raises(UnsupportedArchitectureError, match=match):
        ModelArchitecture.from_json({**PLAIN.to_json(), **change})


def test_incomplete_architecture_document_is_refused():
    document = PLAIN.to_json()
    del document["rope_scaling"]
    with pytest.raises(UnsupportedArchitectureError, match="rope_scaling"):
        ModelArchitecture.from_json(document)


def test_rope_factors_need_one_a_frequency():
    with pytest.raises(UnsupportedArchitectureError, match=r"3 values.*2 above 0"):
        ModelArchitecture.from_json({**PLAIN.to_json(), "rope_scaling": {"kind": "none", "factors": [1.0, 1.0, 1.0]}})
