"""The one path from ids to text: stop strings and UTF-8, whatever the cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.text_stream import StopMatcher, TextStream
from tests.support.scripted_engine import BOS, EOS, ScriptedDecoder


def whole_text_search(text: str, stops: list[str], *, keep: bool) -> tuple[str, str | None]:
    """The plain statement: the stop string that is complete first wins, of equals the longest."""
    found = [(text.index(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    end, _, stop = min(found)
    return text[: end if keep else end - len(stop)], stop


SMALL = st.text(alphabet="ab", min_size=1, max_size=5)


@given(
    text=st.text(alphabet="ab", max_size=40),
    stops=st.lists(SMALL, min_size=1, max_size=4),
    cuts=st.lists(st.integers(1, 7), max_size=40),
    keep=st.booleans(),
)
def test_bc010_any_chunking_equals_a_search_in_the_whole_text(
    text: str, stops: list[str], cuts: list[int], keep: bool
) -> None:
    matcher = StopMatcher(stops, keep_found=keep)
    seen, position = "", 0
    for cut in [*cuts, len(text) + 1]:
        piece = text[position : position + cut]
        position += len(piece)
        seen += matcher.push(piece)
        if matcher.found is None:
            held = text[len(seen) : position]
            assert not held or any(stop.startswith(held) and stop != held for stop in stops)
    seen += matcher.flush()
    assert (seen, matcher.found) == whole_text_search(text, stops, keep=keep)


@given(text=st.text(max_size=30), extra=st.binary(max_size=3))
def test_bc001_bytes_become_whole_characters_only(text: str, extra: bytes) -> None:
    data = text.encode() + extra
    stream = TextStream(ScriptedDecoder())
    pieces = [stream.push(byte) for byte in data]
    if not extra:
        assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text
    whole = "".join(pieces) + stream.flush()
    assert whole == data.decode("utf-8", "replace")
    assert stream.decoded <= len(whole)


def test_bc012_only_a_real_prefix_is_held_back() -> None:
    matcher = StopMatcher(["Z" * 30])
    assert [matcher.push(piece) for piece in ("one", " two", " Z", "Z", " x")] == ["one", " two", " ", "", "ZZ x"]


@pytest.mark.parametrize(
    ("text", "stops", "keep", "seen", "found"),
    [
        ("0123456789x", ["3456789"], False, "012", "3456789"),
        ("hello END", ["END"], False, "hello ", "END"),
        ("ENDhello", ["END"], False, "", "END"),
        ("END", ["END"], False, "", "END"),
        ("p;q;r;s", ["q;r"], True, "p;q;r", "q;r"),
        ("xabcd", ["abcd", "bc"], False, "xa", "bc"),
        ("xabc", ["bc", "abc"], False, "x", "abc"),
        ("aaab", ["aab"], False, "a", "aab"),
    ],
)
def test_stop_string_table(text: str, stops: list[str], keep: bool, seen: str, found: str) -> None:
    for size in range(1, len(text) + 1):
        matcher = StopMatcher(stops, keep_found=keep)
        out = "".join(matcher.push(text[i : i + size]) for i in range(0, len(text), size))
        assert (out + matcher.flush(), matcher.found) == (seen, found)
    assert matcher.push("more") == ""


def test_an_unfinished_prefix_is_given_at_the_end() -> None:
    stream = TextStream(ScriptedDecoder(), ["END"])
    assert [stream.push(byte) for byte in b"x EN"] == ["x", " ", "", ""]
    assert stream.flush() == "EN"
    assert stream.found is None


def test_special_tokens_give_no_text_and_do_not_split_a_stop_string() -> None:
    stream = TextStream(ScriptedDecoder(), ["END"])
    assert "".join(stream.push(token_id) for token_id in (BOS, *b"aEN", EOS, *b"D!")) == "a"
    assert stream.found == "END"
    assert stream.flush() == ""


def test_bc003_an_incomplete_character_ends_as_one_replacement_run() -> None:
    stream = TextStream(ScriptedDecoder())
    assert [stream.push(byte) for byte in "x\U0001f9ff".encode()[:-1]] == ["x", "", "", ""]
    assert stream.flush() == "\ufffd"
