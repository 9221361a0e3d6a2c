"""kv-quality: what each format of keys and values costs in quality, through the engine's own pool.

Perplexity of held-out prose and code against the same weights over a float32 pool, the error of the attention output,
and hidden pass keys, for every format and for baselines of four bits. Uses the configured weight form and code path.
"""

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import click
import msgspec
import numpy as np

from appliance.bench.report import Findings, Result
from appliance.bench.runner import BenchContext, BenchUseError
from appliance.config import ApplianceConfig

CONTEXTS = (1024, 4096, 8192)
BASELINE_CONTEXT = 4096
"""The context that baselines of four bits are measured with."""
KEY_CONTEXTS = (1024, 2048, 4096, 8192)
FORMATS = ("float32", "int8", "bmq4", "bmq2")
"""Formats of keys and values that are measured; the first is what the others are held against."""
PPL_TARGETS = {"int8": 0.1, "bmq4": 0.5, "bmq2": 2.0}
BITS_TARGET, ERROR_TARGET = 4.6, 0.3
RESAMPLES = 2000

OPTIONS: Sequence[click.Parameter] = [
    click.Option(
        ["--model", "models"],
        multiple=True,
        default=("smollm2-135m", "gemma3-270m"),
        show_default=True,
        help="Model to measure; may be given several times.",
    ),
    click.Option(
        ["--ids"],
        type=click.IntRange(8192, 1 << 20),
        default=8192,
        show_default=True,
        help="Ids of prose, and as many of code; a multiple of 8192.",
    ),
    click.Option(
        ["--depths"],
        type=click.IntRange(0, 100),
        default=10,
        show_default=True,
        help="Pass keys a context; 0 leaves them out.",
    ),
]


@dataclass(frozen=True, slots=True)
class Losses:
    """Of one model, context and trial: losses in blocks of 128 ids, [windows, blocks], and how many ids they are of."""

    by_block: np.ndarray
    predicted: int


@dataclass(frozen=True, slots=True)
class Measured:
    """One model's figures; losses by (trial, context), errors by trial, outcomes of pass keys by format."""

    model: str
    losses: Mapping[tuple[str, int], Losses]
    errors: Mapping[str, np.ndarray]
    keys: Mapping[str, list[bool]]
    sizes: Mapping[str, tuple[float, int, int]]
    """By format: bits of a number in a full block, bytes of a token in pages, bytes of a slot beside them."""


def run(context: BenchContext, *, models: Sequence[str], ids: int, depths: int) -> Findings:
    """Measure every model, then take the worst.

    Raises:
        BenchError: the engine refused something.
        BenchUseError: a text is too short, or a model takes no context that long.
    """
    if ids % CONTEXTS[-1]:
        raise BenchUseError(f"--ids {ids} is no multiple of {CONTEXTS[-1]}, the longest context")
    from appliance.bench.kv_model import measure  # noqa: PLC0415 - loads jax

    found: list[Measured] = []
    sources: dict[str, None] = {}
    notes: list[str] = []
    for model in models:
        measured, texts = measure(context, with_model(context.config, model), ids, depths)
        found.append(measured)
        notes += describe(measured)
        sources |= dict.fromkeys(f"{text.kind}: {text.source}" for text in texts)
        gc.collect()
    return Findings(figures(found), (*sources, *notes))


def with_model(config: ApplianceConfig, model: str) -> ApplianceConfig:
    """The configuration for another model."""
    return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, reference=model))


