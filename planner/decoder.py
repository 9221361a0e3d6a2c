"""The decoder: embedding, layers and head as flax modules, and the two step functions that programs are compiled from.

Owns the model's arithmetic over any ModelArchitecture; calls the ops for everything that touches pages, weights forms
or sampling. The page pool is read-only while layers run: each layer hands its new keys and values out of the scan, and
one write at the end of the step stores those of all layers in place.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.kv_bitmask.rotation import turned, turned_back
from pallas_kernels.linear.op import Gate, Int8Weight, Products, gated_linear, linear
from pallas_kernels.linear.op import Implementation as LinearImplementation
from pallas_kernels.page_write.op import page_write
from pallas_kernels.paged_decode.op import paged_decode, paged_decode_part
from pallas_kernels.paged_prefill.op import Products as AttentionProducts
from pallas_kernels.paged_prefill.op import paged_prefill, paged_prefill_part
from pallas_kernels.pages import Int8Pages, Pages, pool_shape
from pallas_kernels.rows import Rows, places
from pallas_kernels.sample.op import Sampled, SampleRows, sample
from pallas_kernels.softmax import Partial
from planner import batch
from planner.architecture import Activation, ModelArchitecture
from planner.batch import NUM_INTS, NUM_SUPPRESSED, NUM_TOP_LOGPROBS
from planner.formats import Implementation, WeightForm
from planner.rope import rotary_tables, rotate
from planner.sharding import ONE, HeldPart, Spread, held_part

Weights = Mapping[str, Array]
"""The weight tree by name, as ``planner.weights`` specifies it."""

PREFILL_PRODUCTS: Mapping[str, Products] = {"qkv": "bf16", "o": "blocks32", "gate_up": "blocks32", "down": "blocks16"}
"""How finely each int8 product of a prefill holds its activations; coarser ones are faster."""

QUERY_ENERGY = "query_energy"
"""Name under which a weight tree holds float32 [layers, kv_heads, head_dim], which bitmask formats need."""

QUERIES = "queries"
"""Collection that layers sow their rotated queries [tokens, q_heads, head_dim] into, if it is mutable."""

_OUTSIDE_LAYERS = ("embed", "final_norm", "head", "head.codes", "head.scale", QUERY_ENERGY)


@dataclass(frozen=True, slots=True)
class Numerics:
    """How the arithmetic of a program is done.

    ``linear`` names the code path of products with weights, ``attention`` of what touches pages, ``sampling`` of the
    choice of ids; ``spread`` says which devices share the work. Attention products of a prefill are in bf16 unless the
    weights are float32. int8 weights take activations in two int8 planes in decode and in the head, and in a prefill as
    PREFILL_PRODUCTS says. Everything between products is float32, or bf16 for bf16 weights.
    """

    form: WeightForm
    linear: LinearImplementation
    attention: Implementation
    sampling: Implementation = "xla"
    spread: Spread = ONE

    @property
    def residual_dtype(self) -> jnp.dtype:
        """Type of the activations between layers."""
        return jnp.dtype(jnp.bfloat16 if self.form is WeightForm.BF16 else jnp.float32)

    @property
    def attention_products(self) -> AttentionProducts:
        """How the operands of attention products are held in a prefill."""
        return "float32" if self.form is WeightForm.FLOAT32 else "bf16"


class DeviceState(NamedTuple):
    """What lives on the device between steps; every program takes it donated and returns it."""

    pages: Pages
    last_ids: Int32[Array, " slots"]
    """Newest id of each slot, so that a step never waits for the host to read the last one."""
    counts: Int32[Array, "slots vocab"]
    bias: Float[Array, "slots vocab"]


class DecodeContext(NamedTuple):
    """What attention needs in a decode step; rows are slots.

    Where contexts are spread over devices, these are the pages and positions that lie on this one, and ``begins`` says
    of each row whether its first position is among them; else it is None.
    """

    pages: Pages
    page_table: Int32[Array, "slots width"]
    lengths: Int32[Array, " slots"]
    begins: Bool[Array, " slots"] | None = None


class PrefillContext(NamedTuple):
    """What attention needs in a prefill step; rows are prompt chunks, back to back. ``begins`` as for decoding."""

    pages: Pages
    rows: Rows
    begins: Bool[Array, " rows"] | None = None


class LayerData(NamedTuple):
    """Per-layer facts as data, so that one scanned layer serves every kind."""

    layer: Int32[Array, ""]
    window: Int32[Array, ""]
    local_rope: Int32[Array, ""]


class Rope(NamedTuple):
    """Cosines and sines of the step's positions, stacked: 0 global, 1 local."""

    cos: Float[Array, "kinds tokens half"]
    sin: Float[Array, "kinds tokens half"]


