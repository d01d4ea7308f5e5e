"""What the pages on placement show works, and what they list is all there is."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from documents import ROOT, blocks, commands, mismatch
from typer.testing import CliRunner

from controllers.cli.main import app
from gcore.config.spec import PlacementSpec
from gcore.errors import Unreachable
from placement.simulate.scenario import SECTIONS, Scenario

SMALL = """
name: small
what: a small job
slots: 8
steps: 4
groups: 4
samples: 4
lengths: {mean: 120}
training: {sizes: [1, 2]}
colocated: false
judging: {tokens: 900}
rollout: {running: 8}
"""


def test_the_policy_that_the_page_on_placement_shows_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "placement.md").read_text()
    code: dict[str, Any] = {}
    exec(page.split("```python\n")[1].split("```")[0], code)
    monkeypatch.setattr("placement.named.find_policy", lambda name: code["idle_first"])
    scenario = tmp_path / "small.yaml"
    scenario.write_text(SMALL)
    words = ["simulate", str(scenario), "--policy", "idle_first", "--cost", "0", "-o", "json"]
    row = json.loads(CliRunner().invoke(app, words, catch_exceptions=False).output)["rows"][-1]
    assert row["policy"] == "idle_first"
    assert row["moves"]
    assert all(move["reason"].startswith("judges were busy for ") for move in row["moves"])


def test_the_plan_that_the_page_on_the_first_placement_shows_is_what_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (shown,) = blocks(ROOT / "docs" / "first-placement.md", "console")
    for command in commands(shown):
        if not command.text.startswith("gcore "):
            subprocess.run(command.text, shell=True, check=True)
            continue
        words = shlex.split(command.text)[1:]
        printed = CliRunner().invoke(app, words, catch_exceptions=False).output
        wrong = mismatch(command.printed, printed)
        assert wrong is None, f"{command.text} does not print {wrong!r}:\n{printed}"


def test_every_field_of_a_placement_is_on_its_page() -> None:
    page = (ROOT / "docs" / "placement.md").read_text()
    assert [name for name in PlacementSpec.model_fields if f" {name}: " not in page] == []


def test_every_field_of_a_scenario_is_on_the_page_about_the_simulator() -> None:
    page = (Path(__file__).parents[2] / "docs" / "placement-simulation.md").read_text()
    for section in (Scenario, *SECTIONS.values()):
        for name in section.model_fields:
            assert f"`{name}`" in page, name


def test_who_asks_where_slots_are_after_a_run_is_told_what_can_still_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controllers.cli.summary.finished_run", lambda home, job, error: {"job": job})
    words = ["placement", "show", "sums", "--home", str(tmp_path)]
    with pytest.raises(Unreachable, match=r"job 'sums' has ended: nothing is placed any more.*gcore placement explain"):
        CliRunner().invoke(app, words, catch_exceptions=False)