def figures(found: Sequence[Measured]) -> tuple[Result, ...]:
    """The worst of the models; spreads are over models and contexts."""
    results: list[Result] = []
    for name, target in PPL_TARGETS.items():
        by_model = [delta_pct(one.losses, name, CONTEXTS) for one in found]
        single = [delta_pct(one.losses, name, (length,)) for one in found for length in CONTEXTS]
        results.append(
            Result(f"ppl_delta_{name}_pct", max(by_model), "%", len(single), (min(single), max(single)), target, "<=")
        )
    bits = [one.sizes["bmq4"][0] for one in found]
    ratios = [float(one.errors["bmq4"].mean() / one.errors["rotation4"].mean()) for one in found]
    results += [
        Result("bits_bmq4", max(bits), "bits", len(bits), (min(bits), max(bits)), BITS_TARGET, "<="),
        Result(
            "err_bmq4_vs_rotation4", max(ratios), "ratio", len(ratios), (min(ratios), max(ratios)), ERROR_TARGET, "<="
        ),
    ]
    if all(one.keys for one in found):
        more = [float(flips(one.keys, "bmq4") - flips(one.keys, "int8")) for one in found]
        results.append(
            Result("passkey_flips_bmq4_minus_int8", max(more), "prompts", len(more), (min(more), max(more)), 0, "<=")
        )
    return tuple(results)


def delta_pct(losses: Mapping[tuple[str, int], Losses], trial: str, contexts: Sequence[int]) -> float:
    """How much larger a trial's perplexity is than the float32 pool's, over all ids of some contexts, in percent."""
    more = sum(losses[trial, length].by_block.sum() - losses["float32", length].by_block.sum() for length in contexts)
    return float(100 * np.expm1(more / sum(losses[trial, length].predicted for length in contexts)))


def interval_pct(losses: Mapping[tuple[str, int], Losses], trial: str, length: int) -> tuple[float, float]:
    """95 % interval of ``delta_pct`` of one context by a paired bootstrap over blocks of 128 ids."""
    one, base = losses[trial, length], losses["float32", length]
    differences = (one.by_block - base.by_block).reshape(-1)
    drawn = np.random.default_rng(0).integers(0, differences.size, (RESAMPLES, differences.size))
    totals = differences[drawn].sum(axis=1)
    low, high = np.percentile(100 * np.expm1(totals / one.predicted), [2.5, 97.5])
    return float(low), float(high)


def delta_line(losses: Mapping[tuple[str, int], Losses], trial: str, length: int) -> str:
    """A trial's perplexity at one context against the float32 pool's, with its interval, for people."""
    low, high = interval_pct(losses, trial, length)
    return f"context {length}: {trial} {delta_pct(losses, trial, (length,)):+.3f} % [{low:+.3f}, {high:+.3f}]"


def flips(keys: Mapping[str, list[bool]], name: str) -> int:
    """Prompts whose outcome differs from the float32 pool's."""
    return sum(a != b for a, b in zip(keys[name], keys["float32"], strict=True))


def describe(one: Measured) -> list[str]:
    """A model's figures in full, a line each."""
    lines: list[str] = []
    names = list(dict.fromkeys(name for name, _ in one.losses))
    for length in CONTEXTS:
        base = one.losses["float32", length]
        perplexity = np.exp(base.by_block.sum() / base.predicted)
        cells: list[str] = []
        for name in names[1:]:
            if (name, length) not in one.losses:
                continue
            cells.append(delta_line(one.losses, name, length).partition(": ")[2])
        lines.append(f"{one.model}, context {length}: perplexity {perplexity:.4f} in float32; {', '.join(cells)}")
    cells = [f"{name} {error.mean():.3g} (worst layer {error.max():.3g})" for name, error in one.errors.items()]
    lines.append(f"{one.model}, squared error of the attention output: {', '.join(cells)}")
    if one.keys:
        total = len(one.keys["float32"])
        cells = [f"{name} {flips(one.keys, name)}" for name in one.keys if name != "float32"]
        lines.append(
            f"{one.model}, pass keys: float32 finds {sum(one.keys['float32'])} of {total}; flips: {', '.join(cells)}"
        )
    cells = [
        f"{name} {bits:.3f} bits, {token} B a token, {slot} B a sequence beside"
        for name, (bits, token, slot) in one.sizes.items()
    ]
    lines.append(f"{one.model}, size: {'; '.join(cells)}")
    return lines
