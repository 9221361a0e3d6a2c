"""The README's table of sequences that fit is what ``zccp plan`` says."""

import json
import re

import pytest
from click.testing import CliRunner

from appliance import plan_report
from appliance.cli import main
from planner.catalogue import architecture_names
from planner.mixes import Waste
from planner.target import target_names
from tests.repo.test_checks import ROOT

README = (ROOT / "README.md").read_text()
TABLE = README.split("<!-- resident -->\n", 1)[1].split("<!-- /resident -->", 1)[0]
ROWS = re.findall(r"\| `([\w.-]+)` on (\d) x `(\w+)` \| `(\w+)` \| (\d+) \| (\d+) \| (\d+) \|", TABLE)
SHAPES = sorted({row[:3] for row in ROWS})


@pytest.mark.parametrize(("model", "devices", "target"), SHAPES, ids=[f"{m}-{d}x{t}" for m, d, t in SHAPES])
def test_the_table_is_what_the_command_says(monkeypatch, model: str, devices: str, target: str) -> None:
    waste = Waste("all", mean=0.0, p99=0.0, table_mean=0.0, launches=0, computed=0, useful=0, refused=0)
    monkeypatch.setattr(plan_report, "padding", lambda _plan: (waste,))
    arguments = ["plan", "--json", "--architecture", model, "--target", target, "--devices", devices]
    document = json.loads(CliRunner().invoke(main, arguments).stdout)
    said = {made["kv_format"]: list(made["resident"].values()) for made in document["formats"]}
    shown = {row[3]: [int(number) for number in row[4:]] for row in ROWS if row[:3] == (model, devices, target)}
    assert shown.items() <= said.items()
    assert shown["bf16"] == said["bf16"]
    assert document["slots"] == 64


def test_the_table_is_read_whole() -> None:
    assert len(ROWS) == TABLE.count("\n") - 2 == 5


def test_every_architecture_and_target_is_named() -> None:
    text = README.split("\n## What fits\n", 1)[1].split("\n## ", 1)[0]
    for name in (*architecture_names(), *target_names()):
        assert f"`{name}`" in text, name
