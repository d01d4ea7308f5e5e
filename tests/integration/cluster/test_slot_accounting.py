"""Slot accounting of whole runs on emulated slots: every second of every slot is booked, with and without killed processes.
`test_cluster` checks the same on real engines and ranks.
"""

from __future__ import annotations

import json
import os
import signal
from itertools import pairwise
from pathlib import Path

import pytest
from booked_run import MOST_ERROR, MOST_LOST, books_of, check_steps, check_sums, unbooked
from cluster_run import ClusterRun, gcore, processes_of
from emulated_job import write_emulated_job
from placement_run import write_job

pytestmark = [pytest.mark.serial, pytest.mark.timeout(300)]


@pytest.fixture
def emulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job on emulated slots whose steps take about a second."""
    flow = {"steps": 8, "groups_per_step": 32, "samples_per_prompt": 2}
    return write_emulated_job(tmp_path, monkeypatch, flow=flow, rollout={"max_new_tokens": 80, "batch_slots": 8})


def test_on_emulated_slots_too_and_top_shows_them_while_it_runs(emulated: Path, home: Path) -> None:
    run = ClusterRun(emulated, home, "--slots", "emulated:8")
    try:
        run.until_step(3)
        shown = json.loads(gcore("top", "--once", "-o", "json", "--home", str(home)).stdout)
        ended = run.wait()
    finally:
        run.close()
    assert ended.code == 0, ended.output
    assert shown["slots"] == 8
    assert sum(shown["by_state"].values()) == pytest.approx(8.0, rel=0.01)
    assert shown["error"] < MOST_ERROR
    folder, lines = books_of(home)
    check_sums(lines)
    check_steps(folder, lines, 8)
    for line in lines:
        assert line.book.error < MOST_ERROR, line
        assert len(line.spans) == line.book.slots == 4


@pytest.mark.chaos
def test_the_books_sum_when_engines_and_a_rank_are_killed(emulated: Path, home: Path) -> None:
    run = ClusterRun(emulated, home, "--slots", "emulated:8")
    try:
        run.until_step(1)
        words = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in processes_of(home)}
        os.kill(next(pid for pid, word in words.items() if b"gcore.emulated.host" in word), signal.SIGKILL)
        run.until_step(3)
        run.kill_worker("train", child=True)
        ended = run.wait()
    finally:
        run.close()
    assert ended.code == 0, ended.output
    _, lines = books_of(home)
    check_sums(lines)
    assert any(
        line.book.booked.get("failed", 0.0) > 0 or "switching none>rollout" in line.book.booked for line in lines
    )
    assert unbooked(lines) < MOST_LOST


@pytest.mark.chaos
def test_the_books_sum_while_slots_change_over_and_engines_sleep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    steps = 8
    spec = write_job(tmp_path, monkeypatch, {"policy": "swing", "train": 1, "reward": 1}, steps=steps)
    run = ClusterRun(spec, home, "--slots", "emulated:8")
    try:
        ended = run.wait()
    finally:
        run.close()
    assert ended.code == 0, ended.output
    folder, lines = books_of(home)
    check_sums(lines)
    check_steps(folder, lines, steps)
    for line in lines:
        assert line.book.error < MOST_ERROR, line
    changes = {change for line in lines for change in line.book.switches}
    assert {"rollout>reward", "reward>rollout"} <= changes


@pytest.mark.chaos
def test_the_time_of_a_controller_that_was_killed_is_not_left_out(emulated: Path, home: Path) -> None:
    run = ClusterRun(emulated, home, "--slots", "emulated:8", "--set", "flow.steps=20")
    try:
        run.until_step(3)
        run.kill_controller("node-1")
        ended = run.wait()
    finally:
        run.close()
    assert ended.code == 0, ended.output
    _, lines = books_of(home)
    check_sums(lines)
    own = [line for line in lines if line.node == "node-1"]
    assert [line.book.version.step for line in own] == sorted({line.book.version.step for line in own})
    for before, after in pairwise(own):
        assert after.book.began == pytest.approx(before.book.began + before.book.seconds, abs=0.05)
