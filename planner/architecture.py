"""ModelArchitecture: what a checkpoint's configuration says about the shape of its computation.

Owns the reading of a Hugging Face ``config.json`` and the checks that make a checkpoint servable. Reads plain
dictionaries; never imports jax. Everything that differs between model families is data here, so that the decoder
has one set of layers and no family switch.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


class UnsupportedArchitectureError(ValueError):
    """A checkpoint asks for a computation that this version cannot do; the message names it and what is supported."""


class Activation(StrEnum):
    """The gate function of the feed-forward layer."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"


class RopeKind(StrEnum):
    """How rotary frequencies are stretched beyond the trained context."""

    NONE = "none"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Parameters of a rotary scaling; fields that a kind does not use keep their defaults.

    ``factors`` are divisors of the inverse frequencies, one a frequency (head_dim / 2), applied before the kind's own
    scaling; empty = none. GGUF files carry the llama3 stretch in this form.

    Source: the Llama 3.1 model card (llama3), YaRN, arXiv 2309.00071 section 3 (yarn).
    """

    kind: RopeKind = RopeKind.NONE
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True
    factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelArchitecture:
    """The shape of one model. Lengths are in elements, ``context`` in tokens.

    ``windows`` has one entry a layer: 0 attends to everything, w > 0 to the newest w positions. ``local_rope`` marks
    the layers that use ``rope_local_theta`` without scaling. Norm weights are stored so that ``x / rms(x) * weight``
    is the whole meaning; loaders add the one that some families keep out of the file.
    """

    family: str
    layers: int
    embed: int
    ffw: int
    q_heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    norm_eps: float
    rope_theta: float
    query_scale: float
    activation: Activation = Activation.SILU
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    rope_local_theta: float = 0.0
    local_rope: tuple[bool, ...] = ()
    windows: tuple[int, ...] = ()
    tied_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    embed_scale: float = 1.0
    attn_softcap: float = 0.0
    logit_softcap: float = 0.0

    def __post_init__(self) -> None:
        for name in ("layers", "embed", "ffw", "q_heads", "kv_heads", "head_dim", "vocab", "context"):
            value = getattr(self, name)
            if not isinstance(value, int) or value <= 0:
                raise UnsupportedArchitectureError(f"{name} is {value!r}; it must be a whole number above 0")
        if self.q_heads % self.kv_heads:
            raise UnsupportedArchitectureError(
                f"q_heads {self.q_heads} is no multiple of kv_heads {self.kv_heads}; grouped attention needs one"
            )
        if self.head_dim % 2:
            raise UnsupportedArchitectureError(f"head_dim {self.head_dim} is odd; rotary embedding needs pairs")
        for name in ("windows", "local_rope"):
            per_layer = getattr(self, name)
            if not per_layer:
                object.__setattr__(self, name, (0 if name == "windows" else False,) * self.layers)
            elif len(per_layer) != self.layers:
                raise UnsupportedArchitectureError(
                    f"{name} has {len(per_layer)} entries for {self.layers} layers; one a layer is needed"
                )
        factors = self.rope_scaling.factors
        if factors and (len(factors) != self.head_dim // 2 or min(factors) <= 0):
            raise UnsupportedArchitectureError(
                f"rope factors: {len(factors)} values from {min(factors)}; {self.head_dim // 2} above 0 are needed"
            )

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.q_heads // self.kv_heads

    def parameters(self) -> int:
        """Number of weights, embeddings included once when tied."""
        attn = 2 * self.embed * (self.q_heads + self.kv_heads) * self.head_dim
        layer = attn + 3 * self.embed * self.ffw + (4 if self.post_norms else 2) * self.embed
        layer += 2 * self.head_dim if self.qk_norm else 0
        layer += (self.q_heads + 2 * self.kv_heads) * self.head_dim if self.qkv_bias else 0
        return self.layers * layer + self.embed + self.vocab * self.embed * (1 if self.tied_embeddings else 2)

    def kv_bytes_per_token(self, element_bytes: float) -> float:
        """Bytes of keys and values that one token position holds over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * element_bytes

    def to_json(self) -> dict[str, Any]:
        """The architecture as plain JSON values; ``from_json`` gives back an equal one."""
        return json.loads(json.dumps(asdict(self)))

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> "ModelArchitecture":
        """Read what ``to_json`` wrote.

        Raises:
            UnsupportedArchitectureError: a field is unknown, missing or of the wrong kind.
        """
        try:
            values = dict(document)
            scaling = dict(values.pop("rope_scaling"))
            scaling["kind"] = RopeKind(scaling["kind"])
            scaling["factors"] = tuple(scaling["factors"])
            values["activation"] = Activation(values["activation"])
            for name in ("windows", "local_rope"):
                values[name] = tuple(values[name])
            return cls(**values, rope_scaling=RopeScaling(**scaling))
        except (KeyError, TypeError, ValueError) as error:
            raise UnsupportedArchitectureError(f"not a stored architecture of this version: {error}") from error


