"""The known failures: each is provoked where that is possible, and told in one line with its cause and remedy."""

import json
import os
import shutil
import subprocess
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from appliance.config import ApplianceConfig, build
from appliance.diagnosis import MIB, Sight, diagnose, look, read_metrics
from appliance.findings import Finding
from appliance.keys import add
from tests.support.api_rig import CHAT, Rig, chat
from tests.support.front import fronted, needs_nginx
from tests.support.node import ask, node, wait_for
from tests.support.scripted_engine import ScriptedEngine, say

HEALTH = {"status": "ready", "reason": "", "model": "tiny", "free_pages": 4}


def findings(config: ApplianceConfig, sight: Sight | None = None) -> dict[str, Finding]:
    return {finding.name: finding for finding in diagnose(config, sight or look(config))}


def seen(*, again: dict[str, float] | None = None, health: dict[str, Any] = HEALTH, **samples: float) -> Sight:
    """A sight of these samples; ``__`` in a name begins the value of a label."""
    named = Counter[str]()
    for name, value in samples.items():
        stem, _, label = name.partition("__")
        named[f"zccp_{stem}{{{label}}}" if label else f"zccp_{stem}"] = value  # pyright: ignore[reportArgumentType]
    return Sight("http://x", health, named, again=Counter(again) if again is not None else named)


def test_a_running_appliance_shows_its_own_failures(tmp_path: Path) -> None:
    reason = tmp_path / "reason"
    server, memory = {"max_connections": 64}, {"segment_count": 8}
    with node(tmp_path, engine=("engine-unless", str(reason)), server=server, shared_memory=memory) as running:
        running.wait_ready()
        port = int(running.url.rsplit(":", 1)[1])
        config = build({"server": {"port": port}, "shared_memory": memory, "paths": {"home": str(tmp_path)}}, {})
        found = findings(config)
        states = {name: finding.state for name, finding in found.items()}
        assert states == dict.fromkeys(states, "ok")
        assert found["service"].evidence == f"arithmetic is ready at {running.url}"
        assert found["segments"].evidence == "0 of 8 segments in use, 0 requests found none"
        parts = found["growth"].evidence.split("; ")
        assert parts[0] == "0 of 256 pages for 0 running sequences"
        engine, workers = (part.split() for part in parts[1:])
        assert (engine[0], engine[2], workers[0]) == ("engine", "MiB,", "workers")
        assert 10 < int(engine[1]) < 2000
        assert 10 < int(workers[1]) < 2000
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda _: ask(running.url, "abc", 300, n=8).status_code, range(8)))
        assert 429 in answers
        wait_for(lambda: running.metrics()["zccp_segments_refused_total"] == answers.count(429))
        wait_for(lambda: running.metrics()["zccp_segments_used"] == 0)
        full = findings(config)["segments"]
        assert (full.state, full.evidence) == (
            "failed",
            f"segments are exhausted: 0 of 8 segments in use, {answers.count(429)} requests found none",
        )
        assert full.remedy.startswith("raise shared_memory.segment_count")
        reason.write_text("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes")
        os.kill(running.children()["engine"], 9)
        wait_for(lambda: "RESOURCE_EXHAUSTED" in httpx.get(f"{running.url}/health").json()["reason"])
        found = findings(config)
        assert found["memory"].evidence.startswith(
            "the memory limit is too high: the engine ended: the engine ended and"
        )
        assert "gpu.memory_limit_mb" in found["memory"].remedy
        assert found["service"].state == "failed"
        assert running.end() == 0
    assert findings(config)["growth"] == Finding(
        "growth", "not checked", f"not running: nothing answers at {running.url}"
    )


def test_metrics_that_need_a_key_say_so(tmp_path: Path) -> None:
    keys = tmp_path / "home" / "keys.json"
    key, _ = add(keys, "ops", expires_in_s=0, requests_per_minute=0, tokens_per_minute=0, admin=True)
    with node(tmp_path) as running, pytest.MonkeyPatch.context() as patch:
        running.wait_ready()
        config = build({"server": {"port": int(running.url.rsplit(":", 1)[1])}}, {})
        patch.delenv("ZCCP_API_KEY", raising=False)
        found = findings(config)
        assert found["service"].state == "ok"
        assert found["segments"].evidence == f"{running.url}/metrics needs an admin key; put one into ZCCP_API_KEY"
        patch.setenv("ZCCP_API_KEY", key)
        assert findings(config)["segments"].state == "ok"
        assert running.end() == 0


def test_samples_are_added_up_over_labels() -> None:
    page = 'a_total{x="1",y="u"} 2\na_total{x="2",y="u"} 3\nb 4\n'
    assert read_metrics(page) == {"a_total": 5, "a_total{1}": 2, "a_total{2}": 3, "a_total{u}": 5, "b": 4}


