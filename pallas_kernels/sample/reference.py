"""sample: the plain meaning, with a full sort; and the adjustments and the noise that every implementation shares."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.sample.noise import UNIFORM_BITS, gumbel_of


def adjust(logits: Array, rows: tuple, counts: Array, bias: Array, *, prompt_bit: int = 1 << 16) -> Array:
    """Logits after bias, penalties and suppression."""
    seen = counts[rows.slot]
    output_count = (seen & (prompt_bit - 1)).astype(jnp.float32)
    logits = jnp.where(rows.biased[:, None] > 0, logits + bias[rows.slot], logits)
    repetition = rows.repetition[:, None]
    penalised = jnp.where(seen > 0, jnp.where(logits > 0, logits / repetition, logits * repetition), logits)
    penalised -= jnp.where(output_count > 0, rows.presence[:, None], 0.0) + rows.frequency[:, None] * output_count
    return suppress(jnp.where(rows.penalised[:, None] > 0, penalised, logits), rows.suppressed)


def suppress(logits: Float[Array, "rows vocab"], ids: Int32[Array, "rows n"]) -> Float[Array, "rows vocab"]:
    """Logits with the given ids (-1 = none) set to minus infinity."""
    ids = jnp.where(ids < 0, logits.shape[1], ids)
    return logits.at[jnp.arange(logits.shape[0])[:, None], ids].set(-jnp.inf, mode="drop")


def gumbel(rows: tuple, ids: Int32[Array, "rows n"]) -> Float[Array, "rows n"]:
    """Gumbel noise of each (row, id), a function of seed, position and id alone.

    The bits are both words of Threefry-2x32 under the row's key at counter ``id``, joined by exclusive or.
    """

    def one_row(low: Array, high: Array, position: Array, row_ids: Array) -> Array:
        data = jax.lax.bitcast_convert_type(jnp.stack([high, low]), jnp.uint32)
        key = jax.random.fold_in(jax.random.wrap_key_data(data, impl="threefry2x32"), position)
        words = jax.random.key_data(jax.vmap(lambda i: jax.random.fold_in(key, i))(row_ids))
        bits = words[:, 0] ^ words[:, 1]
        return gumbel_of((bits >> (32 - UNIFORM_BITS)).astype(jnp.int32))

    return jax.vmap(one_row)(rows.seed_low, rows.seed_high, rows.position, ids)


def min_p_floor(min_p: Float[Array, "*rows"]) -> Float[Array, "*rows"]:
    """The smallest scaled logit that min-p keeps; minus infinity where it is off."""
    return jnp.where(min_p > 0, jnp.log(jnp.maximum(min_p, 1e-38)), -jnp.inf)


def scaled(logits: Float[Array, "rows vocab"], temperature: Float[Array, " rows"]) -> Float[Array, "rows vocab"]:
    """Logits relative to the largest, divided by the temperature (1 for greedy rows)."""
    divisor = jnp.where(temperature > 0, temperature, 1.0)[:, None]
    return (logits - logits.max(-1, keepdims=True)) / divisor


def sample(logits: Array, rows: tuple, counts: Array, bias: Array, *, num_top: int) -> tuple[Array, ...]:
    """See ``op.sample``."""
    vocab = logits.shape[1]
    adjusted = adjust(logits, rows, counts, bias)
    z = scaled(adjusted, rows.temperature)
    descending = jnp.sort(z, axis=-1, descending=True)
    last = jnp.where(rows.top_k > 0, jnp.minimum(rows.top_k, vocab), vocab) - 1
    kth = jnp.take_along_axis(descending, last[:, None], axis=1)
    mass = jnp.exp(jnp.where(descending >= kth, descending, -jnp.inf))
    before = jnp.cumsum(mass, axis=1) - mass
    inside = (before < rows.top_p[:, None] * mass.sum(1, keepdims=True)) | (jnp.arange(vocab) == 0)
    inside |= rows.top_p[:, None] >= 1  # off, whatever the sums round to
    nucleus = jnp.min(jnp.where(inside, descending, jnp.inf), axis=1, keepdims=True)
    keep = (z >= kth) & (z >= nucleus) & (z >= min_p_floor(rows.min_p)[:, None])
    noise = gumbel(rows, jnp.broadcast_to(jnp.arange(vocab), z.shape))
    drawn = jnp.argmax(jnp.where(keep, z + noise, -jnp.inf), axis=-1)
    ids = jnp.where(rows.temperature > 0, drawn, jnp.argmax(adjusted, axis=-1)).astype(jnp.int32)
    logprobs = jax.nn.log_softmax(logits)
    top_logprobs, top_ids = jax.lax.top_k(logprobs, num_top)
    chosen = jnp.take_along_axis(logprobs, ids[:, None], axis=1)[:, 0]
    return ids, chosen, top_ids.astype(jnp.int32), top_logprobs
