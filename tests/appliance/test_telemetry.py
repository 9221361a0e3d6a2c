"""The log and the metrics, in processes of their own because both are set once a process."""

import json
import subprocess
import sys
from pathlib import Path

from appliance.telemetry import forget_gauges, redact

LOG = """
import logging, sys
import structlog
from appliance.telemetry import configure_logging
configure_logging("info", "worker-3")
log = structlog.get_logger("zccp.test")
log.info("hello", request_id="r1", count=2, ratio=0.5, ok=True, none=None)
log.debug("unseen")
log.warning("key", given="Authorization: Bearer zk-abc-CANARY123", url="redis://u:CANARY123@h/0")
log.info("other", header={"x-api-key": "sk-test-CANARY-123"})
logging.getLogger("library").warning("got %s", "zk-0123-CANARY123", extra={"request_id": "r2"})
logging.getLogger("zccp.imposter").warning("{not our json} zk-0123-CANARY123")
def fail(error):
    try:
        raise error
    except Exception:
        log.error("failed", exc_info=True)
        logging.getLogger("api.app").error("failed too", exc_info=True, extra={"request_id": "r3"})
from appliance.keys import KeyFileError
fail(ValueError("prompt CANARY-PROMPT"))
fail(KeyFileError("our own words"))
fail(OSError(28, "No space left on device"))
"""


