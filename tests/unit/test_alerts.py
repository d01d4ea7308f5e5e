"""Rules, alerts and scrape configurations: checked and tested by promtool; each alert has its tests and its page."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from watched_metrics import RULES, rules, unknown

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy" / "prometheus"
RUNBOOKS = ROOT / "docs" / "runbooks"
CONFIGURATIONS = sorted(DEPLOY.glob("*.yml"))
FOREIGN = re.compile(r"\b(?:etcd|process)_\w+|\bup\b")


def promtool(*words: str | Path, cwd: Path = DEPLOY) -> str:
    command = ["promtool", *map(str, words)]
    ended = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


ALERTS = {rule["alert"]: rule for rule in rules("alert")}
CASES = [
    case for file in sorted((DEPLOY / "tests").glob("*.yml")) for case in yaml.safe_load(file.read_text())["tests"]
]


@pytest.mark.needs("promtool")
def test_promtool_takes_the_rules_and_the_tests_of_each_alert_pass() -> None:
    promtool("check", "rules", *RULES)
    promtool("test", "rules", *sorted((DEPLOY / "tests").glob("*.yml")), cwd=DEPLOY / "tests")


@pytest.mark.needs("promtool")
@pytest.mark.parametrize("file", CONFIGURATIONS, ids=lambda file: file.name)
def test_promtool_takes_each_scrape_configuration(file: Path, tmp_path: Path) -> None:
    """Debian builds Prometheus without Kubernetes, so of that file all but the discovery itself is checked here."""
    tree = yaml.safe_load(file.read_text())
    for job in tree["scrape_configs"]:
        if found := job.pop("kubernetes_sd_configs", None):
            assert found == [{"role": "pod", "namespaces": {"own_namespace": True}}]
    for folder in ("rules", "targets"):
        (tmp_path / folder).symlink_to(DEPLOY / folder)
    (tmp_path / file.name).write_text(yaml.safe_dump(tree))
    # The files of secrets that one names are on the machine that it is for.
    promtool("check", "config", *["--syntax-only"] * ("kubernetes" in file.name), tmp_path / file.name)
    by_name = {job["job_name"]: job for job in tree["scrape_configs"]}
    assert by_name["gcore"]["honor_labels"], "or the names of jobs would be lost"
    assert "etcd" in by_name


@pytest.mark.parametrize("name", ALERTS)
def test_each_alert_fires_in_one_test_and_is_silent_on_the_same_metrics_in_another(name: str) -> None:
    fires, silent = set[str](), set[str]()
    for case in CASES:
        for one in case.get("alert_rule_test", ()):
            if one["alertname"] == name:
                series = {re.match(r"[\w:]+", given["series"])[0] for given in case["input_series"]}  # type: ignore[index]
                (fires if one["exp_alerts"] else silent).update(series)
    assert fires
    assert fires == silent


def test_alerts_are_tested_on_what_is_scraped_and_not_on_what_is_recorded_of_it() -> None:
    cases = yaml.safe_load((DEPLOY / "tests" / "alerts.yml").read_text())["tests"]
    given = {series["series"].partition("{")[0] for case in cases for series in case["input_series"]}
    assert {name for name in given if ":" in name} == set()


@pytest.mark.parametrize("name", ALERTS)
def test_each_alert_has_a_page_that_says_what_to_do(name: str) -> None:
    rule = ALERTS[name]
    slug = re.sub(r"(?<!^)(?=[A-Z])", "-", name).lower()
    assert rule["annotations"]["runbook"] == f"docs/runbooks/{slug}.md"
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    assert rule["annotations"]["summary"].endswith(".")
    page = (RUNBOOKS / f"{slug}.md").read_text()
    assert page.startswith(f"# {name}\n\n**{rule['labels']['severity'].capitalize()}.** ")
    assert f"```promql\n{rule['expr']}\n```" in page, "the page shows another expression"
    assert "\n## Look at\n" in page
    assert "\n## Do\n\n1. " in page
    assert f"]({slug}.md) | {rule['labels']['severity']} |" in (RUNBOOKS / "index.md").read_text()


def test_there_is_no_page_of_an_alert_that_is_gone() -> None:
    slugs = {Path(rule["annotations"]["runbook"]).name for rule in ALERTS.values()}
    assert {page.name for page in RUNBOOKS.glob("*.md")} == slugs | {"index.md"}


@pytest.mark.parametrize("rule", rules("expr"), ids=lambda rule: rule.get("alert") or rule["record"])
def test_every_metric_that_a_rule_names_is_there(rule: dict[str, Any]) -> None:
    assert "gcore_" in rule["expr"] or FOREIGN.search(rule["expr"])
    assert unknown(rule["expr"]) == set()
