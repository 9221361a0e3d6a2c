"""The command line: help everywhere, JSON on standard output, exit codes, and the terminal chat."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner, Result

from appliance import cli
from appliance.chat import Answer, ChatError, ChatSettings, Conversation, say, talk
from appliance.config import build
from appliance.doctor import examine
from appliance.planning import store_directory
from planner.architecture import ModelArchitecture
from planner.formats import KvFormat, WeightForm
from planner.plan import make_plan

VERBS = [
    ["serve"], ["build"], ["plan"], ["convert"], ["doctor"], ["models", "list"], ["models", "pull"],
    ["models", "export"], ["models", "import"], ["models", "rm"], ["keys", "add"], ["keys", "list"],
    ["keys", "revoke"], ["keys", "usage"], ["bench"], ["chat"], ["config"], ["version"],
]  # fmt: skip


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    monkeypatch.setenv("ZCCP_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("ZCCP_RUN", str(tmp_path / "run"))
    monkeypatch.delenv("ZCCP_CONFIG", raising=False)

    def invoke(*arguments: str, stdin: str | bytes = "") -> Result:
        return CliRunner().invoke(cli.main, list(arguments), input=stdin)

    return invoke


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_every_verb_has_help_and_json(run: Callable[..., Result], verb: list[str]) -> None:
    result = run(*verb, "--help")
    assert result.exit_code == 0
    assert "--json" in result.stdout
    assert "--help" in result.stdout


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom appliance.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as end:\n"
        "    heavy = {'jax', 'numpy', 'httpx', 'rich', 'litestar', 'structlog', 'yaml', 'msgspec'}\n"
        "    print(end.code, sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "0 []\n"


@pytest.mark.parametrize(
    "arguments",
    [("build", "--threads", "0"), ("plan", "--nosuch"), ("nonsense",), ("plan", "--explain", "--context", "-5")],
)
def test_a_wrong_use_is_an_object_too(run: Callable[..., Result], arguments: tuple[str, ...]) -> None:
    result = run(*arguments, "--json")
    assert result.exit_code == 2
    assert json.loads(result.stdout)["error"] in result.stderr
    assert run(*arguments).stdout == ""


@pytest.mark.parametrize("free", ["nan", "inf"])
def test_free_memory_is_a_number(run: Callable[..., Result], free: str) -> None:
    result = run("plan", "--architecture", "llama-3.1-8b", "--explain", "--context", "9", "--free-gb", free, "--json")
    assert (result.exit_code, json.loads(result.stdout)) == (
        2,
        {"error": f"--free-gb is {free}; it must be a number of GB"},
    )


def test_a_reader_that_has_enough_is_no_error() -> None:
    command = f"{sys.executable} -m appliance.cli config --reference | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert done.stdout.splitlines()[-1] in ("0", "1")


def test_main_process_never_loads_jax() -> None:
    code = "import sys, appliance.lifecycle, appliance.worker; print({'jax', 'jaxlib', 'orbax'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("nonsense",), 2),
        (("serve", "--nonsense"), 2),
        (("keys", "add"), 2),
        (("config", "--config", "/nonexistent/config.yaml"), 2),
        (("serve", "--port", "70000"), 2),
        (("keys", "revoke", "none"), 1),
        (("plan", "--model", "no-such-model"), 1),
        (("chat", "--url", "http://127.0.0.1:9", "--json"), 2),
        (("version",), 0),
    ],
)
def test_exit_codes(run: Callable[..., Result], arguments: tuple[str, ...], code: int) -> None:
    assert run(*arguments).exit_code == code


def test_failures_are_one_line_on_stderr_and_json_on_stdout(run: Callable[..., Result]) -> None:
    plain = run("keys", "revoke", "none")
    assert plain.stdout == ""
    assert plain.stderr.startswith("zccp: no key with id 'none' in ")
    result = run("keys", "revoke", "none", "--json")
    assert json.loads(result.stdout)["error"].startswith("no key with id 'none'")
    wrong = run("serve", "--port", "70000", "--workers", "0", "--json")
    assert json.loads(wrong.stdout)["error"].splitlines()[0] == "server.port is 70000; it must be between 0 and 65535"


def test_life_of_a_key(run: Callable[..., Result]) -> None:
    assert json.loads(run("keys", "list", "--json").stdout) == {"keys": []}
    made = json.loads(run("keys", "add", "team", "--tokens-per-minute", "9", "--expires-days", "1", "--json").stdout)
    assert made["key"].startswith(f"zk-{made['id']}-")
    (listed,) = json.loads(run("keys", "list", "--json").stdout)["keys"]
    assert (listed["id"], listed["tenant"], listed["tokens_per_minute"]) == (made["id"], "team", 9)
    secret = made["key"].split("-")[2]
    assert secret not in run("keys", "list").stdout
    assert made["id"] in run("keys", "list").stdout
    shown = run("keys", "add", "other")
    assert shown.stdout.startswith("zk-")
    assert len(shown.stdout.split()) == 1
    assert "cannot be shown again" in shown.stderr
    assert json.loads(run("keys", "revoke", made["id"], "--json").stdout) == {"revoked": made["id"], "tenant": "team"}
    assert json.loads(run("keys", "usage", "--json").stdout) == {"usage": []}


def test_configuration_in_force_and_its_reference(run: Callable[..., Result], tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("server: {port: 81}\ncache: {redis_url: 'redis://:CANARY@h'}\n")
    shown = run("config", "--config", str(file), "--json")
    assert json.loads(shown.stdout)["server"]["port"] == 81
    assert "CANARY" not in shown.stdout
    assert "port: 81" in run("config", "--config", str(file)).stdout
    keys = json.loads(run("config", "--reference", "--json").stdout)["keys"]
    assert {"path": "server.port", "type": "whole number", "default": "`8000`"}.items() <= keys[1].items()
    assert "| `server.port` |" in run("config", "--reference").stdout


def test_doctor_is_honest(run: Callable[..., Result]) -> None:
    result = run("doctor", "--json")
    findings = {finding["name"]: finding for finding in json.loads(result.stdout)["findings"]}
    assert result.exit_code == 1
    assert findings["python"]["state"] == "ok"
    assert findings["model"]["state"] == "failed"
    assert findings["model"]["remedy"] == "zccp models pull smollm2-135m"
    assert findings["programs"]["remedy"] == "zccp build"
    assert {name for name, finding in findings.items() if finding["state"] == "not checked"} == {
        "gpu", "service", "segments", "reuse", "resets", "growth",
    }  # fmt: skip
    assert findings["segments"]["evidence"].startswith("not running: nothing answers at http://127.0.0.1:")


def test_doctor_goes_on_when_a_check_breaks(tmp_path: Path) -> None:
    (tmp_path / "keys.json").write_text("{")
    config = build({"paths": {"home": str(tmp_path), "run": str(tmp_path)}, "server": {"host": "10.0.0.1"}}, {})
    findings = {finding.name: finding for finding in examine(config)}
    assert findings["keys"].state == "failed"
    assert findings["port"].evidence.startswith("cannot listen on 10.0.0.1 port 8000")


def test_models_list_names_what_can_be_fetched(run: Callable[..., Result]) -> None:
    rows = json.loads(run("models", "list", "--json").stdout)["models"]
    assert {"name": "smollm2-135m", "stored": False, "reference": "smollm2-135m", "licence": "Apache-2.0"} in rows


def test_models_without_a_command_lists_and_takes_no_options_of_one(run: Callable[..., Result]) -> None:
    assert run("models", "--json").stdout == run("models", "list", "--json").stdout
    misplaced = run("models", "--json", "list")
    assert misplaced.exit_code == 2
    assert "zccp models list ..." in misplaced.stderr


def test_each_form_and_code_path_has_a_program_store_of_its_own(tmp_path: Path) -> None:
    def place(weight_form: WeightForm, implementation: str) -> Path:
        architecture = ModelArchitecture(
            family="llama", layers=2, embed=32, ffw=48, q_heads=4, kv_heads=2, head_dim=16, vocab=80, context=64,
            norm_eps=1e-6, rope_theta=10_000.0, query_scale=0.25, tied_embeddings=True,
        )  # fmt: skip
        plan = make_plan(
            architecture, target="cpu_native", weight_form=weight_form, kv_format=KvFormat.FLOAT32, context=0, slots=2,
            prefill_chunk=32, prefill_slots=1, page_size=16, kv_bytes=0, implementation=implementation,
        )  # fmt: skip
        return store_directory(tmp_path, Path("models/tiny"), plan)

    places = {place(form, code) for form in (WeightForm.INT8, WeightForm.FLOAT32) for code in ("xla", "native")}
    assert len(places) == 4
    assert {path.parent for path in places} == {tmp_path / "programs" / "tiny"}


def server(answers: list[str], seen: list[dict], *, status: int = 200, cut: bool = False) -> httpx.MockTransport:
    def handle(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        body = json.loads(request.content)
        seen.append({**body, "key": request.headers.get("authorization")})
        if status != 200:
            return httpx.Response(status, json={"error": {"message": "no such key"}})
        pieces = [{"choices": [{"delta": {"content": piece}, "finish_reason": None}]} for piece in answers.pop(0)]
        end = {"choices": [{"delta": {}, "finish_reason": "stop"}]}
        usage = {"choices": [], "usage": {"completion_tokens": 3}}
        events = [json.dumps(event) for event in (*pieces, *(() if cut else (end, usage)))]
        lines = [": ping", *(f"data: {event}" for event in events), *(() if cut else ("data: [DONE]",))]
        return httpx.Response(200, text="\n\n".join(lines) + "\n\n")

    return httpx.MockTransport(handle)


def conversation(transport: httpx.MockTransport, **settings: object) -> Conversation:
    given = ChatSettings(url="http://x", **settings)  # type: ignore[arg-type]
    headers = {"authorization": f"Bearer {given.key}"} if given.key else {}
    return Conversation(given, httpx.Client(base_url="http://x", transport=transport, headers=headers))


def test_a_conversation_remembers_until_it_is_cleared() -> None:
    seen: list[dict] = []
    talker = conversation(
        server(["one", "two", "new"], seen), key="k", system="be brief", max_tokens=9, temperature=0.0
    )
    out, notes = StringIO(), StringIO()
    talk(talker, iter(["a\n", "  \n", "b\n", "/what\n", "/clear\n", "c\n", "/exit\n", "never\n"]), out, notes)
    assert out.getvalue() == "one\ntwo\nnew\n"
    system = {"role": "system", "content": "be brief"}
    a, one = {"role": "user", "content": "a"}, {"role": "assistant", "content": "one"}
    assert seen[1]["messages"] == [system, a, one, {"role": "user", "content": "b"}]
    assert seen[2]["messages"] == [system, {"role": "user", "content": "c"}]
    assert (seen[0]["model"], seen[0]["max_tokens"], seen[0]["temperature"], seen[0]["key"]) == (
        "m",
        9,
        0.0,
        "Bearer k",
    )
    assert "There is no command /what. /help shows this" in notes.getvalue()


def test_ctrl_c_stops_the_answer_and_keeps_what_came() -> None:
    class Interrupted(StringIO):
        def write(self, text: str) -> int:
            if text == "n":
                raise KeyboardInterrupt
            return super().write(text)

    seen: list[dict] = []
    talker = conversation(server(["one", "two"], seen))
    out = Interrupted()
    answer = say(talker, "a", out, StringIO())
    assert (answer.text, answer.stopped, out.getvalue()) == ("on", True, "o\n")
    assert list(talker.ask("b", Answer())) == ["t", "w", "o"]
    assert seen[1]["messages"][1] == {"role": "assistant", "content": "on"}


def test_ctrl_c_at_the_prompt_is_an_empty_line() -> None:
    def lines() -> Iterator[str]:
        yield "a"

    class Raising:
        def __init__(self) -> None:
            self.rest = lines()
            self.raised = False

        def __iter__(self) -> "Raising":
            return self

        def __next__(self) -> str:
            if not self.raised:
                self.raised = True
                raise KeyboardInterrupt
            return next(self.rest)

    out = StringIO()
    talk(conversation(server(["one"], [])), Raising(), out, StringIO())
    assert out.getvalue() == "one\n"


def test_refusals_and_cuts_are_told_in_words() -> None:
    notes = StringIO()
    talk(conversation(server([], [], status=401)), iter(["a"]), StringIO(), notes)
    assert "401: no such key" in notes.getvalue()
    with pytest.raises(ChatError, match="broke off before its end"):
        say(conversation(server(["one"], [], cut=True)), "a", StringIO(), StringIO())


def test_what_is_no_appliance_is_told_apart() -> None:
    for content in (b"<html>", b"[]", b'{"data": []}', b'{"data": 5}'):
        page = httpx.MockTransport(lambda _, content=content: httpx.Response(200, content=content))
        with pytest.raises(ChatError, match=r"^http://x names no model; is it an appliance's address\?"):
            conversation(page).model()


def test_a_message_and_a_key_that_cannot_be_sent_are_misuse(run: Callable[..., Result], tmp_path: Path) -> None:
    message = run("chat", stdin=b"ab\xff")
    assert (message.exit_code, message.stderr) == (
        2,
        "zccp: standard input is no UTF-8 from byte 2 on; convert it first\n",
    )
    for content in (b"k\xffy", "k\u00e9y".encode(), b"k\ny"):
        (tmp_path / "key").write_bytes(content)
        key = run("chat", "--key-file", str(tmp_path / "key"), stdin="hello")
        assert (key.exit_code, key.stderr) == (
            2,
            "zccp: the API key must be one line of ASCII characters; check --key-file\n",
        )


def test_nobody_listening_is_told_with_the_remedy(run: Callable[..., Result]) -> None:
    result = run("chat", "--url", "http://127.0.0.1:9", "--json", stdin="hello")
    assert result.exit_code == 1
    assert "is `zccp serve` running there?" in json.loads(result.stdout)["error"]