class NewKeyValues(NamedTuple):
    """Keys and values of the step's tokens, to be written at its end."""

    k: Float[Array, "tokens kv_heads head_dim"]
    v: Float[Array, "tokens kv_heads head_dim"]


def rms_norm(x: Float[Array, "*rows d"], weight: Float[Array, " d"], eps: float) -> Float[Array, "*rows d"]:
    """``x / rms(x) * weight`` in float32. Source: RMSNorm, arXiv 1910.07467."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + eps) * weight).astype(x.dtype)


def _newest(_: object, new: Array) -> Array:
    return new


class Layer(nn.Module):
    """One decoder layer. Parameters are declared by name and come from the weight tree, never from an initialiser."""

    architecture: ModelArchitecture
    numerics: Numerics

    def _weight(self, name: str, layer: Int32[Array, ""]) -> Array | Int8Weight:
        if self.has_variable("stacks", f"{name}.codes"):
            codes, scale = (self.get_variable("stacks", f"{name}.{kind}") for kind in ("codes", "scale"))
            return Int8Weight(codes, scale, layer)
        return self._array(name)

    def _array(self, name: str) -> Array:
        return self.get_variable("params", name)

    def _linear(
        self,
        name: str,
        x: Float[Array, "tokens k"],
        data: LayerData,
        context: DecodeContext | PrefillContext,
        gate: Gate | None = None,
    ) -> Float[Array, "tokens n"]:
        """A product with a named weight; its input's Gram matrix is sown for whoever calibrates on it."""
        if self.is_mutable_collection("gram"):
            wide = x.astype(jnp.float32)
            self.sow("gram", name, wide.T @ wide, init_fn=tuple, reduce_fn=_newest)
        products = "planes" if isinstance(context, DecodeContext) else PREFILL_PRODUCTS[name]
        weight, implementation = self._weight(name, data.layer), self.numerics.linear
        if gate:
            return gated_linear(x, weight, gate=gate, products=products, implementation=implementation).astype(x.dtype)
        return linear(x, weight, products=products, implementation=implementation).astype(x.dtype)

    def __call__(
        self,
        x: Float[Array, "tokens embed"],
        data: LayerData,
        rope: Rope,
        context: DecodeContext | PrefillContext,
    ) -> tuple[Float[Array, "tokens embed"], NewKeyValues]:
        """The layer's output and its new keys and values."""
        arch = self.architecture
        attended, new = self._attention(rms_norm(x, self._array("attn_norm"), arch.norm_eps), data, rope, context)
        if arch.post_norms:
            attended = rms_norm(attended, self._array("post_attn_norm"), arch.norm_eps)
        x += attended
        hidden = self._feed_forward(rms_norm(x, self._array("ffw_norm"), arch.norm_eps), data, context)
        if arch.post_norms:
            hidden = rms_norm(hidden, self._array("post_ffw_norm"), arch.norm_eps)
        return x + hidden, new

    def _attention(
        self, x: Array, data: LayerData, rope: Rope, context: DecodeContext | PrefillContext
    ) -> tuple[Float[Array, "tokens embed"], NewKeyValues]:
        arch, spread = self.architecture, self.numerics.spread
        mixed = self._linear("qkv", x, data, context)
        if arch.qkv_bias:
            mixed += self._array("qkv_bias").astype(mixed.dtype)
        mixed = mixed.reshape(x.shape[0], arch.kv_heads, arch.group + 2, arch.head_dim)
        q = mixed[:, :, : arch.group].reshape(x.shape[0], arch.q_heads, arch.head_dim)
        k, v = mixed[:, :, arch.group], mixed[:, :, arch.group + 1]
        if arch.qk_norm:
            q = rms_norm(q, self._array("q_norm"), arch.norm_eps)
            k = rms_norm(k, self._array("k_norm"), arch.norm_eps)
        cos, sin = rope.cos[data.local_rope], rope.sin[data.local_rope]
        q, k = rotate(q, cos, sin).astype(x.dtype), rotate(k, cos, sin).astype(x.dtype)
        if self.is_mutable_collection(QUERIES):
            self.sow(QUERIES, "q", q, init_fn=tuple, reduce_fn=_newest)
        q, k, v = spread.heads_of_pages(q, k, v)
        turn = isinstance(context.pages, Int8Pages)  # one scale serves a vector, in which no channel may stand out
        q, k, v = (turned(part) if turn else part for part in (q, k, v))
        attended = self._attend(q, k, v, data, context).astype(x.dtype)
        attended = turned_back(attended) if turn else attended
        mixed = spread.summed(self._linear("o", attended.reshape(x.shape[0], -1), data, context))
        return mixed, NewKeyValues(k, v)

    def _attend(
        self, q: Array, k: Array, v: Array, data: LayerData, context: DecodeContext | PrefillContext
    ) -> Float[Array, "tokens q_heads head_dim"]:
        scale, softcap = self.architecture.query_scale, self.architecture.attn_softcap
        if context.begins is not None:
            return self.numerics.spread.merged(self._attend_part(q, k, v, data, context, context.begins))
        if isinstance(context, DecodeContext):
            return paged_decode(
                q, k, v, context.pages, data.layer, context.page_table, context.lengths, data.window,
                scale=scale, softcap=softcap, implementation=self.numerics.attention,
            )  # fmt: skip
        return paged_prefill(
            q, k, v, context.pages, data.layer, *context.rows, data.window, scale=scale, softcap=softcap,
            products=self.numerics.attention_products, implementation=self.numerics.attention,
        )  # fmt: skip

    def _attend_part(
        self,
        q: Array,
        k: Array,
        v: Array,
        data: LayerData,
        context: DecodeContext | PrefillContext,
        begins: Bool[Array, " rows"],
    ) -> Partial:
        """Attention over what this device holds of each context."""
        scale, softcap = self.architecture.query_scale, self.architecture.attn_softcap
        implementation = "pallas" if self.numerics.attention == "pallas" else "xla"
        if isinstance(context, DecodeContext):
            return paged_decode_part(
                q, k, v, context.pages, data.layer, context.page_table, context.lengths, begins,
                scale=scale, softcap=softcap, implementation=implementation,
            )  # fmt: skip
        return paged_prefill_part(
            q, k, v, context.pages, data.layer, *context.rows, begins, scale=scale, softcap=softcap,
            products=self.numerics.attention_products, implementation=implementation,
        )  # fmt: skip

    def _feed_forward(
        self, x: Float[Array, "tokens embed"], data: LayerData, context: DecodeContext | PrefillContext
    ) -> Float[Array, "tokens embed"]:
        gate: Gate = "silu" if self.architecture.activation is Activation.SILU else "gelu"
        inner = self._linear("gate_up", x, data, context, gate)
        return self.numerics.spread.summed(self._linear("down", inner, data, context))


