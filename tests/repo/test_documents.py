"""The README is true: verbs, keys, metrics, routes and errors are in it, and its examples run."""

import re
from typing import Any

import click
import pytest
from prometheus_client import CollectorRegistry

from api import errors
from api.app import ROUTES
from api.schemas.anthropic import MessagesRequest
from api.schemas.openai import ChatRequest, CompletionRequest
from appliance.cli import main
from appliance.config_reference import reference_markdown
from appliance.model.catalog import CATALOG
from appliance.telemetry import Metrics, NodeMetrics
from planner.formats import WeightForm
from tests.repo.test_checks import ROOT
from tests.support.api_rig import MODEL, Rig
from tests.support.live_server import serving
from tests.support.scripted_engine import ScriptedEngine, say

README = (ROOT / "README.md").read_text()


def section(title: str) -> str:
    """The text under a heading, up to the next one of its level."""
    level = title.split(" ", maxsplit=1)[0]
    return re.split(rf"^#{{1,{len(level)}}} ", README.split(f"\n{title}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


def test_every_verb_is_described() -> None:
    table = section("## Command line")
    for name, command in main.commands.items():
        assert f"| `zccp {name}` |" in table
        if isinstance(command, click.Group):
            for inner in command.commands:
                assert f"`zccp {name} {inner}" in table


def test_the_configuration_table_is_the_generated_one() -> None:
    shown = README.split("<!-- configuration -->\n", 1)[1].split("<!-- /configuration -->", 1)[0]
    assert shown == reference_markdown()


def test_every_metric_is_described() -> None:
    registry, of_main = CollectorRegistry(), CollectorRegistry()
    Metrics(registry)
    NodeMetrics(of_main)
    table = section("## Metrics")
    for family in (*registry.collect(), *of_main.collect()):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        assert f"| `{name}` | {family.type} | {family.documentation} |" in table


def test_every_route_is_described() -> None:
    table = section("## API")
    for route in ROUTES:
        assert re.search(rf"`(?:GET|POST) {re.escape(route)}`", table), route


def test_every_field_is_described() -> None:
    text = section("### Fields")
    for request in (MessagesRequest, ChatRequest, CompletionRequest):
        for name in request.__struct_fields__:
            assert f"`{name}`" in text, name


def test_every_error_is_described() -> None:
    table = section("### Errors")
    pending = [errors.ApiError]
    while pending:
        kind = pending.pop()
        pending += kind.__subclasses__()
        if kind is not errors.ApiError and kind.__module__ == "api.errors":
            assert f"| {kind.status} | `{kind.code}` | `{kind.anthropic_type}` |" in table


def test_every_model_and_weight_form_is_described() -> None:
    text = section("## Models")
    for name in (*CATALOG, *WeightForm):
        assert f"| `{name}` |" in text


def test_links_lead_somewhere() -> None:
    headings = {re.sub(r"[^\w -]", "", line.lower()).strip().replace(" ", "-") for line in README.splitlines()}
    for target in re.findall(r"\]\(#([\w-]+)\)", README):
        assert f"-{target}" in headings or target in headings


@pytest.mark.parametrize("snippet", re.findall(r"```python\n(.*?)```", README, re.DOTALL))
def test_an_example_runs(snippet: str, capsys: pytest.CaptureFixture[str]) -> None:
    engine = ScriptedEngine(say("Hi there"))
    with serving(Rig(engine, context=256).app) as port:
        code = snippet.replace("127.0.0.1:8000", f"127.0.0.1:{port}").replace("smollm2-135m", MODEL)
        namespace: dict[str, Any] = {}
        exec(compile(code, "README.md", "exec"), namespace)
        namespace["client"].close()
    assert capsys.readouterr().out.count("Hi there") == 2
