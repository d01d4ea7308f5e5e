"""The rules of `deploy/prometheus`, and whether what an expression names is a metric of the catalogue or a recorded rule."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from prometheus_client import CollectorRegistry

from gcore.metrics import Metrics

RULES = sorted((Path(__file__).parents[2] / "deploy" / "prometheus" / "rules").glob("*.yml"))
_SUFFIXES = re.compile(r"_(?:total|bucket|sum|count)$")


def rules(kind: str) -> list[dict[str, Any]]:
    """Those that have a field."""
    return [
        rule
        for file in RULES
        for group in yaml.safe_load(file.read_text())["groups"]
        for rule in group["rules"]
        if kind in rule
    ]


def registry() -> CollectorRegistry:
    """A daemon's, with every metric of the catalogue."""
    return Metrics().registry


def unknown(expression: str) -> set[str]:
    """What an expression names of gcore that there is not."""
    families = {family.name for family in registry().collect()}
    recorded = {rule["record"] for rule in rules("record")}
    bare = re.sub(r'"[^"]*"', "", expression)
    named = set(re.findall(r"(?<![\w:])(?:[a-z_]+:)?gcore_\w+(?::\w+)?", bare))
    return {name for name in named if _SUFFIXES.sub("", name) not in families and name not in recorded}
