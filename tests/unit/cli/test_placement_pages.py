"""What the pages on placement show works, and what they list is all there is."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest
from documents import ROOT, blocks, commands, mismatch
from typer.testing import CliRunner

from controllers.cli.main import app
from gcore.config.placement import PlacementSpec
from gcore.errors import Unreachable
from placement.simulator.scenario import SECTIONS, Scenario


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
    page = (Path(__file__).parents[3] / "docs" / "placement-simulation.md").read_text()
    for section in (Scenario, *SECTIONS.values()):
        for name in section.model_fields:
            assert f"`{name}`" in page, name


def test_who_asks_where_slots_are_after_a_run_is_told_what_can_still_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controllers.cli.view.summary.describe_finished_run", lambda home, job, error: {"job": job})
    words = ["placement", "show", "sums", "--home", str(tmp_path)]
    with pytest.raises(Unreachable, match=r"job 'sums' has ended: nothing is placed any more.*gcore placement explain"):
        CliRunner().invoke(app, words, catch_exceptions=False)
