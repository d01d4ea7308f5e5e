"""Placement that moves, in whole clusters on emulated slots: engines change over, worlds change their size, slots are lent, and who
dies in the middle of it holds nothing up."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from booked_run import MOST_LOST, books_of, check_sums, unbooked
from cluster_run import ClusterRun, Outcome, gcore, processes_of
from placement_run import NAME, arm, moves_of, write_job

pytestmark = [pytest.mark.serial, pytest.mark.chaos, pytest.mark.timeout(300)]

STEPS = 8


def ended_well(ended: Outcome, steps: int = STEPS) -> None:
    assert ended.code == 0, ended.output
    assert (ended.summary["audit"], ended.summary["steps"]) == ("clean", steps)


def books_sum(home: Path) -> None:
    """Also where something was killed."""
    _, lines = books_of(home)
    check_sums(lines)
    assert unbooked(lines) < MOST_LOST


def played(spec: Path, home: Path, slots: int = 8, controllers: int = 2) -> Outcome:
    run = ClusterRun(spec, home, "--slots", f"emulated:{slots}", controllers=controllers)
    try:
        return run.wait()
    finally:
        run.close()


def test_slots_change_over_between_steps_and_each_move_says_why_and_what_came_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = write_job(tmp_path, monkeypatch, {"policy": "swing", "train": 1, "reward": 1}, steps=STEPS)
    home = tmp_path / "home"
    run = ClusterRun(spec, home, "--slots", "emulated:8")
    try:
        run.until_step(STEPS - 2)
        shown = gcore("placement", "show", NAME, "--home", str(home)).stdout
        told = gcore("placement", "explain", NAME, "--home", str(home)).stdout
        kept = json.loads(gcore("placement", "history", NAME, "--home", str(home), "-o", "json").stdout)
        ended_well(run.wait())
    finally:
        run.close()
    moves = moves_of(home)
    done = [move for move in moves if move.state == "done"]
    assert len(done) >= STEPS - 3
    assert {move.after.reward for move in done} == {1, 2, 3}
    assert all(move.after.train == 1 for move in done)
    assert any(move.outcome is not None and move.outcome.took_s is not None for move in done)
    assert any(move.outcome is not None and move.outcome.step_s is not None for move in done)
    assert "swing" in shown
    assert "is over" in told
    assert kept


def test_the_train_world_grows_and_shrinks_between_steps_and_no_step_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    placement = {"policy": "regrow", "train": 1, "reward": 1}
    # Emulated ranks leave no copies in memory: another world goes on from a checkpoint.
    spec = write_job(tmp_path, monkeypatch, placement, steps=STEPS, checkpoint={"every": 1})
    home = tmp_path / "home"
    ended = played(spec, home)
    ended_well(ended)
    worlds = [move for move in moves_of(home) if move.kind == "world"]
    assert {move.after.train for move in worlds if move.state == "done"} == {1, 2}
    (folder,) = (home / "runs").glob(f"{NAME}-*")
    back = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    for event in (event for event in back if event["kind"] == "rollback"):
        assert event["data"]["from_step"] == event["data"]["to_step"], "a world between steps costs no step"


def test_what_a_policy_would_do_is_only_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    placement = {"policy": "swing", "train": 1, "reward": 1, "dry_run": True}
    home = tmp_path / "home"
    ended_well(played(write_job(tmp_path, monkeypatch, placement, steps=4), home), 4)
    moves = moves_of(home)
    assert moves
    assert {move.state for move in moves} == {"would"}


def test_a_policy_that_raises_moves_nothing_and_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    spec = write_job(tmp_path, monkeypatch, {"policy": "broken", "train": 1, "reward": 1}, steps=3)
    ended = played(spec, home)
    ended_well(ended, 3)
    assert "it has no plan" in ended.output
    assert moves_of(home) == []


@pytest.mark.parametrize("point", ["place_before", "place_after", "sleep_before", "sleep_after", "wake_after"])
def test_a_controller_that_is_killed_in_the_middle_of_a_move_holds_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    spec = write_job(tmp_path, monkeypatch, {"policy": "swing", "train": 1, "reward": 1}, steps=STEPS)
    armed = arm(tmp_path, monkeypatch, **{point: "kill 3"})
    home = tmp_path / "home"
    ended_well(played(spec, home))
    assert list(armed.glob("*.fired.*")), "the fault never came"
    assert len([move for move in moves_of(home) if move.state == "done"]) >= 3
    books_sum(home)


def test_an_engine_that_is_killed_while_it_is_lent_away_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = write_job(tmp_path, monkeypatch, {"policy": "swing", "train": 1, "reward": 1}, steps=STEPS)
    home = tmp_path / "home"
    run = ClusterRun(spec, home, "--slots", "emulated:8")
    try:
        run.until_step(2)
        run.kill_worker("reward", child=False)
        ended_well(run.wait())
    finally:
        run.close()
    books_sum(home)


def test_a_node_that_is_killed_in_the_middle_of_a_move_holds_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = write_job(tmp_path, monkeypatch, {"policy": "swing", "train": 1, "reward": 1}, steps=STEPS)
    home = tmp_path / "home"
    run = ClusterRun(spec, home, "--slots", "emulated:8")
    try:
        run.until("a move", lambda: _moves_so_far(home) >= 2)
        for pid in processes_of(home):
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
            if b"node-1" in words:
                os.kill(pid, signal.SIGKILL)
        ended_well(run.wait())
    finally:
        run.close()
    moves = moves_of(home)
    assert len([move for move in moves if move.state == "done"]) >= 3
    books_sum(home)


def _moves_so_far(home: Path) -> int:
    files = list((home / "runs").glob(f"{NAME}-*/moves.jsonl"))
    return len(moves_of(home)) if files else 0


def test_slots_are_lent_to_the_judge_while_it_is_behind_and_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    law = {"speedup": 2.0, "judge_response_tokens": 60, "response_tokens": 20, "sleep_s": 0.1, "wake_s": 0.1}
    placement = {"policy": "keep", "train": 1, "reward": 1, "lend": True}
    judges_say_more = {"flow": {"steps": 5, "groups_per_step": 16, "samples_per_prompt": 4}}
    spec = write_job(tmp_path, monkeypatch, placement, law=law, **judges_say_more)
    home = tmp_path / "home"
    run = ClusterRun(spec, home, "--slots", "emulated:8")
    try:
        ended = run.wait()
    finally:
        run.close()
    ended_well(ended, 5)
    moves = moves_of(home)
    lent = [move for move in moves if move.kind == "lend"]
    assert lent
    assert all("the judges had" in move.reason and move.after.reward > move.before.reward for move in lent)
    assert any(move.kind == "return" for move in moves)


def test_what_a_person_fixes_is_obeyed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = write_job(tmp_path, monkeypatch, {"policy": "swing", "train": 1, "reward": 1}, steps=STEPS)
    home = tmp_path / "home"
    run = ClusterRun(spec, home, "--slots", "emulated:8")
    try:
        run.until_step(1)
        said = gcore("placement", "pin", NAME, "--reward", "2", "--home", str(home)).stdout
        refused = gcore("placement", "pin", NAME, "--reward", "9", "--home", str(home), check=None)
        ended_well(run.wait())
    finally:
        run.close()
    assert "reward has 2" in said
    assert refused.returncode != 0
    assert "reward 9 are more than the 8 slots there are" in refused.stderr
    later = [move for move in moves_of(home) if move.step >= 3]
    assert {move.after.reward for move in later} <= {2}


def test_a_node_that_gives_its_last_engine_of_the_policy_away_leaves_its_prompts_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = write_job(tmp_path, monkeypatch, {"policy": "tight", "train": 1, "reward": 1}, steps=STEPS)
    home = tmp_path / "home"
    ended_well(played(spec, home, slots=4))
    assert {move.after.rollout for move in moves_of(home) if move.state == "done"} == {1, 2}


def test_dynamic_moves_slots_to_a_judge_that_became_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    law = {"speedup": 2.0, "judge_slow_at": 3, "judge_slow": 6.0, "judge_response_tokens": 20, "shared_loss": 0.5}
    placement = {"policy": "dynamic", "train": 1, "reward": 1}
    spec = write_job(tmp_path, monkeypatch, placement, law=law, steps=14)
    home = tmp_path / "home"
    run = ClusterRun(spec, home, "--slots", "emulated:8")
    try:
        run.until_step(12)
        told = gcore("placement", "explain", NAME, "--home", str(home)).stdout
        ended = run.wait()
    finally:
        run.close()
    ended_well(ended, 14)
    moves = [move for move in moves_of(home) if move.state == "done"]
    assert any(move.after.reward > 1 for move in moves), told
    assert "because" in told
