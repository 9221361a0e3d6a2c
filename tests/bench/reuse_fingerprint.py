"""The fingerprint's own figures: how often alike texts meet in the index, how seldom strangers do, and what it costs.

Similar pairs are licence texts and edited copies of them, edited until J is just above a bound, which is where they are
hardest to find; J is that of the sets that are fingerprinted. Unrelated pairs are parts of different licences with J at
most ``STRANGE``; pairs above it, such as two wordings of one licence, are counted out. The cost is measured beside its
floor in one run: SHA3-256 of every shingle and datasketch's MinHash of them, with no text to cut up;
both in processor time.
"""

import hashlib
import operator
import random
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from itertools import combinations
from typing import Any, Literal

import numpy as np
from datasketch import MinHash
from scipy import sparse

from appliance.bench.report import Findings, Result, measured
from appliance.bench.runner import BenchContext
from appliance.bench.statistics import median
from appliance.reuse.fingerprint import LIGHT_TOKENS, SHINGLE, Fingerprint, Fingerprinter, light_tokens
from appliance.reuse.masks import Masks
from tests.bench.near_duplicates import EDITS, documents

MASKS = ("patient_id", "timestamp", "uuid")
"""What is hidden while the cost is measured."""
BOUNDS = (0.85, 0.92)
WITHIN = 0.02
"""Similar pairs lie within this above their bound."""
STRANGE = 0.2
PART_TOKENS = 256
ROUNDS = 5
"""Timings of each text."""

Shingles = frozenset[tuple[str, ...]]


def measure(context: BenchContext, pairs: int, hashes: Literal[128, 256] = 128, seed: int = 1) -> Findings:
    """Measure; see the module. ``pairs`` similar ones are made for each bound."""
    maker = Fingerprinter(hashes)
    results: list[Result] = []
    for bound in BOUNDS:
        context.progress(f"pairs with J from {bound}", 0, pairs)
        met = [shares_a_band(maker.of(one), maker.of(two)) for one, two in similar_pairs(bound, pairs, seed)]
        target = 0.92 if bound == BOUNDS[0] else None
        name = "collision_similar" if bound == BOUNDS[0] else f"collision_similar_{bound * 100:.0f}"
        share = sum(met) / len(met)
        results.append(Result(name, share, "share", len(met), (share, share), target, ">=" if target else None))
    context.progress("unrelated pairs", 0, 1)
    results.append(_unrelated(maker))
    context.progress("timing", 0, 1)
    results += _cost(Fingerprinter(hashes, Masks(MASKS)), hashes, ROUNDS)
    notes = (
        f"similar pairs have J from the bound to {WITHIN} above it; their texts are {len(documents())} licences",
        f"unrelated pairs are parts of {PART_TOKENS} light tokens with J at most {STRANGE}",
    )
    return Findings(tuple(results), notes, {"datasketch": metadata.version("datasketch")})


def shingles(text: str) -> Shingles:
    """The set that is fingerprinted."""
    tokens = light_tokens(text)[:LIGHT_TOKENS]
    return frozenset(zip(*(tokens[place:] for place in range(SHINGLE)), strict=False))


def jaccard(one: Shingles, two: Shingles) -> float:
    """J of two sets."""
    return len(one & two) / len(one | two)


def similar_pairs(bound: float, count: int, seed: int) -> Iterator[tuple[str, str]]:
    """So many pairs of a licence and an edited copy, with J from ``bound`` to ``WITHIN`` above it."""
    chance, names = random.Random(seed), list(documents())
    while count:
        text = documents()[chance.choice(names)]
        own, copy, similar = shingles(text), text, 1.0
        edits = 0
        while similar > bound + WITHIN and edits < 400:
            copy = EDITS[chance.choice(list(EDITS))](copy, chance.random(), chance)
            edits += 1
            if edits % 3 == 0 or len(own) < 400:
                similar = jaccard(own, shingles(copy))
        if bound <= similar <= bound + WITHIN:
            count -= 1
            yield text, copy


