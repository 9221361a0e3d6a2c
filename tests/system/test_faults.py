"""What goes wrong around a running appliance: processes that die, signals, a taken port, stores that do not fit."""

import json
import os
import shutil
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.running_appliance import RunningAppliance, eventually, write_config, zccp

pytestmark = pytest.mark.system

MODEL = "smollm2-135m"
LONG = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 300, "ignore_eos": True, "stream": True}


class Reader(threading.Thread):
    """Reads one stream to its end in a thread."""

    def __init__(self, url: str, body: dict) -> None:
        super().__init__(daemon=True)
        self.text = ""
        self.error: Exception | None = None
        self._url, self._body = url, body
        self.start()

    def run(self) -> None:
        try:
            with httpx.stream("POST", f"{self._url}/v1/completions", json=self._body, timeout=60) as reply:
                for piece in reply.iter_text():
                    self.text += piece
        except httpx.HTTPError as error:
            self.error = error

    def wait_for_text(self) -> None:
        eventually(lambda: self.text.count("data:") > 3, lambda: f"no stream: {self.text} {self.error}")


@pytest.fixture
def own(home: Path, tmp_path: Path) -> Iterator[RunningAppliance]:
    """An appliance of this test's own, with a short drain."""
    with RunningAppliance(write_config(tmp_path, home, {"server": {"drain_s": 20.0}})) as appliance:
        yield appliance


@pytest.fixture
def copied_home(home: Path, tmp_path: Path) -> Path:
    """A home with the shared model and a copy of its programs, to be damaged."""
    copy = tmp_path / "home"
    copy.mkdir()
    (copy / "models").symlink_to(home / "models")
    shutil.copytree(home / "programs", copy / "programs")
    shutil.copy2(home / "signing-key.pem", copy / "signing-key.pem")
    return copy


ANSWER = {"model": MODEL, "prompt": "The capital of France is", "max_tokens": 12, "temperature": 0}
RESTARTED = "a child process ended; it is started again"


def answer(appliance: RunningAppliance) -> str:
    """What the appliance says to one question, once it is able to."""
    found: list[str] = []

    def is_answered() -> bool:
        try:
            reply = appliance.client.post("/v1/completions", json=ANSWER)
        except httpx.TransportError:
            return False
        if reply.status_code == 200:
            found.append(reply.json()["choices"][0]["text"])
        return reply.status_code == 200

    eventually(is_answered, lambda: f"no answer: {appliance.log()[-3:]}", 60)
    return found[0]


def test_a_killed_engine_is_a_typed_error_and_a_new_one_answers_the_same(own: RunningAppliance) -> None:
    before = answer(own)
    reader = Reader(own.url, LONG)
    reader.wait_for_text()
    os.kill(own.process_id("engine"), signal.SIGKILL)
    reader.join(30)
    assert not reader.is_alive()
    assert "[DONE]" not in reader.text
    last = json.loads(reader.text.rstrip().rsplit("data: ", 1)[1])
    assert last["error"]["code"] in ("not_ready", "generation_failed")
    worker = own.process_id("worker-0")
    assert answer(own) == before
    (line,) = own.events(RESTARTED)
    assert (line["child"], line["ended"]) == ("engine", "signal SIGKILL")
    assert own.process_id("worker-0") == worker
    held = own.settled()
    assert held['zccp_restarts_total{process="engine"}'] == 1
    assert held["zccp_compilations_total"] == 0


def test_a_killed_worker_is_replaced_and_the_engine_frees_what_it_held(own: RunningAppliance) -> None:
    before = answer(own)
    reader = Reader(own.url, LONG)
    reader.wait_for_text()
    engine = own.process_id("engine")
    os.kill(own.process_id("worker-0"), signal.SIGKILL)
    reader.join(30)
    assert reader.error is not None
    assert "[DONE]" not in reader.text
    assert answer(own) == before
    (line,) = own.events(RESTARTED)
    assert (line["child"], line["ended"]) == ("worker-0", "signal SIGKILL")
    assert own.process_id("engine") == engine
    assert own.settled()['zccp_restarts_total{process="worker"}'] == 1


def test_an_engine_that_hangs_is_replaced(home: Path, tmp_path: Path) -> None:
    with RunningAppliance(write_config(tmp_path, home, {"engine": {"step_timeout_s": 3.0}})) as appliance:
        before = answer(appliance)
        reader = Reader(appliance.url, LONG)
        reader.wait_for_text()
        os.kill(appliance.process_id("engine"), signal.SIGSTOP)
        reader.join(30)
        assert "[DONE]" not in reader.text
        assert "engine lost" in reader.text
        assert answer(appliance) == before
        (line,) = appliance.events(RESTARTED)
        assert line["ended"].startswith("signal SIGKILL: no sign of life for ")


