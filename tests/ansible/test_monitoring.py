"""Alert rules and the dashboard ask for metrics that the appliance exports, under the labels that it gives them."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from appliance.host.ledger import Usage
from appliance.telemetry import Metrics, NodeMetrics, _KeyUsage
from tests.ansible.playing import ANSIBLE, document

FILES = ANSIBLE / "roles" / "monitoring" / "files"
RULES = document(FILES / "zccp-alerts.yml")
DASHBOARD = json.loads((FILES / "zccp-dashboard.json").read_text())
OF_PROMETHEUS = {"instance", "job", "le"}
SERIES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}


def held(metrics: object) -> Iterator[Any]:
    """Every metric of an object and of the objects that it is made of."""
    for value in vars(metrics).values():
        yield from (value,) if hasattr(value, "describe") else held(value)


def exported() -> dict[str, set[str]]:
    """Every series with the labels of its own."""
    series: dict[str, set[str]] = {"up": set()}
    for metric in (*held(Metrics(CollectorRegistry())), *held(NodeMetrics(CollectorRegistry()))):
        (family,) = metric.describe()
        for ending in SERIES[family.type]:
            series[family.name + ending] = set(metric._labelnames)
    for family in _KeyUsage(lambda: [Usage("k", 1, 2)], lambda: {"k": "t"}).collect():
        series[f"{family.name}_total"] = set(family.samples[0].labels)
    return series


def expressions() -> Iterator[str]:
    """Every query of both files."""
    for group in RULES["groups"]:
        yield from (rule["expr"] for rule in group["rules"])
    for panel in DASHBOARD["panels"]:
        yield from (target["expr"] for target in panel["targets"])


@pytest.mark.parametrize("expression", list(expressions()))
def test_a_query_asks_for_what_is_exported(expression: str) -> None:
    series = exported()
    names = re.findall(r"\b(?:zccp_\w+|up)\b", expression)
    assert names
    for name in names:
        assert name in series, name
    labels = set(re.findall(r"(\w+)\s*=~?\s*\"", expression))
    for listed in re.findall(r"\bby \(([^)]*)\)", expression):
        labels |= {label.strip() for label in listed.split(",")}
    assert labels - OF_PROMETHEUS <= set().union(*(series[name] for name in names))
    for opening, closing in ("()", "{}", "[]"):
        assert expression.count(opening) == expression.count(closing)


def test_alerts_say_what_to_do() -> None:
    rules = [rule for group in RULES["groups"] for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert rule["labels"]["severity"] in {"critical", "warning"}
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["action"].endswith(".")


def test_panels_lie_beside_each_other() -> None:
    places: list[dict[str, Any]] = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    assert len({(place["x"], place["y"]) for place in places}) == len(places)
    assert all(place["x"] + place["w"] <= 24 for place in places)
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(places)
