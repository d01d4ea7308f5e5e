"""Rules, alerts and scrape configurations: checked and tested by promtool."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import yaml

from tools.monitoring import rule_files

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy" / "prometheus"
CONFIGURATIONS = sorted(DEPLOY.glob("*.yml"))


def promtool(*words: str | Path, cwd: Path = DEPLOY) -> str:
    command = ["promtool", *map(str, words)]
    environment = os.environ | {"GOGC": "400"}  # a fifth of the time is collection of garbage otherwise
    ended = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=280)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.needs("promtool")
def test_promtool_accepts_the_rules_and_alert_tests_pass() -> None:
    promtool("check", "rules", *rule_files())
    promtool("test", "rules", *sorted((DEPLOY / "tests").glob("*.yml")), cwd=DEPLOY / "tests")


@pytest.mark.needs("promtool")
@pytest.mark.parametrize("file", CONFIGURATIONS, ids=lambda file: file.name)
def test_promtool_accepts_each_scrape_configuration(file: Path, tmp_path: Path) -> None:
    """Debian's Prometheus lacks Kubernetes, so that file is checked without its discovery."""
    tree = yaml.safe_load(file.read_text())
    for job in tree["scrape_configs"]:
        if found := job.pop("kubernetes_sd_configs", None):
            assert found == [{"role": "pod", "namespaces": {"own_namespace": True}}]
    for folder in ("rules", "targets"):
        (tmp_path / folder).symlink_to(DEPLOY / folder)
    (tmp_path / file.name).write_text(yaml.safe_dump(tree))
    # Files of secrets exist only on the target machine.
    promtool("check", "config", *["--syntax-only"] * ("kubernetes" in file.name), tmp_path / file.name)
    by_name = {job["job_name"]: job for job in tree["scrape_configs"]}
    assert by_name["gcore"]["honor_labels"], "otherwise Prometheus replaces the names of jobs"
    assert "etcd" in by_name
