"""Dynamic placement in whole clusters on emulated slots: engines change pools, worlds are resized, slots are lent, and a crash in between blocks nothing."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import urllib.request
from pathlib import Path

import pytest
from booked_run import MOST_LOST, books_of, check_sums, unbooked
from cluster_run import ClusterRun, Outcome, gcore, processes_of
from placement_run import NAME, arm, check_account, moves_of, write_job

from gcore.api.v1 import jobs_pb2 as pb
from gcore.ledger.records.job import Move

pytestmark = [pytest.mark.serial, pytest.mark.chaos, pytest.mark.timeout(300)]

STEPS = 8
LENDING = {"policy": "keep", "train": 1, "reward": 2, "lend": True}
LONG_LOANS = {"speedup": 2.0, "judge_decode_s": 0.2, "judge_response_tokens": 60, "response_tokens": 20, "sleep_s": 0.1}
LONG_FLOW = {"steps": 3, "groups_per_step": 16, "samples_per_prompt": 8}
"""Judges have half a minute to do after rollout is done: so long does a loan last."""


def ended_well(ended: Outcome, steps: int = STEPS) -> None:
    assert ended.code == 0, ended.output
    assert (ended.summary["audit"], ended.summary["steps"]) == ("clean", steps)


def books_sum(home: Path) -> None:
    """Also where something was killed: of the step in which it died a part is lost, which is a large part of so short a run, and of others
    next to nothing."""
    _, lines = books_of(home)
    check_sums(lines)
    worst = max(lines, key=lambda line: line.book.unbooked).book
    assert worst.unbooked < worst.seconds * worst.slots / 2
    assert unbooked([line for line in lines if line.book.version != worst.version]) < MOST_LOST


def reads_like_an_account(home: Path) -> str:
    """What `gcore placement explain` says of a run that is over: each move with why, what was expected, and what came of it."""
    told = gcore("placement", "explain", NAME, "--home", str(home)).stdout
    check_account(told, moves_of(home))
    (folder,) = (home / "runs").glob(f"{NAME}-*")
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    back = [event["data"]["reason"] for event in events if event["kind"] == "rollback"]
    lost = [reason for reason in back if not reason.startswith("placement: ")]
    assert not lost or any(reason in told for reason in lost), f"nothing is told of a world that was lost: {lost}"
    return told


def loan_now(home: Path) -> Move | None:
    """The loan to the judges that goes on."""
    files = list((home / "runs").glob(f"{NAME}-*/moves.jsonl"))
    moves = moves_of(home) if files else []
    return moves[-1] if moves and moves[-1].kind == "lend" and "rollout -> reward" in moves[-1].slots[0] else None


def asleep_on(run: ClusterRun, node: str, slot: str, other_than: str = "") -> pb.WorkerInfo | None:
    """The engine of the policy on that slot, if it serves, and says itself that it sleeps."""
    nodes = run.ask(lambda client: client.list_nodes())
    for one in nodes.workers if nodes is not None else ():
        if (one.role, one.node, one.slot, one.state) == (
            "rollout",
            node,
            slot,
            "serving",
        ) and one.instance != other_than:
            with contextlib.suppress(OSError):
                with urllib.request.urlopen(f"http://{one.address}/server_info", timeout=5) as reply:
                    (state,) = json.load(reply)["internal_states"]
                return one if state["released"] else None
    return None


def node_of(pid: int) -> str:
    """The node that a process is of, by its command line; empty: none, or it is gone."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_text()
        return next((name for name in ("node-0", "node-1") if name in words), "")
    return ""


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
    reads_like_an_account(home)
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
    reads_like_an_account(home)


def test_dry_run_only_reports_the_policys_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert "failed, so nothing moves" in ended.output
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
    reads_like_an_account(home)


def test_an_engine_that_is_killed_while_it_is_lent_away_is_started_again_asleep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = write_job(tmp_path, monkeypatch, LENDING, steps=3, law=LONG_LOANS, flow=LONG_FLOW)
    home = tmp_path / "home"
    run = ClusterRun(spec, home, "--slots", "emulated:8")
    try:
        loan = run.until("a loan", lambda: loan_now(home))
        node, slot = loan.slots[0].partition(" ")[0].split("/")
        lent = run.until("an engine that is lent away", lambda: asleep_on(run, node, slot))
        os.kill(lent.pid, signal.SIGKILL)
        again = run.until("another in its place", lambda: asleep_on(run, node, slot, other_than=lent.instance))
        now = loan_now(home)
        ended_well(run.wait(), 3)
    finally:
        run.close()
    assert again.instance != lent.instance
    assert now is not None, "it was to be asleep because its slot was lent"
    assert now.generation == loan.generation
    kinds = [move.kind for move in moves_of(home)]
    assert "return" in kinds[kinds.index("lend") :]
    books_sum(home)
    reads_like_an_account(home)


@pytest.mark.parametrize("point", ["place_after", "sleep_before", "wake_after"])
def test_a_node_that_is_killed_in_the_middle_of_a_move_holds_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    """Its controller is stopped where the move is half done, so that everything on the node dies at that very moment."""
    spec = write_job(tmp_path, monkeypatch, {"policy": "swing", "train": 1, "reward": 1}, steps=STEPS)
    armed = arm(tmp_path, monkeypatch, **{point: "stop 2"})
    home = tmp_path / "home"
    run = ClusterRun(spec, home, "--slots", "emulated:8")
    try:
        (fired,) = run.until("the moment", lambda: list(armed.glob("*.fired.*")))
        node = node_of(int(fired.suffix.removeprefix(".")))
        for pid in processes_of(home):
            if node_of(pid) == node:
                os.kill(pid, signal.SIGKILL)
        ended_well(run.wait())
    finally:
        run.close()
    assert len([move for move in moves_of(home) if move.state == "done"]) >= 3
    books_sum(home)
    reads_like_an_account(home)


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
    assert all(move.reason and move.after.reward > move.before.reward for move in lent)
    assert any(move.kind == "return" for move in moves)
    reads_like_an_account(home)


def test_pin_overrides_the_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert "reward 9 need more than the 8 slots of the cluster" in refused.stderr
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
    reads_like_an_account(home)
