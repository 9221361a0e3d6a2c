"""Fingerprints: the same everywhere, alike for texts that are alike, and what they are made of."""

import hashlib
import random
import subprocess
import sys
import unicodedata

import datasketch
import numpy as np
import pytest

from appliance.reuse.fingerprint import (
    BANDS,
    LIGHT_TOKENS,
    SHINGLE,
    TEXT_CHARS,
    Fingerprinter,
    band_keys,
    light_tokens,
    shingle_hashes,
)
from appliance.reuse.masks import Masks

WORDS = [f"word{number}" for number in range(5000)]
GOLDEN_TEXT = "The quick brown fox — 你好 — jumps over the lazy dog; it's 12:30, naïve café."
GOLDEN_TOKENS = [
    *("The", "quick", "brown", "fox", "—", "你", "好", "—", "jumps", "over", "the", "lazy", "dog", ";", "it", "'", "s"),
    *("12", ":", "30", ",", "naïve", "café", "."),
]
GOLDEN = {
    128: "9345e7cd99d945acbb5585b84957df39f74ef66d5eca8506b9edb82c82fef17f",
    256: "26ea533bc04bf5e565fb9bc4142f4b3000b10d95a2b45a0b39c1e55f5c1e53e5",
}
"""SHA-256 of the signature and all band keys of the text above; a change of them needs a new ``SCHEMA``."""


def prose(seed: int, length: int = 1200) -> list[str]:
    return random.Random(seed).choices(WORDS, k=length)


def digest(text: str, hashes: int) -> str:
    found = Fingerprinter(hashes).of(text)
    assert found is not None
    return hashlib.sha256(found.values + b"".join(found.keys)).hexdigest()


def similarity(one: str, two: str) -> float:
    """J of two texts of at most ``LIGHT_TOKENS``, from the sets themselves."""
    sets = [set(zip(*(light_tokens(text)[place:] for place in range(SHINGLE)), strict=False)) for text in (one, two)]
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


def test_light_tokens_are_words_ideographs_and_signs() -> None:
    assert light_tokens(GOLDEN_TEXT) == GOLDEN_TOKENS
    assert light_tokens("Привет, мир! कि ١٢") == ["Привет", ",", "мир", "!", "क", "ि", "١٢"]
    assert light_tokens("\u3000 \n\t ") == []


def test_only_the_beginning_counts() -> None:
    maker = Fingerprinter()
    for length in (4, 9, 14):  # within the first characters, beyond them, and of everything that is looked at
        words = [word.ljust(length, "x") for word in prose(1, 3000)]
        beginning = " ".join(words[:LIGHT_TOKENS])
        assert maker.of(" ".join(words)) == maker.of(beginning)
        assert maker.of(" ".join(words)) != maker.of(" ".join(words[: LIGHT_TOKENS - 200]))
    assert maker.of(" " * TEXT_CHARS + "and three words more") is None


@pytest.mark.parametrize("hashes", [128, 256])
def test_fingerprints_are_the_same_everywhere(hashes: int) -> None:
    assert digest(GOLDEN_TEXT, hashes) == GOLDEN[hashes]


def test_another_process_makes_the_same_and_never_loads_scipy_or_jax() -> None:
    program = (
        "import sys; from appliance.reuse.fingerprint import Fingerprinter;"
        "found = Fingerprinter(256).of(sys.argv[1]);"
        "assert not {'scipy', 'jax', 'datasketch'} & set(sys.modules), sorted(sys.modules);"
        "import datasketch; assert datasketch.MinHash and datasketch.MinHashLSH;"
        "print((found.values + b''.join(found.keys)).hex())"
    )
    command = [sys.executable, "-c", program, GOLDEN_TEXT]
    found = subprocess.run(command, capture_output=True, check=True, env={"PYTHONHASHSEED": "7"}, text=True)
    assert hashlib.sha256(bytes.fromhex(found.stdout)).hexdigest() == GOLDEN[256]


@pytest.mark.parametrize("hashes", [128, 256])
def test_a_signature_is_datasketch_s_own(hashes: int) -> None:
    text = " ".join(prose(2))
    found = Fingerprinter(hashes).of(text)
    assert found is not None
    peer = datasketch.MinHash(hashes, seed=1, scheme="affine32", hashfunc=int)
    peer.update_batch(set(shingle_hashes(light_tokens(text)[:LIGHT_TOKENS]).tolist()))
    assert np.array_equal(np.frombuffer(found.values, "<u4"), peer.hashvalues)


