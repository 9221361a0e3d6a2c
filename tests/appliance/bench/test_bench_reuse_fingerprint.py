"""The texts and the counting of the fingerprint's bench; its timings are not tested."""

import random
from statistics import mean

import pytest

from appliance.reuse.fingerprint import Fingerprinter
from tests.bench import reuse_fingerprint as bench
from tests.bench.near_duplicates import EDITS, MIN_WORDS, documents, edited, near_duplicates


def test_documents_are_many_real_texts_without_doubles() -> None:
    texts = documents()
    assert len(texts) == 302
    assert {"Apache-2.0", "MIT", "GPL-2.0", "MPL-2.0"} <= set(texts), sorted(texts)
    assert len(set(texts.values())) == len(texts)
    assert min(len(text.split()) for text in texts.values()) >= MIN_WORDS


def test_near_duplicates_follow_from_their_seed() -> None:
    one, two = (list(near_duplicates(20, seed=5)) for _ in range(2))
    assert one == two
    assert one != list(near_duplicates(20, seed=6))
    assert all(found.original == documents()[found.name] for found in one)
    assert {kind for found in near_duplicates(100) for kind in found.kinds} == set(EDITS)


@pytest.mark.parametrize("kind", ["punctuation", "date", "name", "word"])
def test_an_edit_changes_little_where_it_was_drawn(kind: str) -> None:
    text, chance = documents()["Apache-2.0"], random.Random(1)
    for tenth in range(10):
        changed = EDITS[kind](text, tenth / 10, chance)
        first = next(place for place, (a, b) in enumerate(zip(text, changed, strict=False)) if a != b)
        assert -1 < first - tenth / 10 * len(text) < 200
        assert abs(len(changed) - len(text)) < 60
        assert changed.split()[-1] == text.split()[-1] or tenth == 9


def test_clauses_change_places_and_keep_their_words() -> None:
    text, chance = documents()["MPL-2.0"], random.Random(1)
    changed = EDITS["clause_order"](text, 0.4, chance)
    assert changed != text
    assert sorted(changed.split()) == sorted(text.split())


def test_first_differences_are_spread_over_the_length() -> None:
    chance = random.Random(2)
    text = documents()["EUPL-1.1"]
    places = [edited("EUPL-1.1", text, chance, 1).first / len(text) for _ in range(200)]
    assert 0.42 < mean(places) < 0.58
    assert min(places) < 0.05
    assert max(places) > 0.95


@pytest.mark.parametrize("bound", bench.BOUNDS)
def test_similar_pairs_are_as_similar_as_they_say(bound: float) -> None:
    pairs = list(bench.similar_pairs(bound, 8, 3))
    found = [bench.jaccard(bench.shingles(one), bench.shingles(two)) for one, two in pairs]
    assert len(found) == 8
    assert all(bound <= similar <= bound + bench.WITHIN for similar in found)


def test_related_pairs_are_those_above_the_bound() -> None:
    sets = [frozenset({("a",), ("b",), ("c",)}), frozenset({("a",), ("b",), ("d",)}), frozenset({("x",), ("a",)})]
    assert bench._related(sets) == {(0, 1), (0, 2), (1, 2)}
    assert bench._related([*sets[:2], frozenset({("y",)})]) == {(0, 1)}


def test_a_shared_band_is_what_an_index_would_find() -> None:
    maker = Fingerprinter()
    text = documents()["MIT"]
    assert bench.shares_a_band(maker.of(text), maker.of(text))
    assert not bench.shares_a_band(maker.of(text), maker.of(documents()["EUPL-1.1"]))
    assert not bench.shares_a_band(maker.of("Hi"), maker.of("Hi"))
