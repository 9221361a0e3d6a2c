"""WeightSpec: the names, shapes, number formats and logical axes of a model's weights, for init, load and shard alike.

Owns the weight tree. Reads a ModelArchitecture; imports numpy, never jax. Weights are stacked by kind over the layers,
so that a program takes a dozen arrays whatever the depth; ``by_layer`` takes the stacks apart for programs that would
copy a layer's weights out of them. Linear weights are stored [in, out].

``qkv`` is in kv-head-major order: for each kv head its ``group`` query heads, then its key head, then its value head.
Query head h therefore uses kv head h // group, and a cut along the kv heads cuts nothing else. ``gate_up`` holds all
gate columns, then all up columns. Rotary pairs are (i, i + head_dim / 2).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from planner.architecture import ModelArchitecture
from planner.formats import WeightForm

LINEARS = ("qkv", "o", "gate_up", "down", "head")
"""The weights that a form may quantise; every other one is a gather table or a vector."""


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """One array of the weight tree. ``axes`` names each dimension for the sharding table."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str, ...]

    def __post_init__(self) -> None:
        assert len(self.shape) == len(self.axes), f"{self.name}: {self.shape} against {self.axes}"

    @property
    def num_bytes(self) -> int:
        """Bytes of the array."""
        width = {"float32": 4, "bfloat16": 2, "int8": 1}[self.dtype]
        return width * int(np.prod(self.shape, dtype=np.int64))


def weight_specs(architecture: ModelArchitecture, form: WeightForm) -> dict[str, WeightSpec]:
    """The weight tree of a model in one form, in loading order.

    float32 and bf16 hold one array a kind; vectors (norms, biases) are float32 in every form. int8 replaces each linear
    ``x`` by ``x.codes`` (int8, the same shape) and ``x.scale`` (float32, one an output channel); the embedding table
    stays float32 for gathers, so the head has codes of its own even when tied.

    Args:
        architecture: the model.
        form: how linear layers hold their weights.
    """
    specs: dict[str, WeightSpec] = {}

    def add(name: str, shape: tuple[int, ...], axes: tuple[str, ...], dtype: str = "float32") -> None:
        specs[name] = WeightSpec(name, shape, dtype, axes)

    wide = "bfloat16" if form is WeightForm.BF16 else "float32"
    for name, shape, axes in _kinds(architecture, with_tied_head=form is WeightForm.INT8):
        if name == "embed":
            add(name, shape, axes, wide)
        elif name not in LINEARS:
            add(name, shape, axes)
        elif form is WeightForm.INT8:
            add(f"{name}.codes", shape, axes, "int8")
            add(f"{name}.scale", (*shape[:-2], shape[-1]), (*axes[:-2], axes[-1]))
        else:
            add(name, shape, axes, wide)
    return specs


def by_layer(specs: Mapping[str, WeightSpec]) -> dict[str, WeightSpec]:
    """The same tree with an array for every layer: ``x.3`` is row 3 of ``x``, and has its axes without the first."""
    found: dict[str, WeightSpec] = {}
    for name, spec in specs.items():
        if spec.axes[0] != "layers":
            found[name] = spec
            continue
        for layer in range(spec.shape[0]):
            found[f"{name}.{layer}"] = WeightSpec(f"{name}.{layer}", spec.shape[1:], spec.dtype, spec.axes[1:])
    return found


def random_weights(architecture: ModelArchitecture, seed: int) -> dict[str, np.ndarray]:
    """A float32 weight tree drawn from a normal distribution scaled by 1 / sqrt(inputs); norm weights lie near 1.

    Args:
        architecture: the model.
        seed: equal seeds give equal trees.
    """
    rng = np.random.default_rng(seed)

    def draw(shape: tuple[int, ...]) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32)

    weights: dict[str, np.ndarray] = {}
    for name, spec in weight_specs(architecture, WeightForm.FLOAT32).items():
        if name.endswith("norm"):
            weights[name] = np.float32(1.0) + np.float32(0.1) * draw(spec.shape)
        elif name == "qkv_bias":
            weights[name] = np.float32(0.1) * draw(spec.shape)
        else:
            fan_in = architecture.embed if name == "embed" else spec.shape[-2]
            weights[name] = draw(spec.shape) * np.float32(1.0 / np.sqrt(fan_in))
    return weights


def _kinds(
    architecture: ModelArchitecture, *, with_tied_head: bool
) -> list[tuple[str, tuple[int, ...], tuple[str, ...]]]:
    a = architecture
    qkv = a.kv_heads * (a.group + 2) * a.head_dim
    kinds: list[tuple[str, tuple[int, ...], tuple[str, ...]]] = [
        ("embed", (a.vocab, a.embed), ("vocab", "embed")),
        ("attn_norm", (a.layers, a.embed), ("layers", "embed")),
        ("qkv", (a.layers, a.embed, qkv), ("layers", "embed", "kv_heads")),
    ]
    if a.qkv_bias:
        kinds.append(("qkv_bias", (a.layers, qkv), ("layers", "kv_heads")))
    if a.qk_norm:
        kinds += [(name, (a.layers, a.head_dim), ("layers", "head_dim")) for name in ("q_norm", "k_norm")]
    kinds.append(("o", (a.layers, a.q_heads * a.head_dim, a.embed), ("layers", "kv_heads", "embed")))
    if a.post_norms:
        kinds.append(("post_attn_norm", (a.layers, a.embed), ("layers", "embed")))
    kinds += [
        ("ffw_norm", (a.layers, a.embed), ("layers", "embed")),
        ("gate_up", (a.layers, a.embed, 2 * a.ffw), ("layers", "embed", "ffw")),
        ("down", (a.layers, a.ffw, a.embed), ("layers", "ffw", "embed")),
    ]
    if a.post_norms:
        kinds.append(("post_ffw_norm", (a.layers, a.embed), ("layers", "embed")))
    kinds.append(("final_norm", (a.embed,), ("embed",)))
    if with_tied_head or not a.tied_embeddings:
        kinds.append(("head", (a.embed, a.vocab), ("embed", "vocab")))
    return kinds
