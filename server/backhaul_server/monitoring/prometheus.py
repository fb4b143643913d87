"""Prometheus' configuration and rules, as files."""

from dataclasses import dataclass

from backhaul_server.dashboard.metrics.alerts import ALERTS


@dataclass(frozen=True, slots=True)
class AlertText:
    """An alert without the condition that the dashboard looks at, see `AlertRule`."""

    name: str
    severity: str
    summary: str
    advice: str
    expr: str
    for_s: int


JOB = "backhaul"
TOKEN_FILE = "/run/backhaul/dashboard/token"
"""Where the configuration expects what the dashboard wants to be shown."""

UNREACHABLE = AlertText(
    "DashboardUnreachable",
    "critical",
    "The dashboard does not answer Prometheus",
    "Nobody sees workers or trainers, and no other alert can fire. See whether its process lives, and whether "
    "Prometheus may use its token: Prometheus' page of targets says why a scrape failed. Training is not concerned",
    f'up{{job="{JOB}"}} == 0',
    30,
)
"""The one alert that the dashboard can't show itself."""

CONFIGURATION = f"""\
# Made by `make monitoring`.
global:
  scrape_interval: 5s
  evaluation_interval: 5s
rule_files:
  - alerts.yml
scrape_configs:
  - job_name: {JOB}
    # What the dashboard's --token-file holds. One on loopback may want none: then this is left out.
    authorization:
      credentials_file: {TOKEN_FILE}
    static_configs:
      - targets: ["dashboard:8080"]
"""
_RULE = """\
      - alert: {name}
        expr: {expr}
        for: {for_s}s
        labels:
          severity: {severity}
        annotations:
          summary: {summary}
          description: {advice}
          runbook: docs/monitoring.md#{anchor}
"""


def rules() -> str:
    """Every alert, as rules that `promtool check rules` takes."""
    return "".join(["# Made by `make monitoring`.\ngroups:\n  - name: backhaul\n    rules:\n", *map(_rule, texts())])


def texts() -> list[AlertText]:
    """What is written of each alert, here and in the docs."""
    return [
        *(AlertText(rule.name, rule.severity, rule.summary, rule.advice, rule.expr, rule.for_s) for rule in ALERTS),
        UNREACHABLE,
    ]


def _rule(text: AlertText) -> str:
    return _RULE.format(
        name=text.name,
        expr=_quoted(text.expr),
        for_s=text.for_s,
        severity=text.severity,
        summary=_quoted(f"{{{{ with $labels.worker }}}}{{{{ . }}}}: {{{{ end }}}}{text.summary}"),
        advice=_quoted(f"{text.advice}."),
        anchor=text.name.lower(),
    )


def _quoted(text: str) -> str:
    """A YAML string that means what is in it."""
    return "'" + text.replace("'", "''") + "'"