class Decoder(nn.Module):
    """Embedding and all layers; the head is applied by the caller to the rows that need it."""

    architecture: ModelArchitecture
    numerics: Numerics

    @nn.compact
    def __call__(
        self,
        ids: Int32[Array, " tokens"],
        positions: Int32[Array, " tokens"],
        context: DecodeContext | PrefillContext,
    ) -> tuple[Float[Array, "tokens embed"], NewKeyValues]:
        """Hidden states before the final norm, and the new keys and values of all layers."""
        arch = self.architecture
        x = embedded(arch, self.numerics, self.get_variable("params", "embed"), ids)
        rope = rope_of(arch, positions)
        layers = nn.scan(
            Layer,
            variable_axes={"params": 0, QUERIES: 0},
            variable_broadcast="stacks",
            split_rngs={"params": False},
            in_axes=(0, nn.broadcast, nn.broadcast),  # pyright: ignore[reportArgumentType] - annotated too narrowly
            length=arch.layers,
        )(arch, self.numerics, name="layers")
        return layers(x, layer_data(arch), rope, context)


def embedded(
    architecture: ModelArchitecture,
    numerics: Numerics,
    table: Float[Array, "vocab embed"],
    ids: Int32[Array, " tokens"],
) -> Float[Array, "tokens embed"]:
    """What the first layer gets for each id."""
    x = numerics.spread.looked_up(table, ids).astype(jnp.float32) * architecture.embed_scale
    return x.astype(numerics.residual_dtype)


def rope_of(architecture: ModelArchitecture, positions: Int32[Array, " tokens"]) -> Rope:
    """The rotary tables of a step: the global ones, and the local ones where a layer uses them."""
    tables = [rotary_tables(architecture, positions, local=False)]
    if any(architecture.local_rope):
        tables.append(rotary_tables(architecture, positions, local=True))
    return Rope(*(jnp.stack(part) for part in zip(*tables, strict=True)))


def layer_data(architecture: ModelArchitecture) -> LayerData:
    """The per-layer facts of all layers, stacked."""
    return LayerData(
        jnp.arange(architecture.layers, dtype=jnp.int32),
        jnp.asarray(np.asarray(architecture.windows, np.int32)),
        jnp.asarray(np.asarray(architecture.local_rope, np.int32)),
    )