def _log_lines() -> list[dict]:
    done = subprocess.run([sys.executable, "-c", LOG], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    assert "CANARY" not in done.stderr
    return [json.loads(line) for line in done.stderr.splitlines()]


def test_every_line_is_json_with_process_and_time_and_no_secret() -> None:
    lines = _log_lines()
    assert len(lines) == 11
    for line in lines:
        assert line["process"] == "worker-3"
        assert line["time"].endswith("Z")
        assert line["level"] in ("info", "warning", "error")
    hello = {key: value for key, value in lines[0].items() if key not in ("time", "pid")}
    assert hello == {
        "request_id": "r1", "count": 2, "ratio": 0.5, "ok": True, "none": None,
        "event": "hello", "level": "info", "process": "worker-3",
    }  # fmt: skip
    assert lines[1]["url"] == "redis[redacted]h/0"
    assert (lines[3]["event"], lines[3]["logger"], lines[3]["request_id"]) == ("got [redacted]", "library", "r2")


def test_exceptions_show_where_and_only_our_own_words() -> None:
    library, foreign, own, _, system, _ = _log_lines()[5:]
    assert library["exception"] == ["builtins.ValueError at <string>:15 fail"]
    assert foreign["exception"] == library["exception"]
    assert foreign["request_id"] == "r3"
    assert own["exception"][0].startswith("appliance.keys.KeyFileError: our own words at ")
    assert "No space left on device" in system["exception"][0]


def test_mappings_keep_their_form_without_secrets() -> None:
    event = {"phases": {"planning": 0.25, "of": ["sk-abcdefgh", 2]}}
    assert redact(None, "", event) == {"phases": {"planning": 0.25, "of": ["[redacted]", 2]}}


METRICS = """
import os, sys
from pathlib import Path
from prometheus_client import CollectorRegistry
from api.ports import RequestPhase, RequestRecord
from api.trace import TraceContext
from appliance.host.ledger import Usage
from appliance.telemetry import Metrics, NodeMetrics, WorkerObserver, configure_logging, count_as, counts_are_shared
assert counts_are_shared()
if len(sys.argv) > 3:
    count_as(sys.argv[3])
configure_logging("info", "test")
directory = Path(os.environ["PROMETHEUS_MULTIPROC_DIR"])
if sys.argv[1] == "main":
    node = NodeMetrics(CollectorRegistry())
    node.restarts.labels("engine").inc()
    node.workers_ready.set(2)
    node.engine_ready.set(0)
elif sys.argv[1] == "engine":
    from appliance.engine_metrics import EngineObserver
    from appliance.engine_ports import EngineReport
    from planner.buckets import Bucket, Phase
    from planner.prefixes import ReuseCounts
    engine = EngineObserver(Metrics(CollectorRegistry()))
    engine.launched(Bucket(Phase.DECODE, 4, 1, 2), 3, 3)
    engine.launched(Bucket(Phase.PREFILL, 4, 16, 2), 1, 16)
    engine.stepped(0.001, 16, 3, 2)
    engine.reported(EngineReport("ready", "", 3, 1, 20, 30, 40, 6, ReuseCounts(90, 30, 2, 5), 1.0))
    engine.compiled()
else:
    observer = WorkerObserver(
        Metrics(CollectorRegistry()), {"/v1/messages"}, lambda: [Usage("k1", 2, 30), Usage("gone", 1, 1)],
        lambda: {"k1": "team"}, directory,
    )
    for number in range(int(sys.argv[2])):
        observer.request_finished(RequestRecord(
            request_id=f"r{number}", trace=TraceContext("a" * 32, "b" * 16), tenant=f"t{number}",
            route="/v1/messages" if number == 0 else f"/random/{number}",
            status=200 + number % 5 * 100, finish_reason="stop" if number == 0 else f"reason{number}", stream=True,
            prompt_tokens=5, cached_tokens=1, completion_tokens=7, time_to_first_token_s=0.02,
            time_per_output_token_s=0.004, duration_s=0.5, phases=(RequestPhase("queue", 0.0, 0.25),),
        ))
    if sys.argv[1] == "show":
        media, body = observer.exposition()
        assert media.startswith("text/plain"), media
        sys.stdout.write(body.decode())
"""


def _metrics(directory: Path, *arguments: str) -> str:
    command = ["env", f"PROMETHEUS_MULTIPROC_DIR={directory}", sys.executable, "-c", METRICS, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _samples(text: str) -> dict[str, float]:
    return {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if line[:1] not in ("#", "")
    }


def test_any_worker_answers_for_the_whole_node(tmp_path: Path) -> None:
    _metrics(tmp_path, "engine")
    _metrics(tmp_path, "count", "1")
    samples = _samples(_metrics(tmp_path, "show", "1"))
    expected = {
        "zccp_requests_running": 3, "zccp_requests_waiting": 1, "zccp_kv_pages_used": 10, "zccp_kv_pages_total": 40,
        "zccp_kv_use_ratio": 0.25, "zccp_prompt_tokens_total": 16, "zccp_generated_tokens_total": 3,
        "zccp_kv_pages_cached": 6, "zccp_kv_evictions_total": 5, "zccp_prompt_tokens_reused_total": 30,
        "zccp_prefix_joins_total": 2,
        "zccp_preemptions_total": 2, "zccp_compilations_total": 1, 'zccp_steps_total{phase="decode"}': 1,
        'zccp_steps_total{phase="prefill"}': 1, 'zccp_step_rows_total{phase="decode"}': 3,
        "zccp_time_to_first_token_seconds_count": 2, "zccp_time_per_output_token_seconds_count": 2,
        'zccp_request_phase_seconds_sum{phase="queue"}': 0.5, "zccp_request_seconds_sum": 1.0,
        'zccp_requests_finished_total{reason="stop"}': 2,
        'zccp_requests_total{route="/v1/messages",status="2xx"}': 2, "zccp_cached_prompt_tokens_total": 2,
        'zccp_key_requests_total{key="k1",tenant="team"}': 2, 'zccp_key_tokens_total{key="k1",tenant="team"}': 30,
    }  # fmt: skip
    assert {name: samples.get(name) for name in expected} == expected
    assert not any("gone" in name for name in samples)


def test_a_successor_goes_on_with_the_counts_and_not_with_what_was_true_then(tmp_path: Path) -> None:
    for _ in range(3):
        _metrics(tmp_path, "engine", "as", "engine")
        _metrics(tmp_path, "count", "1", "worker-0")
    files = sorted(path.name for path in tmp_path.iterdir())
    assert {name.rpartition("_")[2] for name in files} == {"engine.db", "worker-0.db"}
    shown = _metrics(tmp_path, "show", "1", "worker-1")
    assert _samples(shown)["zccp_generated_tokens_total"] == 9
    assert _samples(shown)["zccp_time_to_first_token_seconds_count"] == 4
    assert _samples(shown)["zccp_kv_pages_used"] == 10
    forget_gauges(tmp_path, "engine")
    after = _samples(_metrics(tmp_path, "show", "1", "worker-1"))
    assert "zccp_kv_pages_used" not in after
    assert "zccp_engine_ready" not in after
    assert after["zccp_generated_tokens_total"] == 9
    assert {path.name for path in tmp_path.iterdir()} - set(files) == {
        f"{kind}_worker-1.db" for kind in ("counter", "histogram", "gauge_livemostrecent", "gauge_livesum")
    }


def test_the_main_process_says_what_no_engine_is_there_to_say(tmp_path: Path) -> None:
    _metrics(tmp_path, "engine", "as", "engine")
    _metrics(tmp_path, "main", "as", "main")
    samples = _samples(_metrics(tmp_path, "show", "1"))
    assert samples["zccp_engine_ready"] == 0
    assert samples["zccp_workers_ready"] == 2
    assert samples['zccp_restarts_total{process="engine"}'] == 1
    assert samples['zccp_restarts_total{process="worker"}'] == 0
    _metrics(tmp_path, "engine", "as", "engine")
    assert _samples(_metrics(tmp_path, "show", "1"))["zccp_engine_ready"] == 1


def test_bc_182_labels_are_bounded(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    few = _samples(_metrics(tmp_path / "a", "show", "10"))
    many = _samples(_metrics(tmp_path / "b", "show", "2000"))
    assert set(many) == set(few)
    assert 'zccp_requests_finished_total{reason="other"}' in many
    assert 'zccp_requests_total{route="other",status="4xx"}' in many
