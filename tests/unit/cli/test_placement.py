"""`gcore placement` prints a policy's reasons unchanged and escapes markup and control characters.

The examples on the placement pages work, and their lists are complete.
"""

from __future__ import annotations

import shlex
import subprocess
from io import StringIO
from pathlib import Path

import pytest
from documents import ROOT, blocks, commands, mismatch
from rich.console import Console
from typer.testing import CliRunner

from controllers.cli.main import app
from controllers.cli.view.placement import history_table, move_tree, placement_story
from gcore.config.placement import PlacementSpec
from gcore.errors import Unreachable
from gcore.ledger.records.job import Move, MoveKind, MoveOutcome, SplitPart
from placement.simulator.scenario import SECTIONS, Scenario

SPLIT = SplitPart(mode="coexisting", rollout=2, reward=1, train=1)


def move(reason: str, time: float = 0.0) -> Move:
    return Move(generation=1, step=1, kind=MoveKind.LEND, before=SPLIT, after=SPLIT, reason=reason, time=time)


@pytest.mark.parametrize("reason", ["a [/red] end", "[red] alert", "[rollout 80%] is idle", "[/]", "[link=x]y"])
def test_brackets_in_a_reason_are_shown_and_are_no_markup(reason: str) -> None:
    screen = Console(file=StringIO(), width=300)
    screen.print(history_table([move(reason)]))
    assert isinstance(screen.file, StringIO)
    assert reason in screen.file.getvalue()


def test_control_characters_of_a_reason_do_not_reach_the_terminal() -> None:
    screen = Console(file=StringIO(), width=300, force_terminal=True)
    reason = "because\n\x1b[31mred\x07 \u202e"
    screen.print(history_table([move(reason)]))
    assert isinstance(screen.file, StringIO)
    for told in (screen.file.getvalue(), "\n".join(placement_story("j", None, [move(reason)], 0))):
        assert r"because\n\x1b[31mred\x07 \u202e" in told
        assert "\x1b[31m" not in told


@pytest.mark.parametrize("time", [1e18, -1e18, float("nan"), float("inf")])
def test_a_time_that_is_none_is_left_out(time: float) -> None:
    assert placement_story("j", None, [move("why", time)], 0)[2].startswith("after step 1: ")


def test_slots_that_change_are_told_by_node_and_in_the_record_one_by_one() -> None:
    slots = tuple(f"node-{n}/emulated:{k} rollout -> reward" for n, k in ((0, 3), (0, 4), (1, 6)))
    slots += ("node-1/emulated:7 train -> rollout", "somewhere else")
    told = "\n".join(placement_story("j", None, [move("why").model_copy(update={"slots": slots, "more_slots": 2})], 0))
    assert (
        "Slots: rollout -> reward: 3, 4 on node-0 and 6 on node-1; train -> rollout: 7 on node-1; somewhere else, and 2 more."
        in told
    )
    assert move_tree(move("why").model_copy(update={"slots": slots}))["slots"] == list(slots)


def test_both_ways_to_tell_of_a_move_name_the_same_step() -> None:
    lent = move("why").model_copy(update={"step": 7, "within": True})
    screen = Console(file=StringIO(), width=300)
    screen.print(history_table([lent]))
    assert isinstance(screen.file, StringIO)
    assert "within step 8" in screen.file.getvalue()
    assert "within step 8" in "\n".join(placement_story("j", None, [lent], 0))


def test_of_a_loan_it_is_said_that_its_gain_is_held_against_nothing() -> None:
    lent = move("why").model_copy(update={"gain_s": 3.0, "cost_s": 0.5})
    assert "cannot be measured" in "\n".join(placement_story("j", None, [lent], 0))
    assert "cannot be measured" not in "\n".join(
        placement_story("j", None, [lent.model_copy(update={"kind": MoveKind.SPLIT})], 0)
    )


@pytest.mark.parametrize(
    ("took", "said"),
    [
        (3.0, "this is longer than expected."),
        (1.0, "this is shorter than expected."),
        (2.1, "took 2.1 s each."),
    ],
)
def test_steps_that_took_another_time_than_was_expected_are_said_to_have(took: float, said: str) -> None:
    known = {"kind": MoveKind.SPLIT, "expected_s": 2.0, "outcome": MoveOutcome(steps=5, step_s=took)}
    moved = move("why").model_copy(update=known)
    assert placement_story("j", None, [moved], 0)[-1].endswith(said)
    assert "than expected" not in placement_story("j", None, [moved.model_copy(update={"within": True})], 0)[-1]
    assert "Measured" not in placement_story("j", None, [moved.model_copy(update={"state": "lapsed"})], 0)[-1]


def test_it_is_told_who_planned_from_then_on() -> None:
    moves = [move("why", time).model_copy(update={"by": by}) for time, by in ((1.0, "a"), (2.0, "a"), (3.0, "b"))]
    told = [line for line in placement_story("j", None, moves, 0) if "Planned by" in line]
    assert told == ["  Planned by b from here on; before by a."]


def test_idle_shares_of_pools_are_printed_once() -> None:
    moved = move("rollout was idle for 83% of the newest step").model_copy(update={"idle": {"rollout": 0.825}})
    assert not any("Idle before" in line for line in placement_story("j", None, [moved], 0))
    assert any(
        "Idle before: rollout 82%." in line
        for line in placement_story("j", None, [moved.model_copy(update={"reason": ""})], 0)
    )


def test_the_plan_that_the_page_on_the_first_placement_shows_is_what_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs" / "operate" / "scheduling.md"
    (shown,) = (block for block in blocks(page, "console") if "$ gcore plan" in block.text)
    for command in commands(shown):
        if not command.text.startswith("gcore "):
            subprocess.run(command.text, shell=True, check=True)
            continue
        words = shlex.split(command.text)[1:]
        printed = CliRunner().invoke(app, words, catch_exceptions=False).output
        wrong = mismatch(command.printed, printed)
        assert wrong is None, f"{command.text} does not print {wrong!r}:\n{printed}"


def test_every_field_of_a_placement_is_on_its_page() -> None:
    page = (ROOT / "docs" / "operate" / "scheduling.md").read_text()
    assert [name for name in PlacementSpec.model_fields if f" {name}: " not in page] == []


def test_every_field_of_a_scenario_is_on_the_page_about_the_simulator() -> None:
    page = (Path(__file__).parents[3] / "docs" / "develop" / "placement-simulation.md").read_text()
    for section in (Scenario, *SECTIONS.values()):
        for name in section.model_fields:
            assert f"`{name}`" in page, name


def test_placement_of_an_ended_job_points_to_the_commands_that_still_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controllers.cli.view.summary.describe_finished_run", lambda home, job, error: {"job": job})
    words = ["placement", "show", "sums", "--home", str(tmp_path)]
    with pytest.raises(Unreachable, match=r"job 'sums' has ended, so it has no placement.*gcore placement explain"):
        CliRunner().invoke(app, words, catch_exceptions=False)
