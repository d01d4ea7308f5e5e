"""The checker of `deploy/` finds each kind of fault, planted in a copy of its files."""

from __future__ import annotations

from pathlib import Path

import pytest
from planted import Fault, not_found, plant, repository

from tools import check_deploy, lint
from tools.problem import ROOT, main

BOARD = "deploy/grafana/dashboards/fleet.json"
ALERTS = "deploy/prometheus/rules/alerts.yml"
RULE_TESTS = "deploy/prometheus/tests/alerts.yml"
RUNBOOKS = "docs/operate/runbooks"

FAULTS: list[Fault] = [
    (BOARD, '"uid": "gcore-fleet"', '"uid": "fleet"', f"{BOARD}:1: the uid is fleet"),
    (BOARD, "what do jobs wait for?", "what jobs wait for.", f"{BOARD}:1: the description is no question"),
    (BOARD, '"name": "source"', '"name": "sources"', f"{BOARD}:1: the queries use the variables"),
    (BOARD, '"uid": ', '"uid":  ', f"{BOARD}:1: the dashboard is not what its description makes"),
    (
        "deploy/grafana/provisioning/datasources/prometheus.yml",
        "uid: gcore",
        "uid: other",
        "the data source is prometheus other",
    ),
    (
        "deploy/grafana/provisioning/dashboards/gcore.yml",
        "type: file",
        "type: folder",
        "the provider's type is folder: make it file",
    ),
    (ALERTS, "expr: 'gcore_ready == 0'", "expr: 'gcore_raedy == 0'", "names gcore_raedy, which no metric"),
    (ALERTS, "expr: 'up{job=\"gcore\"} == 0'", "expr: 'down{job=\"x\"} == 0'", "names no metric of gcore, etcd"),
    (ALERTS, "severity: warning", "severity: high", "GcoreControllerDown: the severity is none of"),
    (ALERTS, "does not answer.'", "does not answer'", "GcoreControllerDown: the summary is no sentence"),
    (
        ALERTS,
        "runbook: docs/operate/runbooks/gcore-lease-lost.md",
        "runbook: none",
        f"{ALERTS}:27: GcoreLeaseLost: the runbook",
    ),
    (ALERTS, "alert: GcoreApiFails", "alert: GcorePlanted", "the alert GcorePlanted has no runbook: write it"),
    (ALERTS, "alert: GcoreNoController", "alert: GcoreNoController", "gcore-planted.md:1: the alert GcorePlanted"),
    (RULE_TESTS, "GcoreControllerDown, eval", "GcoreNoController, eval", "GcoreControllerDown fires in tests on"),
    (RULE_TESTS, "series: 'up{", "series: 'job:up{", "an alert is tested on job:up, which is recorded"),
    (f"{RUNBOOKS}/gcore-lease-lost.md", "**Warning.**", "**Info.**", "gcore-lease-lost.md:1: it does not begin with"),
    (f"{RUNBOOKS}/gcore-lease-lost.md", "[30m]", "[40m]", "it shows another expression than the rule"),
    (f"{RUNBOOKS}/gcore-lease-lost.md", "## Do\n", "## Done\n", "gcore-lease-lost.md:1: it has no '## Do'"),
    (f"{RUNBOOKS}/index.md", "](gcore-lease-lost.md)", "](x.md)", "it does not list gcore-lease-lost.md"),
    (f"{RUNBOOKS}/index.md", "#", "#", "gcore-api-fails.md:1: there is no such alert any more"),
    ("deploy/docker/Dockerfile", "COPY deploy/node ", "COPY deploy/gone ", "deploy/gone is copied and is not there"),
    ("deploy/docker/Dockerfile", "-c constraints/cpu.txt hatch", "hatch", "is not pinned: use constraints"),
    ("deploy/docker/Dockerfile", "ARG SGLANG=sglang==", "ARG SGLANG=sglang>=", "SGLang is not pinned"),
    ("deploy/docker/Dockerfile", "python:3.11.14-slim", "python:latest-slim", "names no version: name it"),
    ("deploy/docker/Dockerfile", "USER 10001:10001", "USER root", "the image cpu does not end as user 10001"),
    ("deploy/docker/Dockerfile", "HEALTHCHECK", "NOCHECK", "the image cpu has no probe"),
    ("deploy/docker/Dockerfile.dockerignore", "!LICENSE\n", "", "LICENSE is copied or sent to the builder, not both"),
    ("deploy/docker/Dockerfile.dockerignore", "*\n", "docs\n", "Dockerfile.dockerignore:2: it does not begin with *"),
    ("deploy/compose/compose.yaml", "./certs.sh:", "./gone.sh:", "mounts ./gone.sh, which is not there"),
    ("deploy/compose/compose.yaml", "127.0.0.1:9090:", "0.0.0.0:9090:", "opens 0.0.0.0:9090:9090 to all"),
    ("deploy/compose/compose.yaml", "prom/prometheus:v3.5.0", "prom/prometheus:latest", "prometheus:latest names no"),
    ("deploy/compose/compose.yaml", "http://prometheus:", "http://elsewhere:", "is 'http://elsewhere:9090': name a"),
    ("deploy/compose/prometheus.yml", "rules/*.yml", "other/*.yml", "nothing is mounted at /etc/prometheus/other"),
    ("deploy/compose/prometheus.yml", "node-1:7701", "node-0:7701", "it scrapes"),
    ("deploy/helm/gcore/values.yaml", "tag: v3.5.21", "tag: v3.5.20", "run different versions of etcd"),
    ("deploy/helm/gcore/Chart.yaml", "appVersion: ", "appVersion: 9", "appVersion is 9"),
]


