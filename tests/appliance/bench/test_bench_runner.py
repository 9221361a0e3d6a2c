"""The runner: which benches there are, options, exit codes, and what it prints."""

import io
import json
import sys
from types import SimpleNamespace

import click
import pytest

from appliance.bench import runner, start
from appliance.bench.report import Findings, Result
from appliance.bench.runner import BenchContext, BenchError, BenchUseError


def fake_bench(outcome: Findings | Exception, seen: list) -> SimpleNamespace:
    def run(context: BenchContext, **options: object) -> Findings:
        context.progress("counting", 1, 2)
        seen.append(options)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return SimpleNamespace(
        __doc__="fake: a bench.\n\nMore.", OPTIONS=[click.Option(["--rounds"], type=int, default=3)], run=run
    )


FOUND = Findings((Result("ready_s", 2.0, "s", 1, (2.0, 2.0), 8.0, "<="),), ("a note",))


@pytest.fixture
def bench(monkeypatch, tmp_path):
    seen: list = []

    def install(outcome):
        monkeypatch.setitem(sys.modules, "appliance.bench.start", fake_bench(outcome, seen))
        monkeypatch.setenv("ZCCP_HOME", str(tmp_path))
        return seen

    return install


def run(*options: str, name: str = "start", **more) -> tuple[int, str]:
    out = io.StringIO()
    return runner.main(name, options, out=out, **more), out.getvalue()


def test_json_ends_standard_output(bench, capsys) -> None:
    seen = bench(FOUND)
    code, out = run("--json", "--rounds", "5")
    assert code == 0
    assert seen == [{"rounds": 5}]
    document = json.loads(out)
    assert (document["bench"], document["results"][0]["met"], document["notes"]) == ("start", True, ["a note"])
    assert capsys.readouterr() == ("", "counting\n")


def test_what_a_bench_prints_is_no_part_of_the_report(bench, monkeypatch, capsys) -> None:
    bench(FOUND)
    monkeypatch.setattr(sys.modules["appliance.bench.start"], "run", lambda *_, **__: print("a library says") or FOUND)
    assert runner.main("start", ["--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["bench"] == "start"
    assert printed.err == "a library says\n"


def test_table_without_json(bench) -> None:
    bench(FOUND)
    code, out = run()
    assert code == 0
    assert "ready_s" in out
    assert "- a note" in out


def test_a_missed_target_is_no_failure(bench) -> None:
    bench(Findings((Result("ready_s", 9.0, "s", 1, (9.0, 9.0), 8.0, "<="),)))
    assert run("--json")[0] == 0


def test_plot_writes_the_file(bench, tmp_path) -> None:
    pytest.importorskip("matplotlib")
    bench(FOUND)
    assert run("--plot", str(tmp_path / "p.png"))[0] == 0
    assert (tmp_path / "p.png").stat().st_size > 0


@pytest.mark.parametrize(
    ("error", "code"),
    [(BenchError("it broke"), 1), (BenchUseError("it broke"), 2), (OSError("it broke"), 1)],
)
def test_failures_say_why(bench, capsys, error: Exception, code: int) -> None:
    bench(error)
    assert run("--json") == (code, '{"error": "it broke"}\n')
    assert capsys.readouterr().err.endswith("zccp: it broke\n")


def test_unknown_bench_lists_those_there_are(capsys) -> None:
    assert run(name="speed") == (2, "")
    assert capsys.readouterr().err == (
        "zccp: there is no bench 'speed'; the benches are "
        "build, ingest, kernels, kv-quality, start, step, chaos, connections, old-stack, parity, peers, reuse, soak\n"
    )


def test_unknown_option_and_wrong_value(bench, capsys) -> None:
    bench(FOUND)
    assert run("--turns", "3")[0] == 2
    assert "--turns" in capsys.readouterr().err
    assert run("--rounds", "many")[0] == 2
    assert "'many' is not a valid integer" in capsys.readouterr().err


def test_broken_configuration_is_wrong_use(bench, tmp_path, capsys) -> None:
    bench(FOUND)
    (tmp_path / "c.yaml").write_text("server: {prot: 1}")
    assert run("--config", str(tmp_path / "c.yaml"))[0] == 2
    assert "prot" in capsys.readouterr().err


def test_help_shows_the_benchs_own_options(bench, capsys) -> None:
    bench(FOUND)
    assert run("--help")[0] == 0
    shown = capsys.readouterr().out
    assert "Usage: zccp bench start" in shown
    assert "fake: a bench." in shown
    assert "--rounds" in shown


@pytest.mark.parametrize("name", runner.CHECKOUT)
def test_outside_a_checkout_some_exit_2(name: str, tmp_path, capsys) -> None:
    assert run(name=name, root=tmp_path) == (2, "")
    file = tmp_path / "tests" / "bench" / f"{name.replace('-', '_')}.py"
    assert capsys.readouterr().err == (
        f"zccp: the bench {name} needs a checkout of the project: {file} does not exist; run it from one\n"
    )


@pytest.mark.parametrize("name", runner.CHECKOUT)
def test_inside_a_checkout_they_are_found(name: str) -> None:
    found = runner.find(name)
    assert found.OPTIONS
    assert callable(found.run)


def test_a_missing_development_package_is_named(monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "psutil", None)
    for module in ("tests.bench.soak",):
        monkeypatch.delitem(sys.modules, module, raising=False)
    assert run(name="soak")[0] == 2
    assert "needs psutil, which is not installed; run make setup" in capsys.readouterr().err


def test_mixed_bodies_differ_and_name_the_model() -> None:
    bodies = start.mixed_bodies("m")
    assert {body["model"] for _, body in bodies} == {"m"}
    assert len({json.dumps(entry) for entry in bodies}) == len(bodies)
    assert {path for path, _ in bodies} == {"/v1/completions", "/v1/chat/completions", "/v1/messages"}
