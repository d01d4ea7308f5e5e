"""Dashboards: what is committed is what the description makes; each panel has a unit, a sentence and queries of metrics that there are."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from dashboards import FILES, GRAFANA, Asked, every_query, panels, tree_of
from watched_metrics import unknown

UNITS = {"none", "s", "bytes", "percentunit"}


def test_the_files_are_what_the_description_makes(tmp_path: Path) -> None:
    command = [sys.executable, str(GRAFANA / "make.py"), str(tmp_path)]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"})
    made = {file.name: file.read_text() for file in tmp_path.glob("*.json")}
    assert made == {file.name: file.read_text() for file in FILES}, "run: python deploy/grafana/make.py"
    assert {"fleet.json", "job.json", "placement.json", "control.json", "judges.json"} <= made.keys()


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
class TestEachDashboard:
    def test_has_variables_for_what_its_queries_leave_open(self, file: Path) -> None:
        tree = tree_of(file)
        known = {variable["name"] for variable in tree["templating"]["list"]}
        text = " ".join(target["expr"] for panel in panels(file) for target in panel["targets"])
        used = set(re.findall(r"\$(\w+)", text)) - {"__rate_interval"}
        assert used | {"source"} == known
        assert tree["description"].endswith("?")
        assert tree["uid"] == f"gcore-{file.stem}"

    def test_has_panels_that_say_how_to_read_them_and_in_which_unit(self, file: Path) -> None:
        for panel in panels(file):
            assert re.fullmatch(r".{10,}\.", panel["description"]), panel["title"]
            unit = panel["fieldConfig"]["defaults"]["unit"]
            assert unit in UNITS
            names = " ".join(target["expr"] for target in panel["targets"])
            if "_bytes" in names:
                assert unit == "bytes", panel["title"]
            if re.search(r"histogram_quantile.*_seconds_bucket|gcore_step_\w*seconds\{|gcore_move_\w*seconds", names):
                assert unit == "s", panel["title"]
            several = [target["legendFormat"] for target in panel["targets"]]
            assert len(set(several)) == len(several)

    def test_has_no_two_panels_in_the_same_place(self, file: Path) -> None:
        taken: set[tuple[int, int]] = set()
        for panel in tree_of(file)["panels"]:
            where = panel["gridPos"]
            rows, columns = range(where["y"], where["y"] + where["h"]), range(where["x"], where["x"] + where["w"])
            cells = {(row, column) for row in rows for column in columns}
            assert not cells & taken
            assert where["x"] + where["w"] <= 24
            taken |= cells


@pytest.mark.parametrize("asked", list(every_query()), ids=str)
def test_each_query_names_metrics_that_there_are(asked: Asked) -> None:
    assert "gcore_" in asked.expression or re.search(r"\b(?:etcd|process)_", asked.expression)
    assert unknown(asked.expression) == set()


def test_what_grafana_provisions_names_the_datasource_of_the_dashboards() -> None:
    (source,) = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yml").read_text())["datasources"]
    assert (source["type"], source["uid"]) == ("prometheus", "gcore")
    (provider,) = yaml.safe_load((GRAFANA / "provisioning/dashboards/gcore.yml").read_text())["providers"]
    assert provider["type"] == "file"
    for file in FILES:
        variable = next(one for one in tree_of(file)["templating"]["list"] if one["name"] == "source")
        assert variable["current"]["value"] == source["uid"]
