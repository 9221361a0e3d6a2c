"""Starting an appliance for a bench: its configuration, its metrics, and processes that end or never get ready."""

import subprocess
import sys

import pytest

from appliance.bench.runner import BenchError
from appliance.bench.served import bench_document, end, free_port, scratch_folder, sum_samples, wait_until_ready
from appliance.config import build

EXPOSITION = """# TYPE zccp_steps_total counter
zccp_steps_total{phase="decode"} 5.0
zccp_steps_total{phase="prefill"} 2.0
# TYPE zccp_kv_pages_used gauge
zccp_kv_pages_used 3.0
"""


def test_document_is_a_configuration_without_keys_on_loopback(tmp_path) -> None:
    data = {"server": {"host": "0.0.0.0", "workers": 3}, "paths": {"home": str(tmp_path)}}
    data["auth"] = {"keys_file": str(tmp_path / "keys.json"), "allow_unauthenticated_non_loopback": True}
    made = build(bench_document(build(data, {}), tmp_path / "s", 1234, {"engine": {"weight_form": "float32"}}), {})
    assert (made.server.host, made.server.port, made.server.workers) == ("127.0.0.1", 1234, 3)
    assert made.keys_file == tmp_path / "s" / "keys.json"
    assert (made.home, made.run) == (tmp_path, tmp_path / "s" / "run")
    assert (made.engine.weight_form, made.log.level) == ("float32", "warning")


def test_samples_are_summed_over_labels() -> None:
    assert sum_samples(EXPOSITION) == {"zccp_steps_total": 7.0, "zccp_kv_pages_used": 3.0}


def test_a_process_that_ends_is_told_with_its_log(tmp_path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as sink:
        process = subprocess.Popen([sys.executable, "-c", "import sys; sys.exit('no store here')"], stderr=sink)
    with pytest.raises(BenchError, match="the server ended with 1; its log ends: no store here"):
        wait_until_ready(process, f"http://127.0.0.1:{free_port()}/", log)


def test_a_process_that_never_answers_is_given_up_and_ended(tmp_path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    times = iter([0.0, 1.0, 1000.0])
    with pytest.raises(BenchError, match=r"not ready after 120 s; its log ends: \(no log\)"):
        wait_until_ready(process, f"http://127.0.0.1:{free_port()}/", tmp_path / "log", lambda: next(times))
    end(process)
    assert process.returncode == -15
    end(process)


def test_scratch_folder_goes_with_the_block() -> None:
    with scratch_folder() as folder:
        (folder / "a").write_text("x")
    assert not folder.exists()
