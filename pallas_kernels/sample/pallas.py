"""sample by a Triton kernel: one program chooses the id of one row, and nothing it does asks the host.

The lanes of the first pass remember the largest logit that each has seen. The largest of all is the greedy choice. The
n-th largest lane is a lower bound of the n-th largest logit, and hardly more than n ids reach it: a row that draws
copies those into one tile, which tells its choice whenever top-k, top-p or min-p keep no others. Else thresholds are
searched over the whole vocabulary. What a row does not need it skips.

Owns the kernel; passes and searches are in the modules beside it. Never sorts.
Source: Gumbel-max trick (Gumbel, 1954).
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.access import DIRECT, Access
from pallas_kernels.sample.noise import Key, noise, row_key
from pallas_kernels.sample.passes import Best, Few, Numbers, Passes, Tiling, Weigh, next_of, reached, tiling
from pallas_kernels.sample.reference import min_p_floor
from pallas_kernels.sample.search import ZERO, Enough, Thresholds, image, largest_threshold

_COMPLETION = (1 << 16) - 1
"""Of a count, the occurrences in the completion."""


class _Rules(NamedTuple):
    """How a row draws: ``top_k`` is 0 where it keeps all, ``floor`` is the least scaled logit of min-p."""

    top_k: Int32[Array, ""]
    top_p: Float[Array, ""]
    floor: Float[Array, ""]
    key: Key
    off: Float[Array, ""]
    """Minus infinity, the limit that keeps all; computed, since a branch of a kernel cannot return a constant."""


def _kernel(
    logits_ref: jax.Ref,  # [rows vocab] float32
    rows: tuple,  # SampleRows of refs: [rows] int32 or float32, suppressed [rows num_suppressed] int32
    counts_ref: jax.Ref,  # [slots vocab] int32
    bias_ref: jax.Ref,  # [slots vocab] float32
    ids_ref: jax.Ref,  # [rows] int32
    logprob_ref: jax.Ref,  # [rows] float32
    top_ids_ref: jax.Ref,  # [rows num_top] int32
    top_logprobs_ref: jax.Ref,  # [rows num_top] float32
    adjusted_ref: jax.Ref,  # [rows vocab] float32: room for the logits of rows that draw
    few_ref: jax.Ref,  # [rows few] int32: room for the likeliest ids
    *,
    tile: Tiling,
    access: Access,
    interpret: bool,
) -> None:
    # Bytes: a greedy row reads its logits once; one that draws writes them once and reads them twice, more where it
    # searches all. Bound by the latency of one multiprocessor's loads; over all of a vocabulary by the noise, about 150
    # operations an id.
    row = pl.program_id(0)
    barrier = (lambda: None) if interpret else plgpu.debug_barrier
    passes = Passes(row, logits_ref.shape[1], tile, access, barrier, few_ref)
    temperature = access.load(rows.temperature, (row,))
    best = passes.best(_adjusting(passes, rows, (logits_ref, counts_ref, bias_ref, adjusted_ref), temperature > 0))
    peak, likeliest = best.first()

    def scaled(logit: Array) -> Array:
        """Relative to the largest and divided by the temperature; the largest is 0 whatever the temperature."""
        return jnp.where(logit == peak, 0.0, (logit - peak) / temperature)

    def numbers(ids: Array, valid: Array) -> Array:
        return jnp.where(valid, scaled(access.load(adjusted_ref, (row, ids), valid)), -jnp.inf)

    def drawn() -> Array:
        barrier()
        return _draw(passes, numbers, scaled(best.number), _rules(rows, row, access, passes.vocab))

    # a row without any id left has the first one, as in the reference
    chosen = jax.lax.cond((temperature > 0) & (peak > -jnp.inf), drawn, lambda: likeliest)
    access.store(ids_ref, (row,), chosen)
    out_refs = logprob_ref, top_ids_ref, top_logprobs_ref
    asked = access.load(rows.top_logprobs, (row,)) >= 0
    jax.lax.cond(asked, lambda: _logprobs(passes, logits_ref, chosen, out_refs), lambda: _no_logprobs(passes, out_refs))


def _adjusting(passes: Passes, rows: tuple, refs: tuple[jax.Ref, ...], drawn: Array) -> Numbers:
    """Reads logits after bias, penalties and suppression, and keeps them for a row that draws."""
    access, row = passes.access, passes.row
    logits_ref, counts_ref, bias_ref, adjusted_ref = refs
    slot = access.load(rows.slot, (row,))
    biased, penalised = (access.load(ref, (row,)) > 0 for ref in (rows.biased, rows.penalised))
    repetition, presence, frequency = (
        access.load(ref, (row,)) for ref in (rows.repetition, rows.presence, rows.frequency)
    )
    num_suppressed = rows.suppressed.shape[1]

    def adjusted(ids: Array, valid: Array) -> Array:
        logit = access.load(logits_ref, (row, ids), valid)
        logit += access.load(bias_ref, (slot, ids), valid & biased)
        seen = access.load(counts_ref, (slot, ids), valid & penalised)  # 0 without penalties, which changes nothing
        count = (seen & _COMPLETION).astype(jnp.float32)
        logit = jnp.where(seen > 0, jnp.where(logit > 0, logit / repetition, logit * repetition), logit)
        logit -= jnp.where(count > 0, presence, 0.0) + frequency * count
        logit = jnp.where(valid, logit, -jnp.inf)

        def hide(place: Array, logit: Array) -> Array:
            return jnp.where(ids == access.load(rows.suppressed, (row, place)), -jnp.inf, logit)

        logit = jax.lax.fori_loop(0, num_suppressed, hide, logit)
        access.store(adjusted_ref, (row, ids), logit, valid & drawn)
        return logit

    return adjusted


def _rules(rows: tuple, row: Array, access: Access, vocab: int) -> _Rules:
    top_k, top_p, min_p, low, high, position = (
        access.load(ref, (row,))
        for ref in (rows.top_k, rows.top_p, rows.min_p, rows.seed_low, rows.seed_high, rows.position)
    )
    top_k = jnp.where((top_k > 0) & (top_k < vocab), top_k, 0)
    floor = min_p_floor(min_p)
    return _Rules(top_k, top_p, floor, row_key(low, high, position), jnp.minimum(floor, -jnp.inf))


def _draw(passes: Passes, numbers: Numbers, lanes: Float[Array, " lanes"], rules: _Rules) -> Int32[Array, ""]:
    """The id with the largest sum of number and noise among those that the rules keep.

    Args:
        passes: the row.
        numbers: scaled logits, of which the largest is 0.
        lanes: the largest of each lane.
        rules: how the row draws.
    """
    nobody = jnp.minimum(rules.top_k, -1)

    def from_few(few: Few, kept: Array) -> Array:
        score = jnp.where(few.number >= kept, few.number + noise(rules.key, few.id), -jnp.inf)
        return Best(score, few.id).first()[1]

    def from_all(kept: Array) -> Array:
        def score(ids: Array, valid: Array) -> Array:
            number = numbers(ids, valid)
            return jnp.where(number >= kept, number + noise(rules.key, ids), -jnp.inf)

        return passes.best(score).first()[1]

    def bounded() -> tuple[Array, Array]:
        few, kept, told = _few_that_tell(passes, numbers, lanes, rules)
        return jax.lax.cond(
            told, lambda: (kept, from_few(few, kept)), lambda: (_full_limit(passes, numbers, rules), nobody)
        )

    any_rule = (rules.top_k > 0) | (rules.top_p < 1) | (rules.floor > -jnp.inf)
    kept, chosen = jax.lax.cond(any_rule, bounded, lambda: (rules.off, nobody))
    return jax.lax.cond(chosen >= 0, lambda: chosen, lambda: from_all(kept))


def _few_that_tell(passes: Passes, numbers: Numbers, lanes: Array, rules: _Rules) -> tuple[Few, Array, Array]:
    """The likeliest ids, the smallest number that the rules keep of them, and whether they keep no others."""
    tile = passes.tile
    few_top_k = (rules.top_k > 0) & (rules.top_k <= tile.wanted)
    wanted = jnp.where(few_top_k, rules.top_k, tile.wanted).astype(jnp.float32)
    least = reached(lanes, jnp.int32(ZERO), jnp.ones_like, wanted)
    few = passes.copy(numbers, least, jnp.float32(0))

    def threshold(weigh: Weigh, wanted: Array) -> Array:
        return reached(few.number, jnp.int32(ZERO), weigh, wanted)

    def total(weigh: Weigh) -> Array:
        return jnp.where(few_top_k, weigh(few.number).sum(), few.total)

    limits = rules._replace(top_k=jnp.where(few_top_k, rules.top_k, 0))
    kept = _limit(limits, threshold, total)
    # a top-k beyond the few bounds top-p's total, so that only the whole vocabulary tells
    told = (few.count <= tile.few) & (few_top_k | (rules.top_k == 0)) & (least <= kept)
    return few, kept, told


def _full_limit(passes: Passes, numbers: Numbers, rules: _Rules) -> Float[Array, ""]:
    """The smallest number that the rules keep, from the whole vocabulary."""

    def threshold(weigh: Weigh, wanted: Array) -> Array:
        def enough(thresholds: Thresholds) -> Enough:
            low, middle, high = passes.sums(numbers, thresholds, weigh)
            return low >= wanted, middle >= wanted, high >= wanted

        return largest_threshold(jnp.int32(ZERO), enough)

    def total(weigh: Weigh) -> Array:
        everything = jnp.float32(-jnp.inf)
        return passes.sums(numbers, (everything, everything, everything), weigh)[0]

    return _limit(rules, threshold, total)


def _limit(rules: _Rules, threshold: Callable[[Weigh, Array], Array], total: Callable[[Weigh], Array]) -> Array:
    """The smallest number that the rules keep; ``threshold`` finds the largest that keeps enough of ``total``."""

    def only(needed: Array, search: Callable[[], Array]) -> Array:
        return jax.lax.cond(needed, search, lambda: rules.off)

    kth = only(rules.top_k > 0, lambda: threshold(jnp.ones_like, rules.top_k.astype(jnp.float32)))

    def mass(number: Array) -> Array:
        return jnp.where(number >= kth, jnp.exp(number), 0.0)

    nucleus = only(rules.top_p < 1, lambda: threshold(mass, rules.top_p * total(mass)))
    return jnp.maximum(jnp.maximum(kth, nucleus), rules.floor)


def _logprobs(passes: Passes, logits_ref: jax.Ref, chosen: Array, out_refs: tuple[jax.Ref, ...]) -> None:
    """Store the raw log-probabilities of the chosen id and of the likeliest."""
    access, row = passes.access, passes.row
    logprob_ref, top_ids_ref, top_logprobs_ref = out_refs
    num_top = top_ids_ref.shape[1]

    def raw(ids: Array, valid: Array) -> Array:
        return jnp.where(valid, access.load(logits_ref, (row, ids), valid), -jnp.inf)

    lanes = passes.best(raw)
    peak, _ = lanes.first()
    least = reached(lanes.number, image(peak), jnp.ones_like, jnp.float32(num_top))
    few = passes.copy(raw, least, peak)
    normaliser = jnp.log(few.total)
    access.store(logprob_ref, (row,), access.load(logits_ref, (row, chosen)) - peak - normaliser)

    def store_top(after: Callable[[tuple[Array, Array]], tuple[Array, Array]]) -> None:
        def one(place: Array, before: tuple[Array, Array]) -> tuple[Array, Array]:
            number, token_id = after(before)
            # of logits that are no numbers there may be too few others
            access.store(top_ids_ref, (row, place), jnp.minimum(token_id, passes.vocab - 1))
            access.store(top_logprobs_ref, (row, place), number - peak - normaliser)
            return number, token_id

        jax.lax.fori_loop(0, num_top, one, (jnp.float32(jnp.inf), jnp.int32(-1)))

    jax.lax.cond(
        few.count <= passes.tile.few,
        lambda: store_top(functools.partial(next_of, few)),
        lambda: store_top(functools.partial(passes.next, raw)),
    )


def _no_logprobs(passes: Passes, out_refs: tuple[jax.Ref, ...]) -> None:
    """Store zeros, which nobody reads."""
    access, row = passes.access, passes.row
    logprob_ref, top_ids_ref, top_logprobs_ref = out_refs
    num_top = top_ids_ref.shape[1]
    access.store(logprob_ref, (row,), jnp.float32(0))
    place = jnp.arange(pl.next_power_of_2(num_top), dtype=jnp.int32)
    access.store(top_ids_ref, (row, place), jnp.zeros_like(place), place < num_top)
    access.store(top_logprobs_ref, (row, place), jnp.zeros(place.shape, jnp.float32), place < num_top)


def sample(
    logits: Float[Array, "rows vocab"],
    rows: tuple,
    counts: Int32[Array, "slots vocab"],
    bias: Float[Array, "slots vocab"],
    *,
    num_top: int,
    interpret: bool = False,
    tile: Tiling | None = None,
    access: Access = DIRECT,
) -> tuple[Array, ...]:
    """See ``op.sample``; rows that ask for no log-probabilities get zeros there.

    ``interpret`` runs the kernel on any backend, slowly; ``tile`` replaces the sizes that the vocabulary would give;
    ``access`` lets a caller watch what is read and written.
    """
    num_rows, vocab = logits.shape
    tile = tile or tiling(vocab)
    int32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    float32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    out = pl.pallas_call(
        functools.partial(_kernel, tile=tile, access=access, interpret=interpret),
        out_shape=(
            int32((num_rows,)),
            float32((num_rows,)),
            int32((num_rows, num_top)),
            float32((num_rows, num_top)),
            float32((num_rows, vocab)),
            int32((num_rows, tile.few)),
        ),
        grid=(num_rows,),
        compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=1),
        interpret=interpret,
        name="sample",
    )(logits, rows, counts, bias)
    return tuple(out[:4])
