"""What a host tier is worth and what it costs: a prefix in the pool, from host memory and computed anew, and 0 % hits.

Owns the part of ``reuse`` about tiers. The pool is made small by taking the rest of its pages out of use, so that a few
documents push each other out with the programs that are served.
"""

import gc
from collections.abc import Callable, Sequence
from statistics import median

from appliance.bench.report import Result
from appliance.bench.runner import BenchError
from tests.bench.reuse_engine import BurstEngine

TIER_MB = 1024.0
DOCUMENTS = 4
"""Documents that are asked about in turn; the pool holds half of them."""
ZERO_HIT_WORDS = 300

Part = tuple[list[Result], list[str]]


def measure(
    engine: Callable[..., BurstEngine],
    ids: Callable[..., list[int]],
    texts: Callable[[int, int], list[str]],
    words: int,
    rounds: int,
    progress: Callable[[str, int, int], None],
) -> Part:
    """Measure both.

    Args:
        engine: makes the served engine with settings of the cache section.
        ids: a conversation about a document.
        texts: so many documents of so many words.
        words: of a document whose first id is timed.
        rounds: how often each document is asked about.
        progress: told what is done.

    Raises:
        BenchError: a prompt was not had from where it should have been.
    """
    prompts = [ids(text) for text in texts(DOCUMENTS, words)]
    first, note = _first_ids(engine, prompts, rounds, progress)
    cost, said = _zero_hits(engine, [ids(text) for text in texts(6 * rounds, ZERO_HIT_WORDS)], rounds, progress)
    return first + cost, [note, said]


def _first_ids(
    engine: Callable[..., BurstEngine],
    prompts: Sequence[Sequence[int]],
    rounds: int,
    progress: Callable[[str, int, int], None],
) -> tuple[list[Result], str]:
    """Times to the first id, in turn for each document: from the host, again from the pool, and computed anew."""
    tiered, plain = engine(host_tier_mb=TIER_MB), engine(prefix_reuse=False)
    pool = tiered.shrink(sum(map(len, prompts)) // 2)
    for prompt in prompts:
        tiered.ask([prompt], 1)
    times: dict[str, list[float]] = {"host": [], "pool": [], "computed": []}
    for number in range(rounds * len(prompts)):
        progress("first ids with a tier", number, rounds * len(prompts))
        prompt = prompts[number % len(prompts)]
        for place, asked in (("host", tiered), ("pool", tiered), ("computed", plain)):
            loaded = tiered.loaded
            found = asked.ask([prompt], 1)
            times[place] += found.first_s
            spared = found.cached[0] if place != "computed" else len(prompt)
            if spared < len(prompt) - pool.page_size or (tiered.loaded > loaded) != (place == "host"):
                raise BenchError(f"a prompt of {len(prompt)} ids was not had from: {place}")
    tiered.close()
    del tiered, plain, pool
    gc.collect()
    host, resident, computed = (1e3 * median(times[place]) for place in ("host", "pool", "computed"))
    count = len(times["host"])
    drop = 1 - host / computed
    least = 1 - max(times["host"]) / min(times["computed"])
    most = 1 - min(times["host"]) / max(times["computed"])
    note = (
        f"tiers: first id of {sum(map(len, prompts)) // len(prompts)} ids in the median {resident:.0f} ms from the "
        f"pool, {host:.0f} ms from host memory, {computed:.0f} ms computed"
    )
    return [Result("tier_latency_drop", drop, "share", count, (least, most), None, None)], note


def _zero_hits(
    engine: Callable[..., BurstEngine],
    prompts: Sequence[Sequence[int]],
    rounds: int,
    progress: Callable[[str, int, int], None],
) -> tuple[list[Result], str]:
    """Prompts that nobody asked before, with a pool that is full: time with a tier over time without, in turn."""
    engines = {True: engine(host_tier_mb=TIER_MB), False: engine(host_tier_mb=0.0)}
    for one in engines.values():
        one.shrink(4 * max(map(len, prompts)))
        one.ask(prompts[:6], 1)
    ratios: list[float] = []
    for turn in range(1, rounds):
        progress("new prompts with a tier and without", turn, rounds)
        spent: dict[bool, float] = {}
        for tier in (True, False) if turn % 2 else (False, True):
            before_s = engines[tier].steps_s
            engines[tier].ask(prompts[6 * turn : 6 * turn + 6], 1)
            spent[tier] = engines[tier].steps_s - before_s
        ratios.append(spent[True] / spent[False])
    for one in engines.values():
        one.close()
    cost = median(ratios) - 1
    result = Result("tier_zero_hit_cost", cost, "share", len(ratios), (min(ratios) - 1, max(ratios) - 1), None, None)
    return [result], f"tiers: every new prompt pushes another out, which is saved; {len(ratios)} turns of 6 prompts"
