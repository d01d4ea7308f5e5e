"""Whole clusters with streamed steps, where a controller or a rank is killed between two parts: every account stays correct."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cluster_run import ClusterRun, Outcome
from run_read import newest_run

from gcore.engines.emulated.launch import LAW_FILE
from gcore.system.fault_injection import VARIABLE
from gcore.testing.models import make_tiny_model

pytestmark = [pytest.mark.serial, pytest.mark.chaos, pytest.mark.timeout(600)]

STREAMED = ("train.stream=true", "train.stream_min=4", "train.mini_batches=1", "flow.steps=8")
STEPS = 8


@pytest.fixture
def points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where faults are armed."""
    folder = tmp_path / "points"
    folder.mkdir()
    monkeypatch.setenv(VARIABLE, str(folder))
    return folder


def run_streamed(spec: Path, home: Path, *more: str) -> Outcome:
    """To its end, clean."""
    run = ClusterRun(spec, home, *more)
    try:
        outcome = run.wait()
    finally:
        run.close()
    assert outcome.code == 0, outcome.output
    assert (outcome.summary["audit"], outcome.summary["steps"]) == ("clean", STEPS)
    return outcome


def parts_of(home: Path) -> list[float]:
    """In how many parts each step came; 1 for a step that was sealed as a whole."""
    events = [json.loads(line) for line in (newest_run(home) / "events.jsonl").read_text().splitlines()]
    return [event["data"]["stats"].get("parts", 1.0) for event in events if event["kind"] == "step"]


def settings(*words: str) -> tuple[str, ...]:
    return tuple(one for word in words for one in ("--set", word))


def test_real_ranks_learn_from_steps_that_come_in_parts(spec: Path, home: Path) -> None:
    """Long answers are forced, so that groups do not finish together."""
    longer = ("rollout.max_new_tokens=48", "rollout.min_new_tokens=1", "rollout.temperature=1.6")
    outcome = run_streamed(spec, home, *settings(*STREAMED, *longer))
    assert max(parts_of(home)) > 1
    assert "loss" in json.dumps(outcome.summary) or outcome.summary["steps"] == STEPS


@pytest.fixture
def tailed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job on emulated engines, with a long tail: every step comes in parts."""
    law = tmp_path / "law.json"
    law.write_text(json.dumps({"speedup": 4.0, "load_s": 0.2, "response_spread": 1.2, "train_tokens_per_s": 1000.0}))
    monkeypatch.setenv(LAW_FILE, str(law))
    make_tiny_model(tmp_path / "model", seed=1)
    lines = [json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) for a in range(20) for b in range(20)]
    (tmp_path / "train.jsonl").write_text("\n".join(lines) + "\n")
    job: dict[str, Any] = {
        "model": {"path": "model"},
        "data": {"path": "train.jsonl", "shards": 32},
        "flow": {"steps": STEPS, "groups_per_step": 16, "samples_per_prompt": 2},
        "rollout": {"max_new_tokens": 400},
        "train": {"stream": True, "stream_min": 2},
        "checkpoint": {"every": 2},
    }
    file = tmp_path / "job.yaml"
    file.write_text("name: tailed\n" + "\n".join(f"{key}: {json.dumps(value)}" for key, value in job.items()) + "\n")
    return file


def test_a_controller_that_dies_after_it_told_a_rank_of_a_part_is_not_missed(
    tailed: Path, home: Path, points: Path
) -> None:
    """The other ranks get the part from a surviving controller, and the lost groups of later parts are sampled again."""
    (points / "apply.after").write_text("kill 3")
    run_streamed(tailed, home, "--slots", "emulated:4")
    assert list(points.glob("apply.after.fired.*"))
    assert sorted(parts_of(home))[STEPS // 2] > 1
    events = [json.loads(line) for line in (newest_run(home) / "events.jsonl").read_text().splitlines()]
    assert [event for event in events if event["kind"] == "rollback"] == []


def test_a_part_that_is_sealed_and_not_delivered_is_given_up_with_its_holder(
    tailed: Path, home: Path, points: Path
) -> None:
    (points / "feed.before").write_text("kill 5")
    run_streamed(tailed, home, "--slots", "emulated:4")
    assert list(points.glob("feed.before.fired.*"))


def test_a_rank_that_dies_with_parts_in_its_gradients_means_another_world(spec: Path, home: Path, points: Path) -> None:
    """The accumulated gradients are lost with the rank and trained again."""
    (points / "step.before").write_text("kill 4")
    longer = ("rollout.max_new_tokens=48", "rollout.temperature=1.6")
    run_streamed(spec, home, *settings(*STREAMED, *longer))
    assert list(points.glob("step.before.fired.*"))
    events = [json.loads(line) for line in (newest_run(home) / "events.jsonl").read_text().splitlines()]
    assert [event for event in events if event["kind"] == "rollback"]