def parameters(weights: Weights) -> dict[str, object]:
    """The flat weight tree in the shape that the modules read.

    Float weights are cut layer by layer by the scan; int8 stacks stay whole and are read at a layer's index.
    """
    outside = {name: array for name, array in weights.items() if name in _OUTSIDE_LAYERS}
    inside = {name: array for name, array in weights.items() if name not in _OUTSIDE_LAYERS}
    stacks = {name: array for name, array in inside.items() if name.endswith((".codes", ".scale"))}
    layers = {name: array for name, array in inside.items() if name not in stacks}
    return {"params": {**outside, "layers": layers}, "stacks": {"layers": stacks}}


def logits_of(
    architecture: ModelArchitecture, numerics: Numerics, weights: Weights, hidden: Float[Array, "rows embed"]
) -> Float[Array, "rows vocab"]:
    """Final norm, head and logit soft cap; float32."""
    x = rms_norm(hidden, weights["final_norm"], architecture.norm_eps)
    if "head.codes" in weights:
        head = Int8Weight(weights["head.codes"][None], weights["head.scale"][None], jnp.int32(0))
    else:
        head = weights["head"] if "head" in weights else weights["embed"].T
    logits = numerics.spread.together(linear(x, head, implementation=numerics.linear).astype(jnp.float32))
    cap = architecture.logit_softcap
    return cap * jnp.tanh(logits / cap) if cap else logits


def decode_step(
    architecture: ModelArchitecture,
    numerics: Numerics,
    weights: Weights,
    state: DeviceState,
    ints: Int32[Array, "slots columns"],
    floats: Float[Array, "slots float_columns"],
) -> tuple[DeviceState, Sampled]:
    """One id for every slot in use: feeds each slot's last id, samples the next.

    The columns are those of ``planner.batch``; row i is slot i.
    """
    slots = jnp.arange(ints.shape[0], dtype=jnp.int32)
    page_table, lengths, used = ints[:, NUM_INTS:], ints[:, batch.Int.START], ints[:, batch.Int.LENGTH]
    held = _held(architecture, numerics, state.pages, page_table, jnp.where(used > 0, lengths, 0))
    context = DecodeContext(state.pages, held.page_table, held.lengths, held.begins)
    hidden, new = _run(architecture, numerics, weights, state.last_ids[: ints.shape[0]], lengths, context)
    pages = write(state.pages, new, Rows(held.written, slots, lengths, used, slots), weights, numerics)
    logits = logits_of(architecture, numerics, weights, hidden)
    return _sample(state, pages, logits, ints, floats, lengths + 1, numerics)


def prefill_step(
    architecture: ModelArchitecture,
    numerics: Numerics,
    weights: Weights,
    state: DeviceState,
    tokens: Int32[Array, " chunk"],
    ints: Int32[Array, "rows columns"],
    floats: Float[Array, "rows float_columns"],
) -> tuple[DeviceState, Sampled]:
    """Process prompt chunks; rows whose chunk ends their prompt sample their first id into their slot."""
    columns = (batch.Int.SLOT, batch.Int.START, batch.Int.LENGTH, batch.Int.OFFSET)
    rows = Rows(ints[:, NUM_INTS:], *(ints[:, column] for column in columns))
    held = _held(architecture, numerics, state.pages, rows.page_table, rows.starts)
    context = PrefillContext(state.pages, rows._replace(page_table=held.page_table, starts=held.lengths), held.begins)
    hidden, new = _run(architecture, numerics, weights, tokens, places(rows, tokens.shape[0]).position, context)
    pages = write(state.pages, new, rows._replace(page_table=held.written), weights, numerics)
    last = jnp.maximum(rows.offsets + rows.lengths - 1, 0)
    logits = logits_of(architecture, numerics, weights, hidden[last])
    return _sample(state, pages, logits, ints, floats, rows.starts + rows.lengths, numerics)


def set_slot(
    state: DeviceState, slot: Int32[Array, ""], counts: Int32[Array, " vocab"], bias: Float[Array, " vocab"]
) -> DeviceState:
    """Give a slot the penalty counts and the bias of the sequence that enters it."""
    return state._replace(counts=state.counts.at[slot].set(counts), bias=state.bias.at[slot].set(bias))


def _held(
    architecture: ModelArchitecture,
    numerics: Numerics,
    pages: Pages,
    page_table: Int32[Array, "rows width"],
    lengths: Int32[Array, " rows"],
) -> HeldPart:
    shape = pool_shape(pages, architecture.head_dim)
    return held_part(numerics.spread, page_table, lengths, shape.num_pages, shape.page_size)


