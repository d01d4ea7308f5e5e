"""Reads the rules, dashboards and metric names of `deploy/`: what checkers and tests of running clusters ask of them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from gcore.observability.metrics import Metrics
from tools.problem import ROOT

_SUFFIXES = re.compile(r"_(?:total|bucket|sum|count)$")


def rule_files(root: Path = ROOT) -> list[Path]:
    return sorted((root / "deploy" / "prometheus" / "rules").glob("*.yml"))


def rules(kind: str, root: Path = ROOT) -> list[dict[str, Any]]:
    """The rules that have a field: `alert`, `record` or, of both kinds, `expr`."""
    return [rule for file in rule_files(root) for rule in rules_of(file) if kind in rule]


def rules_of(file: Path) -> list[dict[str, Any]]:
    return _rules_in(file.read_text())


@cache
def _rules_in(text: str) -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(text)["groups"] for rule in group["rules"]]


@cache
def _families() -> frozenset[str]:
    return frozenset(family.name for family in Metrics().registry.collect())


def unknown_metrics(expression: str, root: Path = ROOT) -> set[str]:
    """The gcore metrics that a PromQL expression names and that neither the catalogue nor a recording rule has."""
    families = _families()
    recorded = {rule["record"] for rule in rules("record", root)}
    bare = re.sub(r'"[^"]*"', "", expression)
    named = set(re.findall(r"(?<![\w:])(?:[a-z_]+:)?gcore_\w+(?::\w+)?", bare))
    return {name for name in named if _SUFFIXES.sub("", name) not in families and name not in recorded}


def dashboard_files(root: Path = ROOT) -> list[Path]:
    return sorted((root / "deploy" / "grafana" / "dashboards").glob("*.json"))


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    """The panels without the row headings."""
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


@dataclass(frozen=True)
class PanelQuery:
    dashboard: str
    panel: str
    expression: str

    def __str__(self) -> str:
        return f"{self.dashboard}: {self.panel}: {self.expression}"

    def with_window(self, seconds: int) -> str:
        """The expression as Grafana sends it, with all values of each variable chosen."""
        return re.sub(r"\$(job|node|judge)\b", ".*", self.expression.replace("$__rate_interval", f"{seconds}s"))


def every_query(root: Path = ROOT) -> Iterator[PanelQuery]:
    for file in dashboard_files(root):
        for panel in panels(json.loads(file.read_text())):
            for target in panel["targets"]:
                yield PanelQuery(file.stem, panel["title"], target["expr"])
