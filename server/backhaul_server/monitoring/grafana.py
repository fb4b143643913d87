"""Grafana's dashboard and its provisioning, as files."""

import json
from collections.abc import Iterator
from typing import Any

from backhaul_server.monitoring.panels import ROWS, Panel

UID = "backhaul"
COLUMNS = 24
_STAT_HEIGHT, _HEIGHT = 4, 8
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}

DATASOURCES = """\
# Made by `make monitoring`.
apiVersion: 1
datasources:
  - name: Backhaul
    uid: backhaul
    type: prometheus
    access: proxy
    url: http://prometheus:9090
    isDefault: true
    jsonData:
      timeInterval: 5s
"""
DASHBOARDS = """\
# Made by `make monitoring`.
apiVersion: 1
providers:
  - name: Backhaul
    type: file
    allowUiUpdates: false
    options:
      path: /etc/grafana/dashboards
"""


def dashboard() -> str:
    """The dashboard that Grafana imports."""
    return json.dumps(_dashboard(), indent=2) + "\n"


def _dashboard() -> dict[str, Any]:
    return {
        "uid": UID,
        "title": "Backhaul",
        "description": "Where memory and time go. Made by `make monitoring` from the table of metrics.",
        "tags": ["backhaul"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "5s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "templating": {"list": _variables()},
        "annotations": {"list": []},
        "links": [],
        "panels": list(_panels()),
    }


def _variables() -> list[dict[str, Any]]:
    query = "label_values(backhaul_worker_up, worker)"
    return [
        {"name": "datasource", "label": "Source", "type": "datasource", "query": "prometheus", "refresh": 1},
        {
            "name": "worker",
            "label": "Worker",
            "type": "query",
            "datasource": _SOURCE,
            "definition": query,
            "query": {"query": query, "refId": "workers"},
            "refresh": 2,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"text": ["All"], "value": ["$__all"]},
            "sort": 1,
        },
    ]


def _panels() -> Iterator[dict[str, Any]]:
    """Rows from top to bottom, in each its panels from left to right."""
    number, top = 0, 0
    for title, panels in ROWS:
        number += 1
        position = {"x": 0, "y": top, "w": COLUMNS, "h": 1}
        yield {"id": number, "type": "row", "title": title, "collapsed": False, "gridPos": position, "panels": []}
        top += 1
        left, height = 0, 0
        for panel in panels:
            if left + panel.width > COLUMNS:
                left, top = 0, top + height
            number += 1
            height = _STAT_HEIGHT if panel.kind == "stat" else _HEIGHT
            yield _panel(panel, number, {"x": left, "y": top, "w": panel.width, "h": height})
            left += panel.width
        top += height


def _panel(panel: Panel, number: int, position: dict[str, int]) -> dict[str, Any]:
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": _SOURCE,
        "gridPos": position,
        "targets": [_target(panel, index) for index in range(len(panel.queries))],
        "fieldConfig": {"defaults": _defaults(panel), "overrides": _overrides(panel)},
        "options": _options(panel),
        **({"transformations": _COLUMNS} if panel.kind == "table" else {}),
    }


def _target(panel: Panel, index: int) -> dict[str, Any]:
    query = panel.queries[index]
    formats = {"heatmap": "heatmap", "table": "table"}
    return {
        "refId": chr(ord("A") + index),
        "datasource": _SOURCE,
        "expr": query.expr,
        "legendFormat": query.legend,
        "format": formats.get(panel.kind, "time_series"),
        "instant": panel.kind in {"stat", "table"},
        "range": panel.kind not in {"stat", "table"},
    }


def _defaults(panel: Panel) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"color": "green" if panel.kind == "stat" else "transparent", "value": None}]
    if panel.limit is not None:
        steps.append({"color": "red", "value": panel.limit})
    defaults: dict[str, Any] = {"unit": panel.unit, "thresholds": {"mode": "absolute", "steps": steps}}
    if panel.kind == "timeseries":
        defaults["min"] = 0
        defaults["custom"] = {
            "drawStyle": "line",
            "fillOpacity": 30 if panel.is_stacked else 5,
            "lineWidth": 1,
            "showPoints": "never",
            "stacking": {"mode": "normal" if panel.is_stacked else "none", "group": "A"},
            "thresholdsStyle": {"mode": "off" if panel.limit is None else "line"},
        }
    return defaults


def _overrides(panel: Panel) -> list[dict[str, Any]]:
    """The budget is a line over the stack, not a part of it."""
    if not any(query.legend == "budget" for query in panel.queries):
        return []
    line = [
        {"id": "custom.stacking", "value": {"mode": "none", "group": "A"}},
        {"id": "custom.fillOpacity", "value": 0},
        {"id": "custom.lineStyle", "value": {"fill": "dash", "dash": [8, 8]}},
        {"id": "color", "value": {"mode": "fixed", "fixedColor": "red"}},
    ]
    return [{"matcher": {"id": "byName", "options": "budget"}, "properties": line}]


def _options(panel: Panel) -> dict[str, Any]:
    if panel.kind == "stat":
        values = {"calcs": ["lastNotNull"], "fields": "", "values": False}
        return {"reduceOptions": values, "colorMode": "value", "graphMode": "none", "textMode": "auto"}
    if panel.kind == "heatmap":
        return {
            "calculate": False,
            "color": {"mode": "scheme", "scheme": "Viridis", "steps": 64},
            "yAxis": {"unit": panel.unit, "axisPlacement": "left"},
            "tooltip": {"mode": "single", "yHistogram": True},
            "legend": {"show": True},
        }
    if panel.kind == "table":
        return {"showHeader": True}
    return {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }


_COLUMNS = [
    {
        "id": "organize",
        "options": {
            "excludeByName": {"Time": True, "Value": True, "__name__": True, "instance": True, "job": True},
            "renameByName": {
                "worker": "Worker",
                "version": "Version",
                "device": "Device",
                "fingerprint": "Fingerprint",
            },
        },
    }
]