SUPPORTED_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3")
_HF_MODEL_TYPES = {
    "llama": "llama",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3_text": "gemma3",
}
_LARGEST = 1 << 24
_MOST = {"num_hidden_layers": 1024, "max_position_embeddings": 1 << 31}
"""Bounds of sizes, far beyond any model there is; others have ``_LARGEST``."""
_ACTIVATIONS = {"silu": Activation.SILU, "swish": Activation.SILU, "gelu_pytorch_tanh": Activation.GELU_TANH}


def from_hf_config(config: Mapping[str, Any]) -> ModelArchitecture:
    """Read a Hugging Face ``config.json``.

    Args:
        config: the parsed file; a ``text_config`` inside it (multimodal wrappers) is followed for gemma3.

    Raises:
        UnsupportedArchitectureError: the family, the activation, the rope kind or a size cannot be served.
    """
    try:
        return _from_hf_config(config)
    except UnsupportedArchitectureError:
        raise
    except (TypeError, ValueError, OverflowError) as error:
        raise UnsupportedArchitectureError(f"config.json has a value of the wrong kind: {error}") from error


def _from_hf_config(config: Mapping[str, Any]) -> ModelArchitecture:
    model_type = str(config.get("model_type", ""))
    if model_type == "gemma3" and isinstance(config.get("text_config"), Mapping):
        config = config["text_config"]
        model_type = "gemma3_text"
    family = _HF_MODEL_TYPES.get(model_type)
    if family is None:
        raise UnsupportedArchitectureError(
            f"model_type {model_type!r} is not supported; supported: {', '.join(sorted(_HF_MODEL_TYPES))}"
        )
    gemma = family == "gemma3"
    layers = _whole(config, "num_hidden_layers")
    q_heads = _whole(config, "num_attention_heads")
    embed = _whole(config, "hidden_size")
    head_dim = _head_dim(config, embed, q_heads, default=256 if gemma else None)
    windows = _windows(config, family, layers)
    rope, local = _rope_parameters(config, family)
    scaling = read_rope_scaling(rope, _whole(config, "max_position_embeddings", 131072 if gemma else 2048))
    query_scalar = config.get("query_pre_attn_scalar") if gemma else None
    name, default = ("hidden_activation", "gelu_pytorch_tanh") if gemma else ("hidden_act", "silu")
    activation = str(config.get(name) or default)
    if activation not in _ACTIVATIONS:
        raise UnsupportedArchitectureError(
            f"hidden activation {activation!r} is not supported; supported: {', '.join(_ACTIVATIONS)}"
        )
    if config.get("attention_bias") and family != "qwen2":
        raise UnsupportedArchitectureError("attention_bias true is not supported here; only qwen2 has biases")
    if config.get("mlp_bias"):
        raise UnsupportedArchitectureError("mlp_bias true is not supported")
    return ModelArchitecture(
        family=family,
        layers=layers,
        embed=embed,
        ffw=_whole(config, "intermediate_size"),
        q_heads=q_heads,
        kv_heads=_whole(config, "num_key_value_heads", q_heads),
        head_dim=head_dim,
        vocab=_whole(config, "vocab_size"),
        context=_whole(config, "max_position_embeddings", 131072 if gemma else 2048),
        norm_eps=_positive(config, "rms_norm_eps", 1e-6),
        rope_theta=_positive(rope, "rope_theta", 1_000_000.0 if gemma else 10_000.0),
        rope_scaling=scaling,
        rope_local_theta=local,
        local_rope=tuple(w > 0 for w in windows) if gemma else (),
        query_scale=1.0 / math.sqrt(float(query_scalar) if query_scalar else head_dim),
        activation=_ACTIVATIONS[activation],
        windows=windows,
        tied_embeddings=bool(config.get("tie_word_embeddings", gemma)),
        qkv_bias=family == "qwen2",
        qk_norm=family in ("qwen3", "gemma3"),
        post_norms=gemma,
        embed_scale=math.sqrt(embed) if gemma else 1.0,
        attn_softcap=float(config.get("attn_logit_softcapping") or 0.0),
        logit_softcap=float(config.get("final_logit_softcapping") or 0.0),
    )


