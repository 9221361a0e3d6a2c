"""Rotary position embedding: inverse frequencies of every scaling kind, and their application.

Owns the formulas; reads a ModelArchitecture. Frequencies are computed in float64 on the host and become constants of
a program, so that no step pays for them.

Source: RoFormer, arXiv 2104.09864; linear interpolation, arXiv 2306.15595; YaRN, arXiv 2309.00071; the Llama 3.1 model
card for its three-band scaling. The pairing is the half-split one: channel i turns with channel i + head_dim / 2.
"""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from planner.architecture import ModelArchitecture, RopeKind, RopeScaling


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling) -> np.ndarray:
    """Radians a position for each channel pair, float64 [head_dim / 2]."""
    exponent = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    plain = 1.0 / theta**exponent
    if scaling.factors:
        plain = plain / np.asarray(scaling.factors, np.float64)
    match scaling.kind:
        case RopeKind.NONE:
            return plain
        case RopeKind.LINEAR:
            return plain / scaling.factor
        case RopeKind.LLAMA3:
            return _three_bands(plain, scaling)
        case RopeKind.YARN:
            return _yarn(plain, head_dim, theta, scaling)


def _three_bands(plain: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Keep short wavelengths, divide long ones by the factor, blend between."""
    wavelength = 2 * math.pi / plain
    turns = scaling.original_context / wavelength
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)
    return (1 - blend) * plain / scaling.factor + blend * plain


def _yarn(plain: np.ndarray, head_dim: int, theta: float, scaling: RopeScaling) -> np.ndarray:
    """Interpolate the channels that turn few times over the original context, leave those that turn often."""

    def channel(turns: float) -> float:
        return head_dim * math.log(scaling.original_context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = channel(scaling.beta_fast), channel(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (np.arange(head_dim // 2, dtype=np.float64) - low) / max(high - low, 0.001)
    keep = 1 - np.clip(ramp, 0.0, 1.0)
    return plain / scaling.factor * (1 - keep) + plain * keep


def rotary_tables(
    architecture: ModelArchitecture, positions: Int32[Array, " tokens"], *, local: bool
) -> tuple[Float[Array, "tokens half"], Float[Array, "tokens half"]]:
    """Cosine and sine of each position and channel pair, attention factor included.

    Args:
        architecture: gives theta and scaling.
        positions: token positions.
        local: use the unscaled ``rope_local_theta`` of sliding-window layers.
    """
    scaling = RopeScaling() if local else architecture.rope_scaling
    theta = architecture.rope_local_theta if local else architecture.rope_theta
    frequencies = inverse_frequencies(architecture.head_dim, theta, scaling).astype(np.float32)
    angles = positions.astype(jnp.float32)[:, None] * frequencies[None]
    factor = scaling.attention_factor if scaling.kind is RopeKind.YARN else 1.0
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def rotate(
    x: Float[Array, "tokens heads head_dim"], cos: Float[Array, "tokens half"], sin: Float[Array, "tokens half"]
) -> Float[Array, "tokens heads head_dim"]:
    """Turn each channel pair by its angle; the result has the tables' dtype."""
    first, second = jnp.split(x.astype(cos.dtype), 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
