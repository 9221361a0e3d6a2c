"""Layout: how the matrices of a checkpoint's layers become the stacked arrays of the weight tree.

Owns the table of roles (what each file must hold, with shapes) and the stacking. A file format supplies a function that
reads one role of one layer; one stacked array exists at a time.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from appliance.model.checkpoint import Progress
from planner.architecture import ModelArchitecture
from planner.formats import WeightForm
from planner.weights import weight_specs

ReadRole = Callable[[str, int], np.ndarray]
"""(role, layer) -> float32 values in the role's shape; the layer is 0 for roles outside layers."""


@dataclass(frozen=True, slots=True)
class Role:
    """One matrix or vector of a checkpoint, in the [out, in] orientation of the files."""

    name: str
    shape: tuple[int, ...]
    per_layer: bool = True


def roles(architecture: ModelArchitecture) -> tuple[Role, ...]:
    """Everything that a checkpoint of this architecture must hold."""
    a = architecture
    q, kv = a.q_heads * a.head_dim, a.kv_heads * a.head_dim
    listed = [
        Role("embed", (a.vocab, a.embed), per_layer=False),
        Role("attn_norm", (a.embed,)),
        Role("q", (q, a.embed)),
        Role("k", (kv, a.embed)),
        Role("v", (kv, a.embed)),
        Role("o", (a.embed, q)),
        Role("ffw_norm", (a.embed,)),
        Role("gate", (a.ffw, a.embed)),
        Role("up", (a.ffw, a.embed)),
        Role("down", (a.embed, a.ffw)),
        Role("final_norm", (a.embed,), per_layer=False),
    ]
    if a.qkv_bias:
        listed += [Role("q_bias", (q,)), Role("k_bias", (kv,)), Role("v_bias", (kv,))]
    if a.qk_norm:
        listed += [Role("q_norm", (a.head_dim,)), Role("k_norm", (a.head_dim,))]
    if a.post_norms:
        listed += [Role("post_attn_norm", (a.embed,)), Role("post_ffw_norm", (a.embed,))]
    if not a.tied_embeddings:
        listed.append(Role("head", (a.vocab, a.embed), per_layer=False))
    return tuple(listed)


def stacked(architecture: ModelArchitecture, read: ReadRole, progress: Progress) -> Iterator[tuple[str, np.ndarray]]:
    """Read a checkpoint as the float32 weight tree, one array at a time.

    Args:
        architecture: the model.
        read: gives one role of one layer.
        progress: called once an array with the number of weights read and in all.
    """
    specs = weight_specs(architecture, WeightForm.FLOAT32)
    total = sum(spec.num_bytes for spec in specs.values()) // 4
    done = 0
    for name, spec in specs.items():
        if name == "final_norm":
            array = np.ascontiguousarray(read(name, 0))
        elif name in ("embed", "head"):
            rows = read(name, 0)[: architecture.vocab]  # a file may hold padding rows beyond
            array = np.ascontiguousarray(rows.T if name == "head" else rows)
        else:
            array = np.empty(spec.shape, np.float32)
            for layer in range(architecture.layers):
                _fill(architecture, name, read, layer, array[layer])
        done += array.size
        progress("reading weights", done, total)
        yield name, array


def _fill(architecture: ModelArchitecture, name: str, read: ReadRole, layer: int, out: np.ndarray) -> None:
    """Write one layer's part of a stacked array in place."""
    if name in ("qkv", "qkv_bias"):
        suffix = "_bias" if name == "qkv_bias" else ""
        _fill_qkv(architecture, [read(role + suffix, layer).T for role in ("q", "k", "v")], out)
    elif name == "gate_up":
        out[:, : architecture.ffw] = read("gate", layer).T
        out[:, architecture.ffw :] = read("up", layer).T
    elif name in ("o", "down"):
        out[...] = read(name, layer).T
    else:
        out[...] = read(name, layer)


def _fill_qkv(architecture: ModelArchitecture, parts: list[np.ndarray], out: np.ndarray) -> None:
    """Interleave q, k and v ([in, heads * head_dim] each, or vectors) in kv-head-major order."""
    a = architecture
    lead = out.shape[:-1]
    by_head = out.reshape(*lead, a.kv_heads, a.group + 2, a.head_dim)
    q, k, v = parts
    by_head[..., : a.group, :] = q.reshape(*lead, a.kv_heads, a.group, a.head_dim)
    by_head[..., a.group, :] = k.reshape(*lead, a.kv_heads, a.head_dim)
    by_head[..., a.group + 1, :] = v.reshape(*lead, a.kv_heads, a.head_dim)
