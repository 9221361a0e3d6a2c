"""The ids of a long text are those of one plain encode, whatever the text and the tokenizer; known ids are exact."""

# ruff: noqa: RUF001 - look-alike characters are the point

import threading
from array import array
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.model import long_text
from appliance.model.cuts import Cuts
from appliance.model.known_ids import KnownIds
from appliance.model.long_text import LongText, Piece
from appliance.model.tokenizer import TextAssets, Tokenizer
from tests.support.texts import TEXTS
from tests.support.tokenizer_kinds import ADDED, KINDS, WHOLE, tokenizer

_ODD = (
    *(token.content for token in ADDED),
    *("  ", "   ", "\n", "\r\n", "\n\n", "\t", "\xa0", "\u3000", "\u2028", "\u200b", "\ufeff"),
    *("1", "22", "1234567", "٣٤", "Ⅷ", "½"),
    *("字", "漢字", "かな", "。", "，", "！", "か\u3099", "한국어", "\u1112\u1161\u11ab"),
    *("e\u0301", "\u0301", " \u0301", "a\u0308\u0323", "\u212a", "\u037e", "ﬁ", "ß", "ſ", "İ"),
    *("👩\u200d🚀", "👍🏽", "🇯🇵", "\U00020000"),
    *("'s", "'S", "don't", "'", "...", "a.", ".\n", "/", "->", "(", "x;"),
    *("word", "words", "a b", "b c", "c d", "Hello", "the", " the", "a", "d", "\u2581", "\u2581a", "<0x41>", "<", ">"),
    *("\\ud800", "\x00", "\ue000"),
)
PARTS = st.one_of(
    st.sampled_from(_ODD),
    st.sampled_from(_ODD).map(lambda text: " " + text),
    st.sampled_from(("word", "the ", "a b ", "字。", "  ", "\n", "1")).map(lambda text: text * 9),
    st.text(max_size=6),
)
MIXED = st.lists(PARTS, max_size=40).map("".join)


@cache
def cuts_of(kind):
    return Cuts(tokenizer(kind))


@cache
def divided(kind, block_chars, known_bytes=0):
    return LongText([tokenizer(kind)], cuts_of(kind), KnownIds(known_bytes), threads=2, block_chars=block_chars)


def plain(kind, text):
    return tokenizer(kind).encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150)
@given(text=MIXED, block_chars=st.integers(1, 12))
def test_ids_are_those_of_one_encode(kind, text, block_chars):
    text = text.encode(errors="replace").decode()
    assert list(divided(kind, block_chars).encode([Piece(0, text)], "")) == plain(kind, text)


@pytest.mark.parametrize("kind", WHOLE)
def test_what_is_not_proven_stays_whole(kind):
    text = " ".join(TEXTS)
    cuts = cuts_of(kind)
    assert [at for at in range(len(text)) if cuts.find(text, at)] == []
    assert list(divided(kind, 16).encode([Piece(0, text)], "")) == plain(kind, text)


@pytest.mark.parametrize("kind", KINDS)
def test_prose_has_cuts(kind):
    """Every block of ordinary text ends within a few words of where it may."""
    text = "The appliance keeps pages, and counts what it gives. Words follow words here. " * 40
    cuts = cuts_of(kind)
    found = [cuts.find(text, low) for low in range(100, 2800, 100)]
    if kind == "unknown runs":
        assert found == [None] * len(found), "the sign of a space is unknown, so runs may reach across every one"
        return
    assert all(at is not None and at - low < 20 for at, low in zip(found, range(100, 2800, 100), strict=True))


@pytest.mark.parametrize("kind", ["gpt-2", "llama-3", "qwen2", "smollm"])
def test_prose_without_spaces_has_cuts(kind):
    text = "早计划的人，后来少计算。漢字とかなの文、そして次の文。" * 40
    cuts = cuts_of(kind)
    assert all(cuts.find(text, low) for low in range(100, 1000, 100))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("giant", ["x", "字", " ", "7", "\n", "ab<r>"])
def test_giant_words(kind, giant):
    text = f"a word {giant * 9000} and another"
    assert list(divided(kind, 512).encode([Piece(0, text)], "")) == plain(kind, text)


@pytest.mark.parametrize("kind", KINDS)
def test_texts_of_real_length(kind):
    text = "".join(TEXTS * 8)
    long = divided(kind, long_text.BLOCK_CHARS, known_bytes=1 << 20)
    assert len(text) > 2 * long_text.BLOCK_CHARS
    for grown in (text, text, text + " and a question?", text[:-100] + "another end" * 30):
        assert list(long.encode([Piece(0, grown)], "t")) == plain(kind, grown)


def test_half_a_surrogate_pair_is_refused_as_by_the_engine():
    text = "word " * 20 + "\ud800" + " word" * 20
    for known_bytes in (0, 1 << 20):
        with pytest.raises(TypeError):
            divided("gpt-2", 8, known_bytes).encode([Piece(0, text)], "")