def test_a_low_hit_rate_needs_traffic_to_be_one() -> None:
    config = build({}, {})
    for cached, computed, state in ((0, 49_999, "ok"), (0, 50_000, "failed"), (5_000, 45_000, "ok")):
        sight = seen(cached_prompt_tokens_total=cached, prompt_tokens_total=computed)
        assert findings(config, sight)["reuse"].state == state
    low = findings(config, seen(cached_prompt_tokens_total=900, prompt_tokens_total=99_100))["reuse"]
    assert low.evidence == "the hit rate is low: 900 of 100000 prompt ids were reused"
    assert "cache.csf_mask_patterns" in low.remedy


def test_pages_without_a_sequence_are_a_leak_if_they_stay() -> None:
    config = build({}, {})
    held = {"kv_pages_used": 7, "kv_pages_total": 64}
    leak = findings(config, seen(**held))["growth"]
    assert (leak.state, leak.evidence) == (
        "failed",
        "device memory leaks: 7 of 64 pages in use and no sequence runs or waits",
    )
    assert findings(config, seen(**held, again={}))["growth"].state == "ok"
    for busy in ("requests_running", "requests_waiting"):
        assert findings(config, seen(**held, **{busy: 1}))["growth"].state == "ok"


def test_memory_of_the_host_that_grows_names_the_process() -> None:
    config = build({}, {})
    for now, then, state in ((1511, 1000, "ok"), (1513, 1000, "failed"), (2990, 2000, "ok"), (3010, 2000, "failed")):
        sight = seen(resident_bytes__engine=now * MIB, resident_bytes_when_ready__engine=then * MIB)
        found = findings(config, sight)["growth"]
        assert found.state == state
        assert f"engine {now} MiB, {then} when ready" in found.evidence
        assert found.evidence.startswith("memory of the host grows (engine): ") is (state == "failed")


def test_cancelled_requests_stand_for_resets_where_there_is_no_nginx() -> None:
    config = build({}, {})
    for cancelled, total, state in ((9, 19, "ok"), (1, 20, "ok"), (2, 20, "failed")):
        sight = seen(requests_finished_total=total, requests_finished_total__cancelled=cancelled)
        assert findings(config, sight)["resets"].state == state


@needs_nginx
def test_streams_that_clients_reset_are_found_in_nginxs_log() -> None:
    engine = ScriptedEngine(say("Hello there", pause=30.0))
    with fronted(Rig(engine)) as made:
        urls = [made.front.url + CHAT] * 22
        command = ["curl", "--silent", "--parallel", "--http2", "--max-time", "2", "--cacert", made.front.certificate]
        command += ["--json", json.dumps(chat(stream=True)), *urls]
        subprocess.run(command, check=False, timeout=60, capture_output=True)
        wait_for(lambda: made.front.log().count("HTTP/2.0") == 22)
        found = findings(made.front.config, Sight("http://x", why="not running"))["resets"]
        log = Path(made.front.config.proxy.log_directory) / "access.log"
        assert (found.state, found.evidence) == (
            "failed",
            f"clients reset their streams: 22 of the last 22 requests over HTTP/2 were reset before their end ({log})",
        )


def test_a_limit_above_what_the_card_has_or_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = {"engine": {"target": "a100_pcie_80"}}
    nothing = Sight("http://x", why="not running")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert findings(build(target, {}), nothing)["memory"].state == "not checked"
    high = findings(build({**target, "gpu": {"memory_limit_mb": 90_000}}, {}), nothing)["memory"]
    assert high.evidence.startswith("gpu.memory_limit_mb is too high: 90000 MiB, a card of target a100_pcie_80 leaves ")
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\n[ "$1" = --id=0 ] && echo 30000\n')
    program.chmod(0o755)
    config = build({**target, "gpu": {"memory_limit_mb": 40_000}}, {})
    assert findings(config, nothing)["memory"].evidence == (
        "gpu.memory_limit_mb is too high: 40000 MiB wanted, 30000 MiB free while nothing of ours runs"
    )
    assert findings(config, seen())["memory"].evidence == "40000 MiB wanted of each card, 30000 MiB free now"


def test_redis_answers_or_not(tmp_path: Path) -> None:
    if (program := shutil.which("redis-server")) is None:
        pytest.skip("there is no redis-server")
    path = tmp_path / "redis.sock"
    config = build({"cache": {"redis_url": f"unix://{path}"}}, {})
    nothing = Sight("http://x", why="not running")
    assert findings(build({}, {}), nothing)["redis"].evidence == "no Redis: cache.redis_url is empty"
    missing = findings(config, nothing)["redis"]
    assert (missing.state, missing.remedy) == ("failed", "start it, or correct cache.redis_url")
    assert missing.evidence.startswith("Redis cannot be reached: ConnectionError: ")
    command = [program, "--port", "0", "--unixsocket", str(path), "--save", "", "--dir", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        try:
            wait_for(path.is_socket)
            assert findings(config, nothing)["redis"].state == "ok"
        finally:
            server.terminate()
