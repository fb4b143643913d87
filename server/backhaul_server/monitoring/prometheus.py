"""Prometheus' configuration and alert rules."""

from backhaul_server.dashboard.metrics.alerts import ALERTS, AlertRule

JOB = "backhaul"
TOKEN_FILE = "/run/backhaul/dashboard/token"
"""The path at which the configuration expects the dashboard's token."""

UNREACHABLE = AlertRule(
    "DashboardUnreachable",
    "critical",
    "The dashboard does not answer Prometheus",
    "Workers and trainers cannot be watched, and no other alert can fire. Check that the dashboard's process runs and "
    "that Prometheus has its token. Prometheus' page of targets shows why a scrape failed. Training is not affected",
    f'up{{job="{JOB}"}} == 0',
    30,
    lambda watch, now_s: iter(()),
)
"""An alert of Prometheus alone, because a dashboard cannot show that it does not answer."""

RULES = (*ALERTS, UNREACHABLE)
"""The alerts of Prometheus and of the documentation."""

CONFIGURATION = f"""\
# Made by `make monitoring`.
global:
  scrape_interval: 5s
  evaluation_interval: 5s
rule_files:
  - alerts.yml
scrape_configs:
  - job_name: {JOB}
    # The token in the dashboard's --token-file. Remove this for a dashboard on loopback without a token.
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
    """Returns all alerts as a file of Prometheus rules."""
    return "".join(["# Made by `make monitoring`.\ngroups:\n  - name: backhaul\n    rules:\n", *map(_rule, RULES)])


def _rule(rule: AlertRule) -> str:
    return _RULE.format(
        name=rule.name,
        expr=_quoted(rule.expr),
        for_s=rule.for_s,
        severity=rule.severity,
        summary=_quoted(f"{{{{ with $labels.worker }}}}{{{{ . }}}}: {{{{ end }}}}{rule.summary}"),
        advice=_quoted(f"{rule.advice}."),
        anchor=rule.name.lower(),
    )


def _quoted(text: str) -> str:
    """Returns a text as a YAML string."""
    return "'" + text.replace("'", "''") + "'"
