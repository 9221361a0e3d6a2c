"""Passkeys: five digits hidden somewhere in a long text, asked for at its end, and which formats still find them.

Owns the prompts. What counts is not how often a model finds the key, which small models often do not, but how often a
format changes the outcome of the exact pool (a flip). Source: the passkey task of arXiv 2305.16300.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from api.ports import TextCodec
from appliance.bench.inline_engine import greedy_gateway, run_to_end
from appliance.engine import Engine
from appliance.wiring import program_set
from planner.build import compile_all
from planner.decoder import Weights
from planner.pages import PagePool
from planner.plan import Plan
from planner.prefixes import PrefixSettings
from planner.program import empty_state
from planner.schedule import Scheduler
from planner.schedule_values import SchedulerSettings

NEW_TOKENS = 8
"""Ids of an answer: five digits and what may stand before them."""

_HINT = "\n\nThe pass key is {key}. Remember it. {key} is the pass key.\n\n"
_QUESTION = "\n\nWhat is the pass key? The pass key is"


@dataclass(frozen=True, slots=True)
class Passkey:
    """One prompt; ``depth`` is the share of the text before the key."""

    ids: list[int]
    key: str
    context: int
    depth: float


def passkeys(codec: TextCodec, text: Sequence[int], contexts: Sequence[int], depths: int) -> list[Passkey]:
    """A prompt for every context and depth, filled with ``text``; the answer still fits into the context.

    Args:
        codec: of the model.
        text: ids to hide the key in, at least as many as the longest context.
        contexts: ids of prompt and answer together.
        depths: places of the key, evenly from the beginning to the end.
    """
    rng = np.random.default_rng(5)
    found: list[Passkey] = []
    for context in contexts:
        for index in range(depths):
            key = str(rng.integers(10_000, 100_000))
            hint = codec.encode(_HINT.format(key=key), parse_special=False)
            question = codec.encode(_QUESTION, parse_special=False)
            room = context - NEW_TOKENS - len(hint) - len(question)
            before = round(room * index / max(1, depths - 1))
            ids = [*text[:before], *hint, *text[before:room], *question]
            found.append(Passkey(ids, key, context, index / max(1, depths - 1)))
    return found


def answers(
    plan: Plan, weights: Weights, codec: TextCodec, asked: Sequence[Passkey], progress: Callable[[int, int], None]
) -> list[bool]:
    """Whether each key is found by the engine under a plan.

    Raises:
        BenchError: a prompt was refused or its answer ended early.
    """
    programs = compile_all(plan, lambda _done, _total, _name: None, threads=2)
    scheduler = Scheduler(
        plan.lattice,
        PagePool(plan.num_pages, plan.page_size),
        SchedulerSettings(plan.prefill_budget, prefixes=PrefixSettings(reuse=False)),
    )
    gateway = greedy_gateway([one.ids for one in asked], NEW_TOKENS)
    vocab = plan.architecture.vocab
    engine = Engine(weights, empty_state(programs), program_set(programs), scheduler, gateway, vocab=vocab)
    found: list[bool] = []
    for one, ids in zip(asked, run_to_end(engine, gateway, progress), strict=True):
        decoder = codec.decoder()
        found.append(one.key in "".join(decoder.push(token) for token in ids) + decoder.flush())
    return found
