"""Streaming text equals the decoding of the whole list, and half a character is never shown."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Engine

from appliance.model.gguf_tokenizer import rebuild_text_assets
from appliance.model.tokenizer import TextAssets, Tokenizer
from tests.support.texts import TEXTS
from tests.support.tiny_models import tiny_tokenizer
from tests.support.tiny_sentencepiece import gguf_metadata, trained


def byte_level():
    return Tokenizer(TextAssets(tokenizer_json=tiny_tokenizer().to_str()))


def spm(*, metaspace=False):
    tokenizer = Tokenizer(rebuild_text_assets(gguf_metadata(trained())))
    if metaspace:
        engine = tokenizer._parsing
        engine.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace("▁", "first"), decoders.Fuse()])
        tokenizer = Tokenizer(TextAssets(tokenizer_json=engine.to_str()))
    return tokenizer


TOKENIZERS = {"byte level": byte_level(), "spm": spm(), "spm metaspace": spm(metaspace=True)}


def streamed(tokenizer, ids, prompt=()):
    decoder = tokenizer.decoder(prompt)
    return [*(decoder.push(token_id) for token_id in ids), decoder.flush()]


def whole(tokenizer, ids):
    return tokenizer._parsing.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_streams_equal_whole_decodings(name):
    tokenizer = TOKENIZERS[name]
    for text in TEXTS:
        ids = tokenizer.encode(text, parse_special=False)
        pieces = streamed(tokenizer, ids)
        assert "".join(pieces) == whole(tokenizer, ids)
        assert "\ufffd" not in "".join(pieces)


def test_round_trip_of_byte_level_text():
    for text in TEXTS:
        ids = TOKENIZERS["byte level"].encode(text, parse_special=False)
        assert "".join(streamed(TOKENIZERS["byte level"], ids)) == text


@given(ids=st.lists(st.integers(0, 383), max_size=40))
def test_any_byte_level_ids_stream_as_they_decode(ids):
    assert "".join(streamed(TOKENIZERS["byte level"], ids)) == whole(TOKENIZERS["byte level"], ids)


@given(text=st.text(max_size=30), cut=st.integers(0, 60))
def test_a_stream_cut_anywhere_shows_whole_characters_and_one_run(text, cut):
    for tokenizer in TOKENIZERS.values():
        ids = tokenizer.encode(text, parse_special=False)[:cut]
        *pushed, flushed = streamed(tokenizer, ids)
        assert "\ufffd" not in "".join(pushed) or "\ufffd" in text
        assert set(flushed) <= {"\ufffd"}
        assert text.lstrip(" ").startswith("".join(pushed).lstrip(" "))


@given(ids=st.lists(st.integers(5, 419), max_size=40))
def test_any_sentencepiece_ids_stream_as_they_decode_up_to_damaged_bytes(ids):
    """Where bytes are no UTF-8 the engine drops valid neighbours; everything else is equal."""
    ours, theirs = "".join(streamed(TOKENIZERS["spm"], ids)), whole(TOKENIZERS["spm"], ids)
    if "\ufffd" not in ours:
        assert ours == theirs
    assert ("\ufffd" in ours) == ("\ufffd" in theirs)


def test_the_dummy_space_is_dropped_once():
    tokenizer = TOKENIZERS["spm"]
    ids = [tokenizer._parsing.token_to_id(token) for token in ("▁", "▁two", "▁words")]
    assert None not in ids
    assert streamed(tokenizer, ids) == ["", " two", " words", ""]
    assert whole(tokenizer, ids) == " two words"
    assert (
        "".join(streamed(TOKENIZERS["spm metaspace"], ids)) == whole(TOKENIZERS["spm metaspace"], ids) == " two words"
    )


def test_a_byte_level_leading_space_stays():
    engine = Engine(models.BPE({"Ġhello": 0, "h": 1}, []))
    engine.decoder = decoders.ByteLevel()
    assert streamed(Tokenizer(TextAssets(tokenizer_json=engine.to_str())), [0]) == [" hello", ""]


def test_a_completion_of_text_keeps_its_space_and_one_after_a_control_token_does_not():
    tokenizer = TOKENIZERS["spm"]
    words = tokenizer._parsing.token_to_id("▁words")
    assert streamed(tokenizer, [words], prompt=[1, words]) == [" words", ""]
    assert streamed(tokenizer, [words], prompt=[1, 4]) == ["words", ""]
    assert streamed(tokenizer, [words]) == ["words", ""]


def test_control_tokens_give_no_text_and_do_not_end_the_opening():
    tokenizer = TOKENIZERS["spm"]
    words = tokenizer._parsing.token_to_id("▁words")
    assert streamed(tokenizer, [1, words, 2, words]) == ["", "words", "", " words", ""]
    assert whole(tokenizer, [1, words, 2, words]) == "words words"


def test_an_emoji_arrives_whole_and_a_cut_one_as_one_run():
    for name in ("byte level", "spm"):
        tokenizer = TOKENIZERS[name]
        ids = tokenizer.encode("🧿", parse_special=False)
        ids = [token_id for token_id in ids if not tokenizer.table.is_special(token_id)]
        *before, last, end = streamed(tokenizer, ids)
        assert ("".join(before), last[-1:], end) == ("", "🧿", "")
        *before, end = streamed(tokenizer, ids[:-1])
        assert "".join(before) == ""
        assert set(end) == {"\ufffd"}


def test_token_bytes_join_to_the_text():
    for name in ("byte level", "spm"):
        tokenizer = TOKENIZERS[name]
        for text in ("漢字 👍🏽 ok", "é 🧿"):
            ids = [i for i in tokenizer.encode(text, parse_special=False) if not tokenizer.table.is_special(i)]
            assert b"".join(map(tokenizer.table.raw, ids)).decode().removeprefix(" ") == text


def test_tokens_outside_the_vocabulary_and_with_odd_text():
    engine = tiny_tokenizer()
    engine.add_tokens([AddedToken("tool call", special=False), AddedToken("<ctl>", special=True)])
    tokenizer = Tokenizer(TextAssets(tokenizer_json=engine.to_str()))
    call, control = engine.token_to_id("tool call"), engine.token_to_id("<ctl>")
    assert tokenizer.table.raw(call) == b"tool call"
    assert tokenizer.table.raw(control) == b"<ctl>"
    assert tokenizer.table.raw(10**6) == b""
    assert tokenizer.table.raw(-1) == b""
    assert streamed(tokenizer, [call, control, 10**6]) == ["tool call", "", "", ""]
    assert whole(tokenizer, [call, control]) == "tool call"