def test_sigterm_lets_a_running_answer_end(own: RunningAppliance) -> None:
    reader = Reader(own.url, LONG | {"max_tokens": 120})
    reader.wait_for_text()
    own.process.send_signal(signal.SIGTERM)
    reader.join(60)
    assert reader.error is None
    assert reader.text.rstrip().endswith("[DONE]")
    assert '"finish_reason":"length"' in reader.text
    assert own.process.wait(60) == 0


def test_sigterm_ends_what_does_not_end_in_time_with_an_error(home: Path, tmp_path: Path) -> None:
    with RunningAppliance(write_config(tmp_path, home, {"server": {"drain_s": 0.5}})) as appliance:
        reader = Reader(appliance.url, LONG | {"max_tokens": 7000})
        reader.wait_for_text()
        appliance.process.send_signal(signal.SIGTERM)
        reader.join(30)
        assert not reader.is_alive()
        assert "[DONE]" not in reader.text
        assert "not_ready" in reader.text
        assert appliance.process.wait(60) == 0
    assert not list((tmp_path / "run").glob("*/engine.sock"))


def test_a_taken_port_is_named(home: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = zccp("serve", "--config", str(write_config(tmp_path, home)), "--port", str(port))
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1 port {port}" in done.stderr
    assert "--port" in done.stderr


def test_an_unknown_model_is_named_with_those_there_are(home: Path, tmp_path: Path) -> None:
    done = zccp("serve", "--config", str(write_config(tmp_path, home)), "--model", "smollm9", "--json")
    assert done.returncode == 1
    message = json.loads(done.stdout)["error"]
    assert "'smollm9'" in message
    assert MODEL in message


def refusal(home: Path, folder: Path, sections: dict | None = None) -> str:
    """What ``zccp serve`` says before it ends because of its store."""
    done = zccp("serve", "--config", str(write_config(folder, home, sections)), timeout_s=120)
    assert done.returncode == 1, done.stderr
    (line,) = [
        entry
        for entry in map(json.loads, (text for text in done.stderr.splitlines() if text.startswith("{")))
        if entry["event"] == "the engine ends"
    ]
    return line["cause"]


def test_a_store_for_another_plan_is_refused_with_its_differences(home: Path, tmp_path: Path) -> None:
    said = refusal(home, tmp_path, {"engine": {"slots": 4, "context": 4096}})
    assert "plan context: the store has 8192, needed is 4096" in said
    assert "plan slots: the store has 16, needed is 4" in said
    assert "zccp build" in said


def test_an_edited_manifest_is_refused(copied_home: Path, tmp_path: Path) -> None:
    (manifest,) = (copied_home / "programs" / MODEL).glob("*-int8-*/manifest.json")
    document = json.loads(manifest.read_text())
    document["programs"][0]["sha256"] = "0" * 64
    manifest.write_text(json.dumps(document))
    said = refusal(copied_home, tmp_path)
    assert "is not signed by the key that is trusted here" in said
    assert "zccp build" in said


def test_a_changed_program_is_refused(copied_home: Path, tmp_path: Path) -> None:
    (folder,) = [path.parent for path in (copied_home / "programs" / MODEL).glob("*-int8-*/manifest.json")]
    program = min(folder.glob("decode*.zst"))
    program.write_bytes(program.read_bytes()[:-1] + b"\0")
    said = refusal(copied_home, tmp_path)
    assert f"{program} is not the file that was signed" in said
    doctor = zccp("doctor", "--config", str(write_config(tmp_path, copied_home)))
    assert doctor.returncode == 1
    assert f"{program} is not the file that was signed" in doctor.stdout


def test_another_weight_form_has_a_store_of_its_own(copied_home: Path, tmp_path: Path) -> None:
    said = refusal(copied_home, tmp_path, {"engine": {"weight_form": "bf16"}})
    assert "there is no program store in" in said
    assert "bf16" in said
    assert "zccp build" in said


def test_verbs_on_a_built_home(home: Path, tmp_path: Path) -> None:
    config = str(write_config(tmp_path, home))
    built = json.loads(zccp("build", "--json", "--config", config).stdout)
    assert built["compiled"] == 0
    plan = json.loads(zccp("plan", "--json", "--config", config).stdout)
    assert (plan["context"], plan["weight_form"], plan["programs"]) == (8192, "int8", built["programs"])
    models = json.loads(zccp("models", "--json").stdout)["models"]
    assert MODEL in [model["name"] for model in models]
    doctor = zccp("doctor", "--config", config)
    assert doctor.returncode == 0, doctor.stdout
    converted = json.loads(zccp("convert", "--json", "--config", config).stdout)
    assert (converted["form"], converted["made"]) == ("int8", False)