# ---------------------------------------------------------------------- known ids


class Counting:
    """An engine that counts the characters it is given."""

    def __init__(self, kind):
        self.inner = tokenizer(kind)
        self.chars = 0

    def encode_batch_fast(self, texts, *, add_special_tokens):
        self.chars += sum(map(len, texts))
        return self.inner.encode_batch_fast(texts, add_special_tokens=add_special_tokens)


def counted(kind="llama-3", known_bytes=1 << 20, block_chars=64):
    engine = Counting(kind)
    return engine, LongText([engine], Cuts(engine.inner), KnownIds(known_bytes), threads=2, block_chars=block_chars)


DOCUMENT = " ".join(f"sentence {number} of the document." for number in range(200))


def asked(engine, long, text, tenant="t"):
    """How many characters a text costs, its ids checked."""
    before = engine.chars
    assert list(long.encode([Piece(0, text)], tenant)) == plain("llama-3", text)
    return engine.chars - before


def test_a_text_seen_before_is_not_encoded_again():
    engine, long = counted()
    assert asked(engine, long, DOCUMENT) == len(DOCUMENT)
    assert asked(engine, long, DOCUMENT) == 0
    assert asked(engine, long, DOCUMENT + " And what follows from that?") < 200
    assert asked(engine, long, DOCUMENT + " Another question.") < 200
    assert asked(engine, long, "New start. " + DOCUMENT) > 1000


def test_tenants_share_nothing():
    engine, long = counted()
    for tenant in ("a", "b", "", "a\x00", "ab"):
        assert asked(engine, long, DOCUMENT, tenant) == len(DOCUMENT)
    assert asked(engine, long, DOCUMENT, "a") == 0


def test_ways_to_encode_share_nothing():
    engines = [Counting("llama-3"), Counting("llama-3")]
    engines[1].inner.encode_special_tokens = False
    long = LongText(engines, Cuts(tokenizer("llama-3")), KnownIds(1 << 20), block_chars=64)
    for way in (0, 1, 0, 1):
        long.encode([Piece(way, DOCUMENT)], "")
    assert [engine.chars for engine in engines] == [len(DOCUMENT)] * 2


def test_memory_is_bounded_and_the_newest_stay():
    known = KnownIds(3000)
    for number in range(20):
        known.put(bytes([number]), array("i", range(100)))
        assert known.used_bytes <= 3000
    assert known.get(bytes([19])) is not None
    assert known.get(bytes([0])) is None
    oldest = next(number for number in range(20) if known.get(bytes([number])) is not None)
    for _ in range(10):
        assert known.get(bytes([oldest])) is not None
        known.put(b"other", array("i", range(100)))
    known.put(b"too large", array("i", range(1000)))
    assert known.get(b"too large") is None
    assert known.get(b"other") is not None


def test_nothing_is_kept_without_memory():
    engine, long = counted(known_bytes=0)
    assert asked(engine, long, DOCUMENT) == asked(engine, long, DOCUMENT) == len(DOCUMENT)


def test_many_threads_get_their_own_ids():
    """Callers that share the helpers and the memory, with texts that share blocks."""
    _, long = counted(known_bytes=20_000)
    texts = [DOCUMENT[: 500 + 400 * number] + f" end {number}" for number in range(12)]
    wrong = []

    def ask(number):
        for round_ in range(20):
            text = texts[(number + round_) % len(texts)]
            if list(long.encode([Piece(0, text)], f"tenant {number % 2}")) != plain("llama-3", text):
                wrong.append(number)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_what_a_caller_does_to_its_ids_stays_its_own():
    _, long = counted(block_chars=10_000)
    text = DOCUMENT * 5
    first = long.encode([Piece(0, text)], "")
    first[0] = 7
    first.extend(range(9))
    assert list(long.encode([Piece(0, text)], "")) == plain("llama-3", text)


# ---------------------------------------------------------------------- through the tokenizer


@pytest.mark.parametrize("kind", ["llama-3", "llama-2 with added", "metaspace first", "no prefix"])
@settings(max_examples=30)
@given(turns=st.lists(MIXED, min_size=1, max_size=3))
def test_scaffolds_are_those_of_a_tokenizer_that_cuts_nothing(kind, turns):
    """With blocks of a few characters and with whole pieces, the same conversation has the same ids."""
    text = "<|end|>".join(turn.encode(errors="replace").decode() for turn in turns)
    assets = TextAssets(tokenizer_json=tokenizer(kind).to_str(), add_bos=True, bos_id=1)
    short, whole = Tokenizer(assets, known_bytes=1 << 16), Tokenizer(assets)
    short._text._block_chars = 3
    for _ in range(2):
        assert short.encode_scaffold(text, "") == whole.encode_scaffold(text, "")
        for parse_special in (True, False):
            ids = short.encode(text, parse_special=parse_special)
            assert ids == whole.encode(text, parse_special=parse_special)
