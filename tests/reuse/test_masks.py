"""Mask patterns: what the named ones hide, and which own ones are refused."""

import time

import pytest

from appliance.reuse.masks import MAX_PATTERN_CHARS, MAX_PATTERNS, NAMED, PLACEHOLDER, MaskPatternError, Masks

HIDDEN = {
    "date": ["2026-11-30", "30.11.2026", "11/30/26", "3 March 2024", "March 3rd, 2024", "Sept. 12, 2025"],
    "email": ["a.b+c@mail.example.org"],
    "hex_id": ["0xdeadbeef00112233", "9f86d081884c7d659a2feaa0c55ad015"],
    "ip_address": ["10.0.0.254", "2001:db8:0:1:1:1:1:1"],
    "number": ["17", "3.14", "1,000,000"],
    "patient_id": ["patient_id: A-1207", "Patient ID = 77", "MRN: 0042", 'patient_id": "x9', "case no: 12"],
    "request_id": ["request_id=ab.12", "Session-ID: 9", "trace id: 4bf9"],
    "time": ["9:30", "21:04:59", "9:30 p.m."],
    "timestamp": ["2026-11-30T09:15:00Z", "2026-11-30 09:15:00.123+01:00", "March 3, 2024 at 9:30 pm", "1764493200"],
    "uuid": ["123e4567-E89B-12d3-a456-426614174000", "123e4567e89b12d3a456426614174000"],
}


@pytest.mark.parametrize("name", NAMED)
def test_what_a_named_pattern_hides(name: str) -> None:
    masks = Masks([name])
    for value in HIDDEN[name]:
        assert masks.apply(f"before {value} after").split() == ["before", PLACEHOLDER, "after"], value
    assert masks.apply("no field of the kind, may it rest") == "no field of the kind, may it rest"


def test_named_patterns_go_from_the_special_to_the_general_in_any_order() -> None:
    text = "at 2026-11-30T09:15:00Z for patient_id: 7, 3 units"
    wanted = ["at", PLACEHOLDER, "for", PLACEHOLDER, ",", PLACEHOLDER, "units"]
    for names in (list(NAMED), list(reversed(NAMED))):
        assert Masks(names).apply(text).split() == wanted


def test_own_patterns_are_applied_beside_named_ones_and_to_any_script() -> None:
    masks = Masks([r"Ref\. \pL+-\d+", "date"])
    assert masks.apply("Ref. Größe-12 vom 30.11.2026 — 漢字").split() == [PLACEHOLDER, "vom", PLACEHOLDER, "—", "漢字"]
    assert Masks().apply("untouched 2026-11-30") == "untouched 2026-11-30"


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(?<=x)y", r"'\(\?<=x\)y' is no regular expression that RE2 takes: .*\(\?<="),
        (r"(a)\1", "no regular expression that RE2 takes: invalid escape"),
        ("[a-", "missing ]"),
        ("a{2,1}", "invalid repetition size"),
        ("*a", "no argument for repetition"),
        ("(a{100}){100}", "invalid repetition size"),
        (r"(\pL{50}){20}", "pattern too large"),
        (r"\p{Foo}", "invalid character class"),
        ("\ud800", "no regular expression"),
        ("", "matches the empty text"),
        ("x*", "'x\\*' matches the empty text"),
        (r"\b", "matches the empty text"),
        ("(?:)|a", "matches the empty text"),
        ("patientid", "'patientid' is no pattern with a name; those are patient_id, request_id, .* written as"),
        ("x" * 1001, f"has 1001 characters; at most {MAX_PATTERN_CHARS}"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(pattern: str, message: str) -> None:
    with pytest.raises(MaskPatternError, match=message):
        Masks([pattern])


def test_too_many_patterns_are_refused() -> None:
    with pytest.raises(MaskPatternError, match=f"there are {MAX_PATTERNS + 1} patterns; at most {MAX_PATTERNS}"):
        Masks(["a"] * (MAX_PATTERNS + 1))


def test_refusing_a_pattern_writes_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(MaskPatternError):
        Masks(["SECRET["])
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("pattern", ["(a|aa)+$", "(x+x+)+y", "(.*)*z", "(a|b|ab)*c"])
def test_no_pattern_takes_long(pattern: str) -> None:
    masks = Masks([pattern])
    began_s = time.process_time()
    masks.apply("a" * 8000 + "x" * 8000 + "!")
    assert time.process_time() - began_s < 1.0  # one that goes back would take longer than the universe has been there
