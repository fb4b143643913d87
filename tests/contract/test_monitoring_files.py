"""Files for Prometheus and Grafana are what `make monitoring` writes, name what is measured, and suit those two."""

import json
import re
from itertools import combinations
from pathlib import Path

import pytest

from backhaul_server.dashboard.metrics.alerts import ALERTS, AlertRule
from backhaul_server.dashboard.metrics.definitions import METRICS
from backhaul_server.monitoring import prometheus
from backhaul_server.monitoring.files import PAGE, files
from backhaul_server.monitoring.panels import ROWS
from contract.test_layout import ROOT

DASHBOARD = json.loads((ROOT / "deploy/grafana/dashboards/backhaul.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [query.expr for _, panels in ROWS for panel in panels for query in panel.queries]
NAMES = {
    name: metric
    for metric in METRICS
    for name in (
        [f"{metric.name}{suffix}" for suffix in ("_bucket", "_sum", "_count")]
        if metric.kind == "histogram"
        else [metric.name]
    )
}
UNITS = {"short", "cps", "bytes", "Bps", "s", "percentunit", "sci"}


def named(expr: str) -> set[str]:
    """Our metrics that a query names."""
    return set(re.findall(r"\bbackhaul_\w+", expr))


@pytest.mark.parametrize("path", files(ROOT), ids=str)
def test_a_file_is_what_would_be_made(path: Path) -> None:
    assert (ROOT / path).read_text() == files(ROOT)[path], "run `make monitoring`"


@pytest.mark.parametrize("expr", [*(rule.expr for rule in ALERTS), *QUERIES])
def test_what_a_query_names_is_measured(expr: str) -> None:
    assert named(expr) <= NAMES.keys()
    assert named(expr) or expr.startswith("count(ALERTS")
    for name, matchers in re.findall(r"\b(backhaul_\w+)\{([^}]*)\}", expr):
        assert set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers)) <= {*NAMES[name].labels, "le"}
    for name, kind in {name: NAMES[name].kind for name in named(expr)}.items():
        is_rate = re.search(rf"(rate|increase)\({name}\b", expr) is not None
        assert is_rate == (kind != "gauge"), f"rates are of counters, and counters are shown as rates: {name}"


def test_each_metric_is_on_the_dashboard() -> None:
    shown = {NAMES[name].name for expr in QUERIES for name in named(expr)}
    assert shown == {metric.name for metric in METRICS}


def test_labels_that_legends_name_are_there() -> None:
    for _, panels in ROWS:
        for panel in panels:
            for query in panel.queries:
                assert query.legend, panel.title
                labels = {label for name in named(query.expr) for label in [*NAMES[name].labels, "le"]}
                assert set(re.findall(r"\{\{(\w+)\}\}", query.legend)) <= labels, panel.title


def test_grafana_gets_what_it_needs() -> None:
    assert DASHBOARD["schemaVersion"] >= 36
    assert DASHBOARD["uid"] and DASHBOARD["title"]
    assert "id" not in DASHBOARD  # Grafana's own
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in PANELS:
        assert panel["title"] and panel["description"]
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS, panel["title"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        for target in panel["targets"]:
            assert target["legendFormat"] and target["datasource"] == panel["datasource"]
            assert set(re.findall(r"\$(\w+)", target["expr"])) <= {"worker", "__rate_interval"}


def test_panels_fill_the_grid_without_overlap() -> None:
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    for position in places:
        assert position["x"] >= 0 and position["w"] > 0 and position["x"] + position["w"] <= 24
    for one, other in combinations(places, 2):
        is_beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        is_above = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert is_beside or is_above, f"{one} and {other}"
    lines = {position["y"]: sum(p["w"] for p in places if p["y"] == position["y"]) for position in places}
    assert set(lines.values()) == {24}


def test_what_is_provisioned_fits_together() -> None:
    source = (ROOT / "deploy/grafana/provisioning/datasources/backhaul.yml").read_text()
    assert "type: prometheus" in source
    interval = re.search(r"scrape_interval: (\w+)", prometheus.CONFIGURATION)
    assert interval is not None
    assert interval[1] in source  # what $__rate_interval counts by


@pytest.mark.parametrize("text", prometheus.RULES, ids=lambda text: text.name)
def test_an_alert_says_what_to_do_and_is_played_through(text: AlertRule) -> None:
    page = (ROOT / PAGE).read_text()
    played = re.findall(
        r"^  - name: (\w+) (fires|does not fire)", (ROOT / "tests/monitoring/alerts.test.yml").read_text(), re.M
    )
    assert f"### {text.name}\n\n{text.summary}." in page
    assert len(text.advice) > 80 and not text.advice.endswith(".")
    assert text.for_s > 0  # a single scrape is no evidence
    assert {outcome for name, outcome in played if name == text.name} == {"fires", "does not fire"}
