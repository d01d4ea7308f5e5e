"""The dashboards of `deploy/grafana` as Grafana would load them: their panels, and what each asks of Prometheus."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GRAFANA = Path(__file__).parents[2] / "deploy" / "grafana"
FILES = sorted((GRAFANA / "dashboards").glob("*.json"))


@dataclass(frozen=True)
class Asked:
    """One query of one panel."""

    dashboard: str
    panel: str
    expression: str

    def __str__(self) -> str:
        return f"{self.dashboard}: {self.panel}: {self.expression}"

    def with_window(self, seconds: int) -> str:
        """As Grafana asks it, with all of each variable's values chosen."""
        return re.sub(r"\$(job|node|judge)\b", ".*", self.expression.replace("$__rate_interval", f"{seconds}s"))


def tree_of(file: Path) -> dict[str, Any]:
    """A dashboard."""
    tree: dict[str, Any] = json.loads(file.read_text())
    return tree


def panels(file: Path) -> list[dict[str, Any]]:
    """Its panels, without the headings."""
    return [panel for panel in tree_of(file)["panels"] if panel["type"] != "row"]


def every_query() -> Iterator[Asked]:
    """Of all dashboards."""
    for file in FILES:
        for panel in panels(file):
            for target in panel["targets"]:
                yield Asked(file.stem, panel["title"], target["expr"])
