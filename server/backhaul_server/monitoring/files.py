"""The files that are generated from the tables of metrics and alerts, by path in the project."""

import re
from pathlib import Path

from backhaul_server.dashboard.metrics.definitions import METRICS
from backhaul_server.monitoring import grafana, prometheus

PAGE = Path("docs/monitoring.md")


def files(root: Path) -> dict[Path, str]:
    """Returns the contents of all generated files.

    Of the documentation page only the parts between marks are generated.
    """
    return {
        Path("deploy/prometheus/prometheus.yml"): prometheus.CONFIGURATION,
        Path("deploy/prometheus/alerts.yml"): prometheus.rules(),
        Path("deploy/grafana/dashboards/backhaul.json"): grafana.dashboard(),
        Path("deploy/grafana/provisioning/datasources/backhaul.yml"): grafana.DATASOURCES,
        Path("deploy/grafana/provisioning/dashboards/backhaul.yml"): grafana.DASHBOARDS,
        PAGE: _page((root / PAGE).read_text()),
    }


def _page(text: str) -> str:
    return _between("alerts", _alerts(), _between("metrics", _metrics(), text))


def _between(mark: str, made: str, text: str) -> str:
    begin, end = f"<!-- {mark}: made by `make monitoring` -->", f"<!-- end of {mark} -->"
    replaced, count = re.subn(
        f"{re.escape(begin)}.*?{re.escape(end)}", lambda _: f"{begin}\n{made}\n{end}", text, flags=re.DOTALL
    )
    if count != 1:
        raise ValueError(f'{PAGE} has {count} places between "{begin}" and "{end}", and must have one')
    return replaced


def _metrics() -> str:
    rows = ["| metric | kind | labels | what it measures |", "|---|---|---|---|"]
    rows += [f"| `{metric.name}` | {metric.kind} | {', '.join(metric.labels)} | {metric.help} |" for metric in METRICS]
    return "\n".join(rows)


def _alerts() -> str:
    sections = [
        f"### {rule.name}\n\n{rule.summary}. *{rule.severity}, {_after(rule.for_s)}*\n\n"
        f"```promql\n{rule.expr}\n```\n\n{rule.advice}.\n"
        for rule in prometheus.RULES
    ]
    return "\n" + "\n".join(sections)


def _after(for_s: int) -> str:
    return f"after {for_s} s" if for_s else "at once"
