"""The ingest bench: bodies of an exact size, what is made of times, and one short run through real processes."""

import json

import pytest

from appliance.bench import ingest
from appliance.bench.ingest_node import ID_CHARS, NUM_DIGITS, PROMPT_IDS, LengthCodec
from appliance.bench.runner import BenchContext, BenchError
from appliance.config import load
from tests.support.tiny_models import save_hf


@pytest.mark.parametrize("num_bytes", [500, 4096, 4097, 524_288])
def test_a_body_has_the_size_that_was_asked_for(num_bytes) -> None:
    sent = ingest.body('He said: "a\\b"\n' * (num_bytes // 10), num_bytes)
    assert len(sent) == num_bytes
    request = json.loads(sent)
    assert request.pop("prompt").startswith('He said: "a\\b"\nHe')
    assert request == {"model": "ingest", "max_tokens": NUM_DIGITS, "temperature": 0}


def test_the_text_is_ascii_and_as_long_as_wanted() -> None:
    text = ingest.prose(1_500_000)
    assert len(text) == 1_500_000
    assert text.isascii()


def test_median_and_tail_of_the_way() -> None:
    p50, p99 = ingest.added_results([float(n) for n in range(1, 301)])
    assert (p50.name, p50.value, p50.target, p50.met) == ("ingest_added_p50_ms", 150.0, 3.0, False)
    assert (p99.name, p99.value, p99.repeats, p99.spread) == ("ingest_added_p99_ms", 297.0, 300, (99.0, 299.0))


def test_the_codec_looks_at_nothing_but_the_length() -> None:
    codec = LengthCodec()
    assert list(codec.encode("x" * 10 * ID_CHARS, parse_special=True)) == list(range(10))
    assert len(codec.encode("", parse_special=False)) == 1
    assert len(codec.encode("x" * 10 * PROMPT_IDS, parse_special=False)) == PROMPT_IDS
    assert "".join(map(codec.push, (1, 22, 345))) == "125"


@pytest.fixture
def context(tmp_path):
    save_hf(tmp_path / "tiny", "llama")
    file = tmp_path / "config.yaml"
    file.write_text(json.dumps({"paths": {"home": str(tmp_path)}, "model": {"reference": str(tmp_path / "tiny")}}))
    return BenchContext(load(file), lambda _what, _done, _total: None)


def test_a_short_run_through_real_processes(context, monkeypatch) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # so that what the bench sets does not stay
    monkeypatch.setattr(ingest, "NODES", 1)
    monkeypatch.setattr(ingest, "SIZES_MB", (0.5, 2.0))
    monkeypatch.setattr(ingest, "PEAK_BYTES", 1024 * 1024)
    findings = ingest.run(context, requests=5, rounds=2)
    assert [result.name for result in findings.results] == [
        "ingest_added_p50_ms", "ingest_added_p99_ms", "ingest_slope_vs_decode", "ingest_slope_ms_mb",
        "ingest_peak_over_body", "cold_tokenise_ratio", "repeat_tokenise_ratio", "plain_tokenise_ms",
    ]  # fmt: skip
    assert all(result.value > 0 for result in findings.results if result.name != "ingest_slope_ms_mb")


def test_an_answer_that_is_no_time_is_an_error(monkeypatch) -> None:
    client = object.__new__(ingest._Client)
    client._host = "h"
    client._socket = type("Sink", (), {"sendall": lambda _self, _data: None})()
    monkeypatch.setattr(ingest._Client, "_answer", lambda _self: {"error": {"message": "too long"}})
    with pytest.raises(BenchError, match=r"a body of 2 bytes was answered with .*too long"):
        client.ask(b"{}")
