"""parity: the same answers and the same perplexity as ``transformers`` in float32 on the same weights.

Greedy texts come from the engine as it is served: loaded programs of the float32 form, all prompts at once. Perplexity
is taken over windows of 1,024 ids of English text; the int8 form is measured on both of its numeric paths, the whole
window as one prefill and id by id as a decode, and the worse one counts.
"""

import gc
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import click
import jax
import numpy as np

from appliance.bench.report import Findings, Result, installed
from appliance.bench.runner import BenchContext, BenchUseError
from appliance.bench.served import build_store
from appliance.model.codec import Codec
from appliance.model.library import ModelLibrary
from appliance.model.record import read_record, weights_folder
from appliance.model.store import restore
from appliance.planning import plan_for
from planner.formats import WeightForm
from planner.plan import Plan
from planner.weights import weight_specs
from tests.bench.english import mixed_prompts, text_of, windows_of
from tests.bench.inline_engine import InlineEngine, with_form
from tests.bench.reference_model import ReferenceModel
from tests.bench.scoring import Scores, decode_scores, prefill_scorer, score

OPTIONS: Sequence[click.Parameter] = [
    click.Option(["--text", "text_file"], type=click.Path(path_type=Path), help="Text to measure perplexity on."),
    click.Option(
        ["--windows"], type=click.IntRange(1, 32), default=17, show_default=True, help="Windows of that text."
    ),
    click.Option(["--prompts"], type=click.IntRange(1, 20), default=20, show_default=True, help="Greedy texts."),
]

WINDOW = 1024
NEW_TOKENS = 64
TIE = 1e-3
"""Two best logits of the reference that are closer than this may change places."""


def run(context: BenchContext, *, text_file: Path | None, windows: int, prompts: int) -> Findings:
    """Compare greedy texts, then perplexities.

    Raises:
        BenchError: a store cannot be built.
        BenchUseError: the configured target is no CPU, or the text is too short.
    """
    if context.config.engine.target and not context.config.engine.target.startswith("cpu"):
        raise BenchUseError(f"engine.target is {context.config.engine.target}; parity in float32 is for CPU targets")
    jax.config.update("jax_platforms", "cpu")
    for form in (WeightForm.FLOAT32, WeightForm.INT8):
        context.progress(f"building what is missing of {form}", 0, 1)
        build_store(context.config, {"engine": {"weight_form": str(form)}})
    folder = ModelLibrary(context.config.home).ensure(context.config.model.reference)
    codec = Codec.load(folder)
    text, source = text_of(text_file)
    ids = windows_of(codec, text, windows, WINDOW)
    asked = mixed_prompts(codec, text, prompts)
    context.progress("greedy texts of the served float32 programs", 0, 1)
    ours = InlineEngine(with_form(context.config, WeightForm.FLOAT32), folder).greedy(asked, NEW_TOKENS)
    gc.collect()
    reference = ReferenceModel(folder)
    greedy, greedy_note = compare_greedy(context, reference, asked, ours)
    perplexity, perplexity_notes = compare_perplexity(context, reference, folder, ids)
    notes = (greedy_note, f"text: {source}; {windows} windows of {WINDOW} ids", *perplexity_notes)
    return Findings((greedy, *perplexity), notes, installed(("transformers", "torch", "gguf")))


def compare_greedy(
    context: BenchContext, reference: ReferenceModel, prompts: Sequence[Sequence[int]], ours: Sequence[Sequence[int]]
) -> tuple[Result, str]:
    """The share of texts that are the reference's own, ties aside, and how many had ties."""
    same: list[float] = []
    tied = 0
    for number, (prompt, text) in enumerate(zip(prompts, ours, strict=True)):
        context.progress("greedy texts of transformers", number, len(prompts))
        (theirs,) = reference.generate([prompt], NEW_TOKENS)
        equal = theirs == list(text)
        if not equal and follows(reference.logits([*prompt, *text])[len(prompt) - 1 : -1], text):
            equal, tied = True, tied + 1
        same.append(float(equal))
    share = sum(same) / len(same)
    result = Result("greedy_equal", share, "share", len(same), (min(same), max(same)), 1.0, "==")
    return result, f"greedy: {len(same)} texts of {NEW_TOKENS} ids, {tied} of them through a tie below {TIE:g}"


