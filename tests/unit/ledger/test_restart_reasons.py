"""Stored reasons of rollbacks, also those of earlier versions, in the words that people read."""

from __future__ import annotations

import pytest

from gcore.ledger.records.restart_reasons import cause_in_words, is_restart, restart_sentence

CAUSES = {
    "slots go to other jobs: it needs 2 slots, and other jobs use 1 of 2 slots; 1 slot goes to job 7f3a": (
        "preempted, 1 slot went to job 7f3a"
    ),
    "its slots are given back: its share is smaller now; 2 slots go to a job of another namespace": (
        "preempted, 2 slots went to a job of another namespace"
    ),
    "slots go to other jobs: it needs 2 slots, and other jobs use 1 of 2 slots": (
        "preempted, its slots went to other jobs (it needs 2 slots, and other jobs use 1 of 2 slots)"
    ),
    "slots go to other jobs: it needs 1 slot, and other jobs use 0 of 0 slots; 1 slot is on a draining node: gpu-7": (
        "1 slot is on a draining node: gpu-7"
    ),
    "its slots are given back: its share is smaller now; 1 slot goes to job 7f3a; 1 slot is on a draining node: n; "
    "checkpoint c is skipped: it is damaged": (
        "preempted, 1 slot went to job 7f3a, 1 slot is on a draining node: n; checkpoint c is skipped: it is damaged"
    ),
    "its slots are given back: its share is smaller now": "its share of the slots became smaller",
    "its slots are given back: its share is smaller now; it may use at most 2 slots": "it may use at most 2 slots",
    "its slots are given back: the job is paused": "paused by `gcore pause`, or because `gcore run` was interrupted",
    "its slots are given back: cancelled on request": "cancelled on request",
    "it has slots again": "resumed, or its slots are available again",
    "rank 1 on gpu-7 is gone: gpu-7 is lost": "node gpu-7 was lost with train rank 1",
    "rank 1 on gpu-7 is gone": "the worker of train rank 1 on node gpu-7 disappeared without a report",
    "gpu-7, which should run rank 1, is gone": "node gpu-7 was lost before it started train rank 1",
    "gpu-7 lost slot cuda:3, which should run rank 1": "node gpu-7 lost slot cuda:3 of train rank 1",
    "rank 0 on gpu-7 failed: killed by SIGKILL": "train rank 0 on node gpu-7 failed: killed by SIGKILL",
    "rank 0 has trained step 6, which the store does not contain: etcd was restored from a backup of step 4": (
        "etcd was restored from an older backup, of step 4: rank 0 has trained step 6, which the store does not contain"
    ),
    "rank 0 on n is gone; etcd was restored from a backup: its log ends at entry 4, but the run's folder has entries up to 6": (
        "etcd was restored from an older backup: its log ends at entry 4, but the run's folder has entries up to 6; "
        "the worker of train rank 0 on node n disappeared without a report"
    ),
    "placement: rollout is the slowest": "the placement policy changed the train world: rollout is the slowest",
    "4 ranks instead of 2 save about 30 s in 10 steps, and start in 3 s": (
        "the train world grows from 2 to 4 ranks: they save about 30 s in 10 steps, and start in 3 s"
    ),
    "continued after its end: 8 steps in place of 4": "the goal was raised from 4 to 8 steps",
    "a reason of a later version": "a reason of a later version",
}


@pytest.mark.parametrize(("reason", "words"), CAUSES.items(), ids=CAUSES.values())
def test_each_stored_reason_names_its_cause(reason: str, words: str) -> None:
    assert cause_in_words(reason) == words


@pytest.mark.parametrize(
    ("step", "reason", "lost", "sentence"),
    [
        (44, "it has slots again", 0, "restarted from checkpoint 44 (attempt 3): resumed, or its slots are available again; no step is lost"),
        (0, "rank 1 on n is gone", 1, "restarted from the initial model (attempt 3): the worker of train rank 1 on node n disappeared without a report; 1 step is lost"),
        (8, "rank 1 on n is gone", None, "restarted from checkpoint 8 (attempt 3): the worker of train rank 1 on node n disappeared without a report"),
        (8, "its slots are given back: the job is paused", 2, "stopped at checkpoint 8 (attempt 3): paused by `gcore pause`, or because `gcore run` was interrupted; 2 steps are lost"),
        (8, "continued after its end: 9 steps in place of 8", 0, "continued from checkpoint 8 (attempt 3): the goal was raised from 8 to 9 steps"),
    ],
)  # fmt: skip
def test_a_restart_names_checkpoint_attempt_cause_and_lost_steps(
    step: int, reason: str, lost: int | None, sentence: str
) -> None:
    assert restart_sentence(step, 2, reason, lost) == sentence


def test_a_pause_the_start_after_it_and_a_raised_goal_are_no_restarts() -> None:
    restarts = [reason for reason in CAUSES if is_restart(reason)]
    assert set(CAUSES) - set(restarts) == {
        "its slots are given back: the job is paused",
        "its slots are given back: cancelled on request",
        "it has slots again",
        "continued after its end: 8 steps in place of 4",
    }
