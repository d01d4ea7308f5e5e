"""Write the derived files: `python -m deploy.tools [dashboards|metrics ...]`. With --check, only compare them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path

from deploy.tools import dashboard, metrics_page
from deploy.tools.control import CONTROL
from deploy.tools.fleet import FLEET
from deploy.tools.job import JOB
from deploy.tools.judges import JUDGES
from deploy.tools.placement import PLACEMENT

ROOT = Path(__file__).parents[2]
BOARDS = (FLEET, JOB, PLACEMENT, CONTROL, JUDGES)
PAGE = "docs/reference/metrics.md"
DASHBOARDS = "deploy/grafana/dashboards"
RULES, RULE_FILES = "deploy/prometheus/rules", ("alerts", "recording", "etcd")
CHART_FILES = "deploy/helm/gcore/files"


def dashboards() -> dict[str, str]:
    """Return the content of each dashboard file, by its path relative to the repository root."""
    return {f"{DASHBOARDS}/{board.name}.json": dashboard.text_of(board) for board in BOARDS}


def chart_files() -> dict[str, str]:
    """What the Helm chart needs of Prometheus' rules and of the dashboards: a chart can read files of its own folder only."""
    rules = {f"{CHART_FILES}/{name}.yml": (ROOT / RULES / f"{name}.yml").read_text() for name in RULE_FILES}
    return rules | {f"{CHART_FILES}/{Path(path).name}": text for path, text in dashboards().items()}


def metrics() -> dict[str, str]:
    return {PAGE: metrics_page.page()}


KINDS: Mapping[str, Callable[[], dict[str, str]]] = {"dashboards": dashboards, "metrics": metrics, "chart": chart_files}


def outdated(contents: Mapping[str, str], root: Path) -> list[str]:
    """Return the paths of files that are missing or out of date."""
    return [path for path, text in contents.items() if not (root / path).exists() or (root / path).read_text() != text]


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    """Write or check the files. Return 1 if --check finds an outdated file."""
    parser = argparse.ArgumentParser(prog="python -m deploy.tools", description=__doc__)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"one of {', '.join(KINDS)} (default: all)")
    parser.add_argument("--check", action="store_true", help="write nothing; print each file that differs")
    given = parser.parse_args(arguments)
    if unknown := [kind for kind in given.kinds if kind not in KINDS]:
        parser.error(f"unknown kind {unknown[0]}: choose from {', '.join(KINDS)}")
    made = {path: text for kind in given.kinds or KINDS for path, text in KINDS[kind]().items()}
    paths = outdated(made, root)
    for path in paths:
        if given.check:
            print(f"{path}: out of date: run python -m deploy.tools and commit the file")
        else:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(made[path], encoding="utf-8")
    return 1 if given.check and paths else 0
