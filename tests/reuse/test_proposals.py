"""Look-ups beside requests: what is counted, published and said, in one worker and in nodes that share a Redis."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from api.ports import GenerationRequest, RequestRecord, SamplingParams
from api.trace import trace_of
from appliance.config_cache import CacheConfig
from appliance.reuse import proposals as module
from appliance.reuse.fingerprint import Fingerprinter
from appliance.reuse.index import EmbeddedIndex, Entry
from appliance.reuse.prefix import reference_of, space_of
from appliance.reuse.proposals import MAX_WAITING, Proposals
from appliance.reuse.serving import proposals_of
from appliance.telemetry import Metrics
from appliance.tracing import TraceExporter
from tests.support.node import ask, node, wait_for
from tests.support.redis_server import needs_redis, redis_server

TEXT = " ".join(f"clause{number} of the contract" for number in range(30))
"""Of 800 characters, which are as many ids."""


class Rig:
    """Proposals over an index in memory; id n is chr(32 + n)."""

    def __init__(self, *, warmup: bool = False, index: EmbeddedIndex | None = None, node: str = "node-1") -> None:
        self.registry = CollectorRegistry()
        self.index = EmbeddedIndex(100, 60.0, lambda: 0.0) if index is None else index
        self.proposals = Proposals(
            lambda token: chr(32 + token).encode(), lambda: (Fingerprinter(), self.index),
            Metrics(self.registry).of_fingerprints,
            node=node, model="m", warmup=warmup,
        )  # fmt: skip

    def look(self, text: str, request_id: str = "r", tenant: str = "t") -> dict[str, object]:
        ids = [ord(character) - 32 for character in text]
        request = GenerationRequest(
            request_id=request_id, model="m", tenant=tenant, prompt_ids=ids, sampling=SamplingParams(max_tokens=1)
        )
        self.proposals.offer(request)
        self.proposals.settle()
        return {name.rpartition(".")[2]: value for name, value in self.proposals.attributes(request_id).items()}

    def end(self, request_id: str = "r", status: int = 200, tokens: int = 1) -> None:
        self.proposals.ended(record(request_id, status, tokens))
        self.proposals.settle()

    def counts(self) -> dict[str, float]:
        """Prompts by result."""
        samples = next(f for f in self.registry.collect() if f.name == "zccp_fingerprints").samples
        return {s.labels["result"]: s.value for s in samples if s.name.endswith("_total")}

    def tokens(self, kind: str) -> float:
        return self.registry.get_sample_value("zccp_fingerprint_tokens_total", {"kind": kind}) or 0.0


def record(request_id: str, status: int = 200, tokens: int = 1) -> RequestRecord:
    return RequestRecord(
        request_id=request_id, trace=trace_of(None), route="/v1/completions", tenant="t", status=status,
        finish_reason="stop", stream=False, completion_tokens=tokens,
    )  # fmt: skip


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.proposals.close()


def test_a_prompt_like_one_that_was_answered_is_proposed_as_far_as_it_is_equal(rig: Rig) -> None:
    assert rig.look(TEXT) == {"result": "miss", "bands": 0, "shared_tokens": 0, "node": ""}
    rig.end()
    edited = TEXT.replace("clause20 ", "paragraph20 ")
    place = edited.index("paragraph20")
    assert rig.look(edited) == {
        "result": "hit", "bands": pytest.approx(9, abs=3), "shared_tokens": place // 64 * 64, "node": "node-1",
    }  # fmt: skip
    assert rig.counts() == {"miss": 1, "hit": 1}
    assert rig.tokens("looked_up") == len(TEXT) + len(edited)
    assert rig.tokens("shared") == place // 64 * 64


def test_the_last_id_is_never_shared(rig: Rig) -> None:
    text = TEXT[:640]
    rig.look(text)
    rig.end()
    assert rig.look(text)["shared_tokens"] == 639


def test_a_difference_at_the_beginning_is_found_alike_and_shares_nothing(rig: Rig) -> None:
    rig.look(TEXT)
    rig.end()
    assert rig.look("x " + TEXT)["result"] == "different"
    assert rig.tokens("shared") == 0


@pytest.mark.parametrize(("status", "tokens"), [(499, 3), (500, 0), (200, 0)])
def test_what_was_not_answered_is_not_published(rig: Rig, status: int, tokens: int) -> None:
    rig.look(TEXT)
    rig.end(status=status, tokens=tokens)
    assert rig.look(TEXT)["result"] == "miss"


def test_tenants_share_nothing(rig: Rig) -> None:
    rig.look(TEXT, tenant="a")
    rig.end()
    assert rig.look(TEXT, tenant="b")["result"] == "miss"
    assert rig.look(TEXT, tenant="a")["result"] == "hit"


def test_the_first_tenth_is_published_before_the_rest_where_that_is_on() -> None:
    index = EmbeddedIndex(100, 60.0, lambda: 0.0)
    first, second = Rig(warmup=True, index=index, node="a"), Rig(warmup=True, index=index, node="b")
    first.look(TEXT)
    assert second.look(TEXT) == {"result": "hit", "bands": 12, "shared_tokens": len(TEXT) // 10, "node": "a"}
    first.end()
    assert second.look(TEXT)["shared_tokens"] == len(TEXT) // 64 * 64
    first.proposals.close()
    second.proposals.close()


def test_a_poisoned_entry_is_believed_as_far_as_its_marks_are_true(rig: Rig) -> None:
    fingerprint = Fingerprinter().of(TEXT)
    assert fingerprint is not None
    foreign = [7] * 1000
    for reference in (b"", b"\0" * 512, reference_of(space_of("t", "m"), foreign), b"odd"):
        rig.index.publish(space_of("t", "m"), fingerprint, Entry(reference, "liar", 131_072))
        assert rig.look(TEXT)["result"] == "different"
    assert rig.tokens("shared") == 0


@pytest.mark.parametrize("text", ["", "Hi", "?" * 63, "a" * 64])
def test_short_prompts_have_nothing_to_share(rig: Rig, text: str) -> None:
    assert rig.look(text) == {}
    rig.end()
    assert rig.counts() == {"none": 1}


def test_prompts_are_left_out_when_too_many_wait(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    started, go_on = threading.Event(), threading.Event()

    def slow(*_: object) -> bytes:
        started.set()
        go_on.wait(20)
        return b""

    monkeypatch.setattr(module, "reference_of", slow)
    request = GenerationRequest(
        request_id="r", model="m", tenant="", prompt_ids=[ord(c) - 32 for c in TEXT],
        sampling=SamplingParams(max_tokens=1),
    )  # fmt: skip
    for _ in range(MAX_WAITING + 5):
        rig.proposals.offer(request)
    assert started.wait(20)
    assert rig.counts() == {"skipped": 5}
    go_on.set()
    rig.proposals.settle()
    assert rig.counts() == {"skipped": 5, "miss": MAX_WAITING}


def test_a_fault_in_a_look_up_is_counted_and_no_more(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "reference_of", lambda *_: 1 / 0)
    with capture_logs() as lines:
        assert rig.look(TEXT) == {}
        rig.proposals.settle()
    assert [line["event"] for line in lines] == ["a fingerprint failed; its request is not concerned"]
    assert rig.counts() == {"skipped": 1}
    rig.end()
    rig.proposals.close()
    rig.proposals.offer(GenerationRequest(
        request_id="late", model="m", tenant="", prompt_ids=[1] * 100, sampling=SamplingParams(max_tokens=1),
    ))  # fmt: skip


def test_what_is_remembered_of_requests_is_bounded(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_REMEMBERED", 3)
    for number in range(6):
        rig.look(TEXT, f"r{number}")
    assert [bool(rig.proposals.attributes(f"r{number}")) for number in range(6)] == [False] * 3 + [True] * 3
    rig.end("r0")
    assert rig.look(TEXT)["result"] == "miss"


def test_a_trace_says_what_was_found(rig: Rig) -> None:
    kept = InMemorySpanExporter()
    exporter = TraceExporter(SimpleSpanProcessor(kept), sample_ratio=1.0)
    rig.look(TEXT)
    exporter.export(record("r"), rig.proposals.attributes("r"))
    attributes = kept.get_finished_spans()[-1].attributes or {}
    assert attributes["zccp.fingerprint.result"] == "miss"
    assert attributes["zccp.request_id"] == "r"


def test_the_configuration_chooses_the_parts() -> None:
    made = proposals_of(
        CacheConfig(csf_mask_patterns=("date",)), lambda _: b"x", "m", Metrics(CollectorRegistry()).of_fingerprints
    )
    made.close()


@contextmanager
def shared_nodes(folder: Path, url: str) -> Iterator[list]:
    """Two nodes that share an index."""
    common = {"redis_url": url, "csf_mask_patterns": ["date"], "redis_timeout_ms": 500}
    for name in ("one", "two"):
        (folder / name).mkdir()
    with (
        node(folder / "one", cache={**common, "node_name": "one"}) as one,
        node(folder / "two", cache={**common, "node_name": "two"}) as two,
    ):
        one.wait_ready()
        two.wait_ready()
        yield [one, two]


@needs_redis
def test_two_nodes_find_each_other_s_prompts_and_outlive_redis(tmp_path: Path) -> None:
    def results(of: object, result: str) -> float:
        return of.metrics().get(f'zccp_fingerprints_total{{result="{result}"}}', 0.0)

    folder = tmp_path / "redis"
    folder.mkdir()
    with redis_server(folder, password="CANARY-password") as server, shared_nodes(tmp_path, server.url) as nodes:
        one, two = nodes
        assert ask(one.url, TEXT, 4).status_code == 200
        wait_for(lambda: server.client().dbsize() == 12)
        assert ask(two.url, TEXT.replace("clause29", "paragraph"), 4).status_code == 200
        wait_for(lambda: results(two, "hit") == 1)
        assert two.metrics()['zccp_fingerprint_tokens_total{kind="shared"}'] >= 640
        server.send(signal.SIGSTOP)
        for number in range(8):
            assert ask(two.url, f"{number} {TEXT}", 4).status_code == 200
        wait_for(lambda: two.metrics()["zccp_index_down"] == 1)
        server.kill()
        server.start()
        wait_for(lambda: ask(two.url, TEXT, 4).status_code == 200 and two.metrics()["zccp_index_down"] == 0)
        for running in nodes:
            assert running.end() == 0
            text = running.log.read_text()
            assert "CANARY" not in text
            assert "clause" not in text
        events = [line["event"] for line in two.lines() if line["event"].startswith("the fingerprint index")]
        assert events == [
            "the fingerprint index does not answer; requests go on without it", "the fingerprint index answers again",
        ]  # fmt: skip