def test_each_fault_is_found(tmp_path: Path) -> None:
    root = repository(tmp_path, "deploy", "docs")
    plant(root, FAULTS)
    assert not_found(check_deploy.check(root), FAULTS) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"description": "Workers."}, "the description is no sentence"),
        ({"fieldConfig": {"defaults": {"unit": "ms"}}}, "the unit 'ms' is none of"),
        ({"targets": [{"expr": "gcore_store_in_use_bytes", "legendFormat": "x"}]}, "the metric is in bytes"),
        ({"targets": [{"expr": "gcore_step_seconds{job='x'}", "legendFormat": "x"}]}, "the metric is in seconds"),
        ({"targets": [{"expr": "gcore_nodes", "legendFormat": "x"}] * 2}, "two queries have one legend"),
        ({"targets": [{"expr": "gcore_nods", "legendFormat": "x"}]}, "names gcore_nods, which no metric"),
        ({"targets": [{"expr": "1", "legendFormat": "x"}]}, "names no metric"),
    ],
)
def test_a_fault_of_a_panel_is_found(change: dict[str, object], message: str) -> None:
    panel: dict[str, object] = {
        "description": "How many nodes there are.",
        "fieldConfig": {"defaults": {"unit": "none"}},
        "targets": [{"expr": "gcore_nodes", "legendFormat": "nodes"}],
    }
    assert list(check_deploy.wrong_panel(panel, ROOT)) == []
    assert message in " ".join(check_deploy.wrong_panel(panel | change, ROOT))


def test_panels_in_one_place_and_beyond_the_last_column_are_found() -> None:
    places = [{"x": 0, "y": 0, "w": 12, "h": 8}, {"x": 6, "y": 7, "w": 12, "h": 8}, {"x": 18, "y": 20, "w": 12, "h": 8}]
    tree = {"panels": [{"title": f"p{n}", "gridPos": place} for n, place in enumerate(places)]}
    found = [problem.message for problem in check_deploy._places(tree, "x.json", "")]
    assert [message.split("'")[1] for message in found] == ["p1", "p2"]


def test_the_program_prints_each_problem_and_exits_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    checks = {"bad": lambda root: ["a.py:1: x"], "good": lambda root: []}
    assert main(checks, None, []) == 1
    assert capsys.readouterr().out == "a.py:1: x\n"
    assert main(checks, None, ["good"]) == 0
    with pytest.raises(SystemExit):
        main(checks, None, ["gone"])
    assert "no check is called gone" in capsys.readouterr().err
    assert {"code", "deploy", "docs", "metrics", "simulation", "spec"} <= lint.CHECKS.keys()
