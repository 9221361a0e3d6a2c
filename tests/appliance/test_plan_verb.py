"""zccp plan: the document, its form for people, and the path of a decision; without weights and without a GPU."""

import json
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from appliance import cli, plan_report
from appliance.config import build
from planner.catalogue import find_architecture
from planner.mixes import Waste

A100 = ("plan", "--architecture", "llama-3.1-8b", "--target", "a100_sxm_80")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    monkeypatch.setenv("ZCCP_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("ZCCP_RUN", str(tmp_path / "run"))
    monkeypatch.delenv("ZCCP_CONFIG", raising=False)
    return lambda *arguments: CliRunner().invoke(cli.main, list(arguments))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mixes are simulated once, elsewhere."""
    waste = Waste("all", mean=0.05, p99=0.5, table_mean=0.0, launches=10, computed=100, useful=95, refused=2)
    monkeypatch.setattr(plan_report, "padding", lambda _plan: (waste,))


@pytest.mark.usefixtures("quick")
def test_the_document_of_an_a100(run: Callable[..., Result]) -> None:
    document = json.loads(run(*A100, "--json").stdout)
    assert (document["programs"], document["devices"], document["kv_format"]) == (37, 1, "bf16")
    assert document["parameters"] == 8_030_261_248
    memory = document["memory"]
    assert memory["fits"]
    assert memory["total_bytes"] <= memory["usable_bytes"] == 82_952_585_216
    assert [made["kv_format"] for made in document["formats"]] == ["bf16", "int8", "bmq4", "bmq2"]
    assert document["formats"][0]["memory"] == memory
    assert document["formats"][0]["resident"] == {"32768": 14, "65536": 7, "131072": 3}
    assert document["padding"] == [
        {"mix": "all", "mean": 0.05, "p99": 0.5, "table_mean": 0.0, "launches": 10, "computed": 100, "useful": 95,
         "refused": 2}
    ]  # fmt: skip


@pytest.mark.usefixtures("quick")
def test_the_form_for_people(run: Callable[..., Result]) -> None:
    lines = run(*A100).stdout.splitlines()
    assert lines[0] == "llama-3.1-8b, 8.03 billion weights in bf16, on 1 x a100_sxm_80"
    assert "page-table widths  32768 65536 131072" in lines
    assert "bf16    16.00  14   7    3     486272     63.74" in lines
    assert "all  5.0%  50.0%  10        2" in lines
    spread = run(*A100, "--devices", "4", "--context-devices", "2", "--slots", "8").stdout
    assert "contexts spread over 2 devices in shards of 32768 positions" in spread
    assert "8 slots" in spread


@pytest.mark.usefixtures("quick")
def test_a_format_that_does_not_fit_is_told_beside_those_that_do(run: Callable[..., Result]) -> None:
    arguments = ("plan", "--architecture", "llama-3.3-70b", "--target", "a100_sxm_80", "--devices", "2")
    document = json.loads(run(*arguments, "--json").stdout)
    assert document["kv_format"] == "bmq4"
    assert [("fault" in made, made["kv_format"]) for made in document["formats"]] == [
        (True, "bf16"), (True, "int8"), (False, "bmq4"), (False, "bmq2"),
    ]  # fmt: skip
    text = run(*arguments).stdout
    assert "bf16: target a100_sxm_80 leaves " in text


@pytest.mark.usefixtures("quick")
def test_a_config_file_is_as_good_as_a_name_and_short_contexts_have_their_own_column(run, tmp_path: Path) -> None:
    public = json.loads(resources.files("planner.architectures").joinpath("qwen3-8b.json").read_text())["config"]
    file = tmp_path / "config.json"
    file.write_text(json.dumps(public))
    by_file, by_name = (run("plan", "--architecture", name, "--target", "h200_sxm") for name in (str(file), "qwen3-8b"))
    assert by_file.stdout.partition("\n")[2] == by_name.stdout.partition("\n")[2], "but for the name"
    assert "format  bits   32K  40K  positions  pages, GB" in by_file.stdout


def test_the_path_of_a_decision(run: Callable[..., Result]) -> None:
    shown = run(*A100, "--explain", "--context", "90000", "--free-gb", "11")
    assert shown.exit_code == 0
    assert shown.stdout.splitlines()[2:5] == [
        "bf16: 11.81 GB; 11.00 GB free: does not fit",
        "int8: 6.00 GB; 11.00 GB free: fits",
        "int8, 3 shards on 1 device",
    ]
    document = json.loads(run(*A100, "--explain", "--context", "90000", "--free-gb", "11", "--json").stdout)
    assert document["path"] == shown.stdout.splitlines()
    assert (document["context_len"], document["expected_output"], document["free_bytes"]) == (90000, 0, 11 * 10**9)
    everything = json.loads(run(*A100, "--explain", "--context", "90000", "--output", "9", "--json").stdout)
    assert everything["free_bytes"] == 486_272 * 131_072
    assert everything["path"][0] == "90000 ids and 9 to come: 90009 positions of 131072"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--architecture", "llama-9"), 2, "architecture 'llama-9' is none of gemma-3-27b, "),
        (("--architecture", "llama-3.1-8b", "--target", "b300"), 2, "target 'b300' is unknown; targets: a100_"),
        (("--architecture", "llama-3.1-8b", "--kv-format", "fp8"), 2, "engine.kv_format is 'fp8'; it must be one of "),
        (("--explain",), 2, "--explain and --context belong together"),
        (("--context", "5"), 2, "--explain and --context belong together"),
        (("--architecture", "llama-3.1-8b", "--max-context", "9999999"), 2, "engine.context is 9999999"),
        (("--architecture", "llama-3.3-70b", "--target", "a100_sxm_40"), 1, "take more devices than 1"),
        (("--architecture", "gemma-3-27b", "--target", "h100_sxm", "--devices", "2", "--context-devices", "2"), 2,
         "a model with sliding windows is not spread by positions"),
        ((), 1, "zccp models pull"),
    ],
)  # fmt: skip
def test_exit_codes_and_what_they_say(run: Callable[..., Result], arguments, code: int, message: str) -> None:
    result = run("plan", *arguments)
    assert result.exit_code == code
    assert message in result.stderr
    assert result.stdout == ""


def test_the_mixes_are_four_and_sorted() -> None:
    assert [mix.name for mix in plan_report.committed_mixes()] == ["chat", "code", "documents", "extraction"]


def test_terms_of_a_configuration_have_every_format() -> None:
    terms = plan_report.terms_for(build({"engine": {"target": "h200_sxm"}}, {}), find_architecture("qwen3-8b"), 40960)
    assert [str(offer.plan.kv_format) for offer in terms.offers] == ["bf16", "int8", "bmq4", "bmq2"]