def read_rope_scaling(rope: Mapping[str, Any], context: int) -> RopeScaling:
    """Translate a ``rope_scaling`` / ``rope_parameters`` mapping.

    Args:
        rope: the mapping; the kind stands under ``rope_type`` or the older ``type``.
        context: ``max_position_embeddings``, which stands in where the original context is not given.

    Raises:
        UnsupportedArchitectureError: the kind is unknown.
    """
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    share = rope.get("partial_rotary_factor")
    if share is not None and float(share) != 1.0:
        raise UnsupportedArchitectureError(f"partial_rotary_factor {share} is not supported; only 1.0, whole heads, is")
    if kind == "default":
        return RopeScaling()
    if kind not in ("linear", "llama3", "yarn"):
        raise UnsupportedArchitectureError(f"rope scaling {kind!r} is not supported; supported: linear, llama3, yarn")
    factor = _positive(rope, "factor", None)
    original = int(rope.get("original_max_position_embeddings") or context)
    if kind == "linear":
        return RopeScaling(RopeKind.LINEAR, factor=factor)
    if kind == "llama3":
        return RopeScaling(
            RopeKind.LLAMA3,
            factor=factor,
            low_freq_factor=float(rope.get("low_freq_factor", 1.0)),
            high_freq_factor=float(rope.get("high_freq_factor", 4.0)),
            original_context=original,
        )
    return RopeScaling(
        RopeKind.YARN,
        factor=factor,
        original_context=original,
        beta_fast=float(rope.get("beta_fast") or 32.0),
        beta_slow=float(rope.get("beta_slow") or 1.0),
        attention_factor=_yarn_attention_factor(rope, factor),
        truncate=bool(rope.get("truncate", True)),
    )


def _yarn_attention_factor(rope: Mapping[str, Any], factor: float) -> float:
    """Scale of cos and sin under YaRN; ``mscale`` spellings as in transformers' ``modeling_rope_utils``."""
    given = rope.get("attention_factor")
    if given is not None:
        return float(given)

    def mscale(scale: float, weight: float = 1.0) -> float:
        return 1.0 if scale <= 1 else 0.1 * weight * math.log(scale) + 1.0

    top, bottom = rope.get("mscale"), rope.get("mscale_all_dim")
    if top and bottom:
        return mscale(factor, float(top)) / mscale(factor, float(bottom))
    return mscale(factor)


def _whole(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key, default)
    if value is None:
        value = default
    most, number = _MOST.get(key, _LARGEST), _finite(value)
    if number is None or number != int(number) or not 0 < number <= most:
        raise UnsupportedArchitectureError(
            f"config.json: {key} is {_shown(value)}; it must be a whole number in 1..{most}"
        )
    return int(number)


def _positive(values: Mapping[str, Any], key: str, default: float | None) -> float:
    value = values.get(key)
    number = _finite(default if value is None else value)
    if number is None or number <= 0:
        raise UnsupportedArchitectureError(f"config.json: {key} is {_shown(value)}; it must be a number above 0")
    return float(number)


def _finite(value: object) -> int | float | None:
    """A number that is one, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if isinstance(value, int) or math.isfinite(value) else None


def _shown(value: object) -> str:
    """A value as it stands in a file, cut to a length that can be read."""
    text = "missing" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _head_dim(config: Mapping[str, Any], embed: int, q_heads: int, default: int | None) -> int:
    explicit = config.get("head_dim")
    if explicit is not None:
        return _whole(config, "head_dim")
    if default is not None:
        return default
    if embed % q_heads:
        raise UnsupportedArchitectureError(
            f"config.json: hidden_size {embed} is no multiple of num_attention_heads {q_heads}; there is no head_dim"
        )
    return embed // q_heads


def _windows(config: Mapping[str, Any], family: str, layers: int) -> tuple[int, ...]:
    width = int(config.get("sliding_window") or 0)
    kinds = config.get("layer_types")
    if kinds is not None:
        unknown = sorted(set(map(str, kinds)) - {"full_attention", "sliding_attention"})
        if unknown:
            raise UnsupportedArchitectureError(
                f"layer_types {unknown} are not supported; full and sliding attention are"
            )
        if len(kinds) != layers:
            raise UnsupportedArchitectureError(f"layer_types has {len(kinds)} entries for {layers} layers")
        return tuple(width if kind == "sliding_attention" else 0 for kind in kinds)
    if family == "gemma3":
        pattern = int(config.get("sliding_window_pattern") or 6)
        width = width or 4096
        return tuple(0 if (layer + 1) % pattern == 0 else width for layer in range(layers))
    if family == "mistral":
        return (width,) * layers
    if family in ("qwen2", "qwen3") and config.get("use_sliding_window") and width:
        full = int(config.get("max_window_layers", layers))
        return tuple(width if layer >= full else 0 for layer in range(layers))
    return (0,) * layers


def _rope_parameters(config: Mapping[str, Any], family: str) -> tuple[Mapping[str, Any], float]:
    """The rope mapping of global layers (theta included) and the theta of local layers (0 where there are none)."""
    nested = config.get("rope_parameters")
    if isinstance(nested, Mapping) and isinstance(nested.get("full_attention"), Mapping):
        sliding = nested.get("sliding_attention") or {}
        return nested["full_attention"], float(sliding.get("rope_theta", 10_000.0)) if family == "gemma3" else 0.0
    scaling = nested if isinstance(nested, Mapping) else config.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise UnsupportedArchitectureError(f"config.json: rope_scaling is {_shown(scaling)}; it must be an object")
    rope = dict(scaling)
    for key in ("rope_theta", "partial_rotary_factor"):
        if config.get(key) is not None:
            rope.setdefault(key, config[key])
    local = float(config.get("rope_local_base_freq") or 10_000.0) if family == "gemma3" else 0.0
    return rope, local