def _run(
    architecture: ModelArchitecture,
    numerics: Numerics,
    weights: Weights,
    ids: Int32[Array, " tokens"],
    positions: Int32[Array, " tokens"],
    context: DecodeContext | PrefillContext,
) -> tuple[Float[Array, "tokens embed"], NewKeyValues]:
    if "attn_norm.0" in weights:
        return _run_by_layer(architecture, numerics, weights, ids, positions, context)
    module: Any = Decoder(architecture, numerics)
    return module.apply(parameters(weights), ids, positions, context)


def _run_by_layer(
    architecture: ModelArchitecture,
    numerics: Numerics,
    weights: Weights,
    ids: Int32[Array, " tokens"],
    positions: Int32[Array, " tokens"],
    context: DecodeContext | PrefillContext,
) -> tuple[Float[Array, "tokens embed"], NewKeyValues]:
    """``Decoder`` with the layers one after the other, each with arrays of its own."""
    x = embedded(architecture, numerics, weights["embed"], ids)
    rope, new = rope_of(architecture, positions), list[NewKeyValues]()
    for layer in range(architecture.layers):
        own = {name.removesuffix(f".{layer}"): weights[name] for name in weights if name.endswith(f".{layer}")}
        data = LayerData(*map(jnp.int32, (layer, architecture.windows[layer], architecture.local_rope[layer])))
        x, kept = _one_layer(architecture, numerics, own, x, data, rope, context)
        # what is kept to the end of the step is these, and not the product that they were cut out of
        new.append(NewKeyValues(*jax.lax.optimization_barrier(tuple(kept))))
    return x, NewKeyValues(*(jnp.stack(part) for part in zip(*new, strict=True)))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _one_layer(
    architecture: ModelArchitecture,
    numerics: Numerics,
    weights: Weights,
    x: Float[Array, "tokens embed"],
    data: LayerData,
    rope: Rope,
    context: DecodeContext | PrefillContext,
) -> tuple[Float[Array, "tokens embed"], NewKeyValues]:
    """A layer; under jit, so that all layers of a program are traced once."""
    module: Any = Layer(architecture, numerics)
    return module.apply({"params": weights}, x, data, rope, context)


def write(pages: Pages, new: NewKeyValues, rows: Rows, weights: Weights, numerics: Numerics) -> Pages:
    """The pool with the keys and values of a step, as ``Decoder`` gave them for ``rows``."""
    energy = weights.get(QUERY_ENERGY)
    return page_write(pages, new.k, new.v, *rows, energy=energy, implementation=numerics.attention)


def _sample(
    state: DeviceState,
    pages: Pages,
    logits: Float[Array, "rows vocab"],
    ints: Int32[Array, "rows columns"],
    floats: Float[Array, "rows float_columns"],
    positions: Int32[Array, " rows"],
    numerics: Numerics,
) -> tuple[DeviceState, Sampled]:
    num_slots = state.last_ids.shape[0]
    rows = SampleRows(
        slot=jnp.clip(ints[:, batch.Int.SLOT], 0, num_slots - 1),
        position=positions,
        seed_low=ints[:, batch.Int.SEED_LOW],
        seed_high=ints[:, batch.Int.SEED_HIGH],
        temperature=floats[:, batch.Float.TEMPERATURE],
        top_k=ints[:, batch.Int.TOP_K],
        top_p=floats[:, batch.Float.TOP_P],
        min_p=floats[:, batch.Float.MIN_P],
        repetition=floats[:, batch.Float.REPETITION],
        presence=floats[:, batch.Float.PRESENCE],
        frequency=floats[:, batch.Float.FREQUENCY],
        penalised=ints[:, batch.Int.PENALISED],
        biased=ints[:, batch.Int.BIASED],
        suppressed=ints[:, batch.Int.SUPPRESSED : batch.Int.SUPPRESSED + NUM_SUPPRESSED],
        top_logprobs=ints[:, batch.Int.TOP_LOGPROBS],
    )
    out = sample(
        logits, rows, state.counts, state.bias, num_top=min(NUM_TOP_LOGPROBS, logits.shape[1]),
        implementation=numerics.sampling,
    )  # fmt: skip
    # rows that sample nothing write outside, where the write is dropped
    target = jnp.where(ints[:, batch.Int.SAMPLE] > 0, ints[:, batch.Int.SLOT], num_slots)
    return DeviceState(
        pages=pages,
        last_ids=state.last_ids.at[target].set(out.ids, mode="drop"),
        counts=state.counts.at[target, out.ids].add(1, mode="drop"),
        bias=state.bias,
    ), out
