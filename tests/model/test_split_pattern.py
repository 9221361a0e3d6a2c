"""What is said of a pattern holds for every match that a real engine finds."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from appliance.model.split_pattern import PatternError, SplitPattern

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = {"gpt-2": GPT2, "llama-3": LLAMA3, "tekken": TEKKEN, "deepseek": DEEPSEEK, "digits": r"\p{N}{1,3}"}
ALPHABET = "aZé字12٣ \n\r\t'sT.,/。-\xa0"


@pytest.mark.parametrize(
    ("pattern", "parted", "joined"),
    [
        (GPT2, ["a ", "1 ", ". ", "a\n", ".\n", "a1", "a.", "字。"], ["aa", "11", "  ", " a", " \n", "..", "'s"]),
        (LLAMA3, ["a ", "1 ", ". ", "a\n", "1\n", "字。"], [".\n", "\n\n", ".a", " \n", "11"]),
        (TEKKEN, ["a ", "1 ", "aA", "字。"], ["Aa", "./", "/\n"]),
        (r"\s+(?!\S)", ["aa", "a "], ["  ", " a"]),
        ("ab{2,3}c", ["aa", "ac", "ba", "cb"], ["ab", "bb", "bc"]),
        ("(a|bc)+", ["ac", "bb"], ["aa", "ab", "bc", "ca", "cb"]),
    ],
)
def test_which_neighbours_a_match_can_have(pattern, parted, joined):
    split = SplitPattern(pattern)
    assert [pair for pair in parted if not split.parts(*pair)] == []
    assert [pair for pair in joined if split.parts(*pair)] == []


def test_a_look_ahead_behind_a_character_needs_white_space_after_it():
    """At a cut the first side sees the end of the text, which the look-ahead takes like white space."""
    split = SplitPattern(r"a(?!\S)|b")
    assert split.parts("a", " ")
    assert not split.parts("a", "b")
    assert split.parts("b", "a")


@pytest.mark.parametrize(
    ("pattern", "taken", "not_taken"),
    [
        (LLAMA3, "aé字1 \n.", ""),
        (DEEPSEEK, "a字.\n ", "1\xad"),
        ("ab?|c{2}|x*d", "ad", "bcx"),
        (r"\s+(?!\S)|(?i:q)", "", " q"),
    ],
)
def test_which_characters_are_always_in_a_match(pattern, taken, not_taken):
    split = SplitPattern(pattern)
    assert [char for char in taken if not split.takes(char)] == []
    assert [char for char in not_taken if split.takes(char)] == []


@pytest.mark.parametrize("name", PATTERNS)
@given(text=st.text(alphabet=ALPHABET, max_size=40))
def test_real_matches_agree(name, text):
    """A real engine's matches hold no parted neighbours, and lie the same in both sides of every such place."""
    split = SplitPattern(PATTERNS[name])
    engine = pre_tokenizers.Split(Regex(PATTERNS[name]), "removed", invert=True)

    def matches(part):
        return [span for _, span in engine.pre_tokenize_str(part)] if part else []

    whole = matches(text)
    covered = {place for start, end in whole for place in range(start, end)}
    for at in range(1, len(text)):
        a, b = text[at - 1 : at + 1]
        if split.takes(a):
            assert at - 1 in covered
        if split.parts(a, b):
            behind = [(start + at, end + at) for start, end in matches(text[at:])]
            assert whole == matches(text[:at]) + behind


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        (r"(?<=a)b", "a group of a kind"),
        (r"a(?=b)", "a group of a kind"),
        (r"(?!a)b", "a group of a kind"),
        (r"(?>a|b)", "a group of a kind"),
        (r"(?i)a", "a group of a kind"),
        (r"a++", "possessive"),
        (r"^a", r"'\^'"),
        (r"a$", r"'\$'"),
        (r"\bword", r"the escape \\b"),
        (r"(a)\1", r"the escape \\1"),
        (r"\p{Han}+", "no general category"),
        (r"\w+", r"the escape \\w"),
        (r"[[:alpha:]]+", "a class of classes"),
        (r"[a&&b]", "a class of classes"),
        (r"[]a]", "an empty class"),
        (r"[a", "one without an end"),
        (r"[a-\d]", "a range without an end"),
        (r"(a", "unpaired"),
        (r"a)", "unpaired"),
        (r"a{x}", "no quantifier"),
        (r"a{2", "no quantifier"),
        ("a\\", r"the escape \\"),
        (r"a*", "may match nothing"),
        ("", "may match nothing"),
    ],
)
def test_what_is_not_understood_is_refused(pattern, words):
    with pytest.raises(PatternError, match=words) as caught:
        SplitPattern(pattern)
    assert repr(pattern) in str(caught.value)


def test_the_categories_are_those_of_general_category():
    found = {unicodedata.category(chr(code)) for code in range(0x30000)} - {"Cc", "Cf", "Cn", "Co", "Cs"}
    for category in found | {category[0] for category in found}:
        assert SplitPattern(rf"\p{{{category}}}")
    with pytest.raises(PatternError):
        SplitPattern(r"\p{Lx}")
