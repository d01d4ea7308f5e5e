"""The parts of a dashboard and their Grafana JSON.

A dashboard has rows of panels. A panel has a title, a description that says how to read it, a unit and queries. The panels of
a row share its width. Queries may use `$__rate_interval` and those of `$job`, `$node`, `$judge` that the dashboard declares.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

RATE = "[$__rate_interval]"
OF_JOB = '{job=~"$job"}'
NODE = '{node=~"$node"}'
SOURCE = {"type": "prometheus", "uid": "${source}"}
WIDTH, STAT_HEIGHT, HEIGHT = 24, 4, 8
VARIABLES: Mapping[str, tuple[str, str]] = {
    "job": ("gcore_step", "name of the job"),
    "node": ("gcore_ready", "node of the controller"),
    "judge": ("gcore_judge_questions_total", "name of the judge in the spec"),
}


@dataclass(frozen=True)
class Query:
    """A PromQL query. `says`: the legend; `{{label}}` is replaced by the label's value."""

    expr: str
    says: str = ""


@dataclass(frozen=True)
class Panel:
    """A panel. `unit`: Grafana's name of the unit. `stack`: draw stacked areas instead of lines."""

    title: str
    description: str
    unit: str
    queries: Sequence[Query]
    kind: Literal["timeseries", "stat", "heatmap"] = "timeseries"
    stack: bool = False
    least: float | None = None
    most: float | None = None


@dataclass(frozen=True)
class Row:
    """A heading with panels side by side."""

    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True)
class Dashboard:
    """A dashboard. `name`: used for the file name and the URL."""

    name: str
    title: str
    description: str
    variables: Sequence[str]
    rows: Sequence[Row]


def of_job(metric: str) -> str:
    """Return the query for a job's metric: the maximum, because every controller reports the same value or an older one."""
    return f"max by (job) ({metric}{OF_JOB})"


def line(title: str, description: str, unit: str, *queries: tuple[str, str], **more: Any) -> Panel:
    """Return a panel of lines."""
    return Panel(title, description, unit, [Query(*one) for one in queries], **more)


def areas(title: str, description: str, unit: str, *queries: tuple[str, str], **more: Any) -> Panel:
    """Return a panel of stacked areas."""
    return line(title, description, unit, *queries, stack=True, least=0, **more)


def stat(title: str, description: str, unit: str, expr: str) -> Panel:
    """Return a panel with one number."""
    return Panel(title, description, unit, [Query(expr)], kind="stat")


def heatmap(title: str, description: str, unit: str, expr: str) -> Panel:
    """Return a panel of histogram buckets over time."""
    return Panel(title, description, unit, [Query(expr, "{{le}}")], kind="heatmap")


def text_of(dashboard: Dashboard) -> str:
    """Return the content of a dashboard's file."""
    return json.dumps(tree_of(dashboard), indent=1) + "\n"


def tree_of(dashboard: Dashboard) -> dict[str, Any]:
    """Return the dashboard in Grafana's JSON model."""
    return {
        "uid": f"gcore-{dashboard.name}",
        "title": f"gcore: {dashboard.title}",
        "description": dashboard.description,
        "tags": ["gcore"],
        "schemaVersion": 39,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "links": [
            {
                "type": "dashboards",
                "title": "gcore",
                "tags": ["gcore"],
                "asDropdown": True,
                "keepTime": True,
                "includeVars": True,
            }
        ],
        "templating": {"list": [_source(), *(_variable(name) for name in dashboard.variables)]},
        "panels": list(_panels(dashboard.rows)),
    }


def _source() -> dict[str, Any]:
    current = {"text": "gcore", "value": "gcore"}
    return {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus", "current": current}


def _variable(name: str) -> dict[str, Any]:
    metric, description = VARIABLES[name]
    query = f"label_values({metric}, {name})"
    return {
        "name": name,
        "label": name,
        "description": description,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _panels(rows: Sequence[Row]) -> Sequence[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    top = 0
    for row in rows:
        found.append(_heading(len(found) + 1, row.title, top))
        top += 1
        height = STAT_HEIGHT if all(panel.kind == "stat" for panel in row.panels) else HEIGHT
        each = WIDTH // len(row.panels)
        for place, panel in enumerate(row.panels):
            where = {"x": place * each, "y": top, "w": each, "h": height}
            found.append(_panel(len(found) + 1, panel, where))
        top += height
    return found


def _heading(number: int, title: str, top: int) -> dict[str, Any]:
    where = {"x": 0, "y": top, "w": WIDTH, "h": 1}
    return {"id": number, "type": "row", "title": title, "collapsed": False, "panels": [], "gridPos": where}


def _panel(number: int, panel: Panel, where: Mapping[str, int]) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit}
    defaults |= {} if panel.least is None else {"min": panel.least}
    defaults |= {} if panel.most is None else {"max": panel.most}
    tree: dict[str, Any] = {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": SOURCE,
        "gridPos": dict(where),
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": [_target(place, panel, query) for place, query in enumerate(panel.queries)],
    }
    match panel.kind:
        case "timeseries":
            stacked = {"stacking": {"mode": "normal"}, "fillOpacity": 60, "lineWidth": 0}
            defaults["custom"] = stacked if panel.stack else {"fillOpacity": 5, "lineWidth": 1}
            legend = {"displayMode": "list", "placement": "bottom", "showLegend": True}
            tree["options"] = {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}
        case "stat":
            tree["options"] = {"colorMode": "none", "graphMode": "area", "reduceOptions": {"calcs": ["lastNotNull"]}}
        case "heatmap":
            tree["options"] = {"calculate": False, "yAxis": {"unit": panel.unit}, "color": {"scheme": "Blues"}}
    return tree


def _target(place: int, panel: Panel, query: Query) -> dict[str, Any]:
    kind = {"format": "heatmap"} if panel.kind == "heatmap" else {}
    name = chr(ord("A") + place)
    return {"refId": name, "expr": query.expr, "legendFormat": query.says, "datasource": SOURCE, **kind}
