"""Whole clusters whose engines and train ranks time-share the memory of their slots."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cluster_run import ClusterRun, Outcome
from run_read import check_metrics, metrics_of, newest_run

from gcore.system.fault_injection import VARIABLE

pytestmark = [pytest.mark.serial, pytest.mark.chaos, pytest.mark.timeout(900)]

STEPS = 6
SHORT = (f"flow.steps={STEPS}", "rollout.deterministic=true", "eval.every=3", "checkpoint.every=2")


@pytest.fixture
def points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where faults are armed."""
    folder = tmp_path / "points"
    folder.mkdir()
    monkeypatch.setenv(VARIABLE, str(folder))
    return folder


def run_to_its_end(spec: Path, home: Path, *more: str) -> Outcome:
    """A clean run of all steps."""
    run = ClusterRun(spec, home, *(one for word in (*SHORT, *more) for one in ("--set", word)))
    try:
        outcome = run.wait()
    finally:
        run.close()
    assert outcome.code == 0, outcome.output
    assert (outcome.summary["audit"], outcome.summary["steps"]) == ("clean", STEPS)
    return outcome


def steps_of(home: Path) -> list[dict[str, Any]]:
    """The numbers of each step, the newest of each."""
    newest = {line["step"]: line["metrics"] for line in metrics_of(newest_run(home)) if line["kind"] == "step"}
    return [newest[step] for step in sorted(newest)]


def events_of(home: Path, kind: str) -> list[dict[str, Any]]:
    lines = (newest_run(home) / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


def test_a_job_whose_slots_take_turns_learns_exactly_what_one_learns_that_keeps_its_memory(
    spec: Path, home: Path
) -> None:
    run_to_its_end(spec, home, "placement.memory=kept")
    kept = steps_of(home)
    run_to_its_end(spec, home, "placement.memory=in_turns")
    turns = steps_of(home)
    assert len(kept) == len(turns) == STEPS
    assert [step["loss"] for step in turns] == [step["loss"] for step in kept]
    assert len({step["loss"] for step in kept}) == STEPS
    assert not any("restore_s" in step for step in kept)
    for step in turns:
        assert step["released_bytes"] > 2**20
        assert step["release_s"] > 0
        assert step["restore_s"] > 0
    check_metrics(newest_run(home), steps=STEPS)
    assert [e for e in events_of(home, "trouble") if "memory" in e["message"]] == []


def test_judges_on_the_ranks_slots_take_turns_too(spec: Path, judge: Path, home: Path) -> None:
    """They are asked about each step's answers, and give their memory back while it is trained."""
    assert judge.is_dir()
    run_to_its_end(spec.with_name("judge.yaml"), home, "placement.memory=in_turns")
    steps = steps_of(home)
    assert len(steps) == STEPS
    assert all(step["restore_s"] > 0 for step in steps)
    check_metrics(newest_run(home), steps=STEPS)


def test_ranks_that_die_asleep_and_while_they_wake_are_lost_ranks_like_any_other(
    spec: Path, home: Path, points: Path
) -> None:
    (points / "release.after").write_text("kill 2")
    (points / "restore.before").write_text("kill 3")
    run_to_its_end(spec, home, "placement.memory=in_turns")
    assert {path.name.split(".fired")[0] for path in points.iterdir()} == {"release.after", "restore.before"}
    assert sum(line["kind"] == "rollback" for line in metrics_of(newest_run(home))) >= 2
    check_metrics(newest_run(home), steps=STEPS)


def test_a_controller_that_dies_while_engines_sleep_is_done_without(spec: Path, home: Path, points: Path) -> None:
    (points / "sleep.after").write_text("kill 2")
    (points / "wake.before").write_text("kill 2")
    run_to_its_end(spec, home, "placement.memory=in_turns")
    assert all(".fired" in path.name for path in points.iterdir())
    check_metrics(newest_run(home), steps=STEPS)