def test_shingles_are_sha3_of_their_words_in_order() -> None:
    def word(token: str) -> int:
        return int.from_bytes(hashlib.sha3_256(token.encode()).digest()[:8], "little")

    def shingle(*tokens: str) -> int:
        factors = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9)
        return sum(word(t) * f for t, f in zip(tokens, factors, strict=True)) % 2**64 >> 32

    assert shingle_hashes(["a", "b", "c", "d"]).tolist() == [shingle("a", "b", "c"), shingle("b", "c", "d")]
    assert len(set(shingle_hashes(["a", "b", "c", "b", "a", "c"]).tolist())) == 4


@pytest.mark.parametrize("text", ["", "Hi", "?", "1", "你", "👍", "   ", "Ok."])
def test_a_text_without_shingles_has_no_fingerprint(text: str) -> None:
    assert Fingerprinter().of(text) is None


def test_short_texts_are_told_apart() -> None:
    maker = Fingerprinter()
    made = [maker.of(text) for text in ("What is 17 + 25?", "Is it safe?", "delete user 1001", "Who won in 2019?")]
    keys = [set(one.keys) for one in made if one is not None]
    assert len(keys) == 4
    assert all(not keys[a] & keys[b] for a in range(4) for b in range(a))


def test_lone_surrogates_and_decomposed_letters_are_taken() -> None:
    maker = Fingerprinter()
    assert maker.of("a \ud800 b \udfff c") is not None
    composed = "café au lait très bon"
    assert maker.of(composed) == maker.of(unicodedata.normalize("NFD", composed))


def test_masks_hide_what_varies() -> None:
    maker = Fingerprinter(128, Masks(["timestamp", "patient_id"]))
    body = " ".join(prose(3, 400))
    one = maker.of(f"Date: 2026-11-30T09:15:00Z, patient_id: A-1207. {body}")
    two = maker.of(f"Date: 2027-01-02T23:59:59Z, patient_id: B-99. {body}")
    assert one == two
    assert Fingerprinter().of(f"Date: 2026-11-30 {body}") != Fingerprinter().of(f"Date: 2027-01-02 {body}")


@pytest.mark.parametrize(("hashes", "bound"), [(128, 0.90), (256, 0.93)])
def test_near_duplicates_share_a_band_and_strangers_do_not(hashes: int, bound: float) -> None:
    maker, chance = Fingerprinter(hashes), random.Random(4)
    hits = pairs = 0
    for seed in range(50):
        words = prose(seed, 1024)
        edited = list(words)
        for place in chance.sample(range(1024), 27):
            edited[place] = "edited"
        one, two = " ".join(words), " ".join(edited)
        if not 0.85 <= similarity(one, two) <= 0.87:
            continue
        pairs += 1
        made = [maker.of(text) for text in (one, two)]
        hits += bool(set(made[0].keys) & set(made[1].keys))
        assert abs(made[0].similarity(made[1]) - 0.86) < 0.15
    assert pairs >= 30
    assert hits / pairs >= bound
    strangers = [maker.of(" ".join(prose(seed))) for seed in range(200, 400)]
    assert len({key for one in strangers for key in one.keys}) == sum(len(one.keys) for one in strangers)


def test_the_chance_of_a_shared_band_is_as_documented() -> None:
    def chance(similar: float, hashes: int) -> float:
        rows, bands = BANDS[hashes]
        return 1 - (1 - similar**rows) ** bands

    assert [round(chance(0.85, hashes), 3) for hashes in BANDS] == [0.928, 0.960]
    assert chance(0.2, 128) < 1.3e-6
    assert chance(0.2, 256) < 8.7e-8
    assert all(rows * bands <= hashes for hashes, (rows, bands) in BANDS.items())


def test_a_band_s_key_depends_on_its_place_and_its_values() -> None:
    rows, bands = BANDS[128]
    same = band_keys(bytes(512), 128)
    assert len(same) == bands == len(set(same))
    changed = band_keys(bytes(4 * rows * 3) + b"\1" + bytes(511 - 4 * rows * 3), 128)
    assert [place for place in range(bands) if same[place] != changed[place]] == [3]
    assert {len(key) for key in same} == {8}
