"""The files for Prometheus and Grafana name what is measured, agree with the dashboard's alerts, and are documented."""

import json
import re
from itertools import combinations
from typing import Any

import pytest
import yaml

from backhaul_server.dashboard.collect.totals import WINDOW_S
from backhaul_server.dashboard.metrics.alerts import ALERTS, MOST_FALLBACKS, MOST_MEMORY
from backhaul_server.dashboard.metrics.definitions import METRICS
from contract.test_layout import ROOT

DASHBOARD = json.loads((ROOT / "deploy/grafana/dashboards/backhaul.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]
CONFIGURATION = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
RULES = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text())["groups"][0]["rules"]
EXPRESSIONS = {rule["alert"]: rule["expr"] for rule in RULES}
PAGE = (ROOT / "docs/monitoring.md").read_text()
ONLY_IN_PROMETHEUS = {"DashboardUnreachable"}
"""A dashboard cannot show that it does not answer."""
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


def in_one_line(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("expr", [*EXPRESSIONS.values(), *QUERIES])
def test_what_a_query_names_is_measured(expr: str) -> None:
    assert named(expr) <= NAMES.keys()
    assert named(expr) or expr.startswith("count(ALERTS") or expr == EXPRESSIONS["DashboardUnreachable"]
    for name, matchers in re.findall(r"\b(backhaul_\w+)\{([^}]*)\}", expr):
        assert set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers)) <= {*NAMES[name].labels, "le"}
    for name, kind in {name: NAMES[name].kind for name in named(expr)}.items():
        is_rate = re.search(rf"(rate|increase)\({name}\b", expr) is not None
        assert is_rate == (kind != "gauge"), f"rates are of counters, and counters are shown as rates: {name}"


def test_each_metric_is_on_the_dashboard() -> None:
    shown = {NAMES[name].name for expr in QUERIES for name in named(expr)}
    assert shown == {metric.name for metric in METRICS}


def test_each_metric_is_documented() -> None:
    rows = re.findall(r"^\| `backhaul_.*$", PAGE, re.M)
    assert rows == [
        f"| `{metric.name}` | {metric.kind} | {', '.join(metric.labels)} | {metric.help} |" for metric in METRICS
    ]


def test_labels_that_legends_name_are_there() -> None:
    for panel in PANELS:
        for target in panel["targets"]:
            labels = {label for name in named(target["expr"]) for label in [*NAMES[name].labels, "le"]}
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= labels, panel["title"]


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
            is_of_now = panel["type"] in {"stat", "table"}
            assert (target["instant"], target["range"]) == (is_of_now, not is_of_now)


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
    (source,) = yaml.safe_load((ROOT / "deploy/grafana/provisioning/datasources/backhaul.yml").read_text())[
        "datasources"
    ]
    assert source["type"] == "prometheus"
    # $__rate_interval counts by it.
    assert source["jsonData"]["timeInterval"] == CONFIGURATION["global"]["scrape_interval"]
    (scrape,) = CONFIGURATION["scrape_configs"]
    assert EXPRESSIONS["DashboardUnreachable"] == f'up{{job="{scrape["job_name"]}"}} == 0'


def test_prometheus_has_the_alerts_of_the_page() -> None:
    severities = {rule["alert"]: rule["labels"]["severity"] for rule in RULES}
    assert {name: severities[name] for name in severities.keys() - ONLY_IN_PROMETHEUS} == {
        rule.name: rule.severity for rule in ALERTS
    }
    assert EXPRESSIONS["FallbackRateHigh"].endswith(f"> {MOST_FALLBACKS}")
    assert EXPRESSIONS["MemoryHigh"].endswith(f"> {MOST_MEMORY}")
    windows = {window for expr in EXPRESSIONS.values() for window in re.findall(r"\[(\w+)\]", expr)}
    assert windows == {f"{WINDOW_S // 60:.0f}m"}


def test_grafana_shows_the_alerts_and_their_limits() -> None:
    panels = {panel["title"]: panel for panel in PANELS}
    listed = re.search(r'alertname=~"([^"]*)"', panels["Alerts"]["targets"][0]["expr"])
    assert listed is not None
    assert set(listed[1].split("|")) == EXPRESSIONS.keys()
    limits = panels["Share of the budget"]["fieldConfig"]["defaults"]["thresholds"]["steps"]
    assert limits[-1]["value"] == MOST_MEMORY


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_is_documented_and_played_through(rule: dict[str, Any]) -> None:
    name, annotations = rule["alert"], rule["annotations"]
    _, _, section = PAGE.partition(f"### {name}\n\n")
    section = in_one_line(re.split("^##", section, maxsplit=1, flags=re.M)[0])
    severity, summary = rule["labels"]["severity"], annotations["summary"].removeprefix("{{ $labels.worker }}: ")
    assert rule["for"] != "0s"  # a single scrape is no evidence
    assert section.startswith(f"{summary}. *{severity}, after {rule['for'].removesuffix('s')} s* ```promql ")
    assert f"```promql {in_one_line(rule['expr'])} ```" in section
    assert len(annotations["description"]) > 80 and section.endswith(annotations["description"])
    assert annotations["runbook"] == f"docs/monitoring.md#{name.lower()}"
    played = re.findall(
        r"^  - name: (\w+) (fires|does not fire)", (ROOT / "tests/monitoring/alerts.test.yml").read_text(), re.M
    )
    assert {outcome for case, outcome in played if case == name} == {"fires", "does not fire"}