def shares_a_band(one: Fingerprint | None, two: Fingerprint | None) -> bool:
    """Whether an index would propose the one for the other."""
    return one is not None and two is not None and bool(set(one.keys) & set(two.keys))


def _unrelated(maker: Fingerprinter) -> Result:
    parts = [part for text in documents().values() for part in _parts(text)]
    sets = [shingles(part) for part in parts]
    related = _related(sets)
    strangers = len(parts) * (len(parts) - 1) // 2 - len(related)
    holders: dict[bytes, list[int]] = {}
    for number, part in enumerate(parts):
        found = maker.of(part)
        for key in found.keys if found is not None else ():
            holders.setdefault(key, []).append(number)
    met = {pair for group in holders.values() for pair in combinations(group, 2)} - related
    share = len(met) / strangers
    return Result("collision_unrelated", share, "share", strangers, (share, share), 1e-5, "<=")


def _parts(text: str) -> Iterator[str]:
    tokens = text.split()
    for start in range(0, len(tokens), PART_TOKENS):
        part = " ".join(tokens[start : start + PART_TOKENS])
        if len(tokens) - start >= PART_TOKENS // 2:
            yield part


def _related(sets: Sequence[Shingles]) -> set[tuple[int, int]]:
    """Pairs with J above ``STRANGE``, from a product of all sets with all."""
    numbers = {shingle: number for number, shingle in enumerate(sorted(frozenset[tuple[str, ...]]().union(*sets)))}
    rows = np.repeat(np.arange(len(sets)), [len(one) for one in sets])
    columns = np.array([numbers[shingle] for one in sets for shingle in one])
    table = sparse.csr_matrix((np.ones(len(rows), np.int32), (rows, columns)))
    common = sparse.triu(table @ table.T, 1).tocoo()
    sizes = np.array([len(one) for one in sets])
    united = sizes[common.row] + sizes[common.col] - common.data
    above = common.data / united > STRANGE
    return set(zip(common.row[above].tolist(), common.col[above].tolist(), strict=True))


def _cost(maker: Fingerprinter, hashes: int, rounds: int) -> list[Result]:
    """Both in turn over the same texts of at least ``LIGHT_TOKENS``; the median over texts of each text's median."""
    texts = [text for text in documents().values() if len(light_tokens(text)) >= LIGHT_TOKENS]
    floor = _floor(hashes)
    own, bare = list[float](), list[float]()
    for text in texts:
        tokens = light_tokens(text)[:LIGHT_TOKENS]
        elements = [" ".join(tokens[at : at + SHINGLE]).encode() for at in range(len(tokens) - SHINGLE + 1)]
        timed = [(_seconds(maker.of, text), _seconds(floor, elements)) for _ in range(rounds)]
        own.append(1000 * median([one for one, _ in timed]))
        bare.append(1000 * median([other for _, other in timed]))
    ratios = [one / other for one, other in zip(own, bare, strict=True)]
    return [
        measured("fingerprint_ms", own, "ms", 0.8, "<="),
        measured("fingerprint_vs_floor", ratios, "ratio", 1.5, "<="),
        measured("floor_ms", bare, "ms"),
    ]


def _floor(hashes: int) -> Callable[[list[bytes]], None]:
    blank = MinHash(hashes, seed=1, hashfunc=operator.index, scheme="affine32")

    def bare(elements: list[bytes]) -> None:
        signature = blank.copy()
        sha3, whole = hashlib.sha3_256, int.from_bytes
        signature.update_batch([whole(sha3(element).digest()[:4], "little") for element in elements])

    return bare


def _seconds(function: Callable[[Any], object], given: object) -> float:
    """Time that the processor worked for it, which other processes do not lengthen."""
    began_s = time.thread_time()
    function(given)
    return time.thread_time() - began_s