def follows(logits: np.ndarray, ids: Iterable[int]) -> bool:
    """Whether every id is the likeliest one at its place, or one of two likeliest that tie.

    Args:
        logits: [ids, vocab], each row given the ids before it.
        ids: the text to judge.
    """
    for row, chosen in zip(logits, ids, strict=True):
        second, best = np.argpartition(row, -2)[-2:]
        tie = row[best] - row[second] < TIE and chosen in (best, second)
        if chosen != best and not tie:
            return False
    return True


def compare_perplexity(
    context: BenchContext, reference: ReferenceModel, folder: Path, windows: Sequence[Sequence[int]]
) -> tuple[tuple[Result, ...], tuple[str, ...]]:
    """Perplexity of both forms against the reference's, and the share of equal likeliest ids of int8."""
    theirs = [
        score(reference.logits(window), window) for window in _told(context, "perplexity of transformers", windows)
    ]
    float32_plan, weights = _loaded(context, folder, WeightForm.FLOAT32)
    scorer = prefill_scorer(float32_plan)
    exact = [scorer(weights, window) for window in _told(context, "perplexity of float32", windows)]
    del weights, scorer
    gc.collect()
    int8_plan, weights = _loaded(context, folder, WeightForm.INT8)
    scorer = prefill_scorer(int8_plan)
    prefill = [scorer(weights, window) for window in _told(context, "perplexity of int8, prefill", windows)]
    decode = decode_scores(int8_plan, weights, windows, lambda done: context.progress("int8, decode", done, WINDOW))
    by_path = {"prefill": prefill, "decode": decode}
    worst = max(by_path, key=lambda path: delta_pct(by_path[path], theirs))
    least = min(by_path, key=lambda path: agreement(by_path[path], theirs))
    agreements = [agreement([one], [other]) for one, other in zip(by_path[least], theirs, strict=True)]
    results = (
        _perplexity("ppl_delta_float32_pct", exact, theirs, 0.1, magnitude=True),
        _perplexity("ppl_delta_int8_pct", by_path[worst], theirs, 1.0, magnitude=False),
        Result(
            "top1_int8", agreement(by_path[least], theirs), "share", len(windows),
            (min(agreements), max(agreements)), 0.975, ">=",
        ),
    )  # fmt: skip
    paths = [
        f"int8 {path}: perplexity {delta_pct(scores, theirs):+.4f} %, top-1 {agreement(scores, theirs):.5f}"
        for path, scores in by_path.items()
    ]
    notes = (
        f"perplexity of transformers {perplexity_of(theirs):.5f}, of float32 {perplexity_of(exact):.5f}",
        *paths,
        f"code path: {float32_plan.implementation} for float32, {int8_plan.implementation} for int8",
    )
    return results, notes


def perplexity_of(scores: Sequence[Scores]) -> float:
    """Perplexity over all predicted ids of all windows."""
    return math.exp(sum(s.loss for s in scores) / sum(s.predicted for s in scores))


def delta_pct(scores: Sequence[Scores], reference: Sequence[Scores]) -> float:
    """How much larger the perplexity is than the reference's, in percent."""
    return 100 * (perplexity_of(scores) / perplexity_of(reference) - 1)


def agreement(scores: Sequence[Scores], reference: Sequence[Scores]) -> float:
    """Share of positions whose likeliest id is the reference's."""
    return float(np.mean([np.mean(s.top == r.top) for s, r in zip(scores, reference, strict=True)]))


def _perplexity(
    name: str, scores: Sequence[Scores], reference: Sequence[Scores], target: float, *, magnitude: bool
) -> Result:
    value = delta_pct(scores, reference)
    parts = [delta_pct([one], [other]) for one, other in zip(scores, reference, strict=True)]
    return Result(name, abs(value) if magnitude else value, "%", len(parts), (min(parts), max(parts)), target, "<=")


def _loaded(context: BenchContext, folder: Path, form: WeightForm) -> tuple[Plan, dict[str, jax.Array]]:
    plan = plan_for(with_form(context.config, form), read_record(folder))
    return plan, restore(weights_folder(folder, form), weight_specs(plan.architecture, form))


def _told(context: BenchContext, what: str, windows: Sequence[Sequence[int]]) -> Iterable[Sequence[int]]:
    for number, window in enumerate(windows):
        context.progress(what, number, len(windows))
        yield window
