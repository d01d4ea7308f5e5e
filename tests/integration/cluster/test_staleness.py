"""Off-policy steps: a whole cluster whose responses take longer than a step."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from cluster_run import ClusterRun, run_to_the_end

pytestmark = [pytest.mark.serial, pytest.mark.chaos, pytest.mark.timeout(600)]

STEPS = 6


def steps_of(home: Path) -> list[dict[str, float]]:
    (run,) = (home / "runs").iterdir()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["metrics"] for line in lines if line["kind"] == "step"]


def test_answers_go_on_over_changes_of_weights_and_are_trained(spec: Path, example: Path, home: Path) -> None:
    """Each engine answers one prompt at a time, and two quotas are asked for: half the work is left at the first seal.

    To do it takes several times as long as to train, so the change of weights finds answers half made.
    """
    model = home.parent / "model"
    shutil.copytree(example / "model", model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1024}))
    changes = {
        "model.path": model,
        "flow.steps": STEPS,
        "flow.groups_per_step": 4,
        "flow.samples_per_prompt": 4,
        "rollout.staleness": 1,
        "rollout.correction": "tis",
        "rollout.min_new_tokens": 120,
        "rollout.max_new_tokens": 160,
        "rollout.batch_slots": 4,
        "train.mini_batches": 1,
        "eval.limit": 1,
        "eval.every": STEPS,
        "checkpoint.every": STEPS,
    }
    outcome = run_to_the_end(
        spec, home, [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    )
    assert outcome.code == 0, outcome.output
    assert outcome.summary["audit"] == "clean"
    assert outcome.summary["steps"] == STEPS
    steps = steps_of(home)
    assert len(steps) == STEPS
    assert max(step["staleness_max"] for step in steps) == 1
    assert sum(step["mixed_groups"] for step in steps) >= 1


def test_a_controller_is_killed_and_what_it_carried_is_issued_again(spec: Path, home: Path) -> None:
    changes = {"flow.steps": 12, "rollout.staleness": 1, "rollout.correction": "tis"}
    run = ClusterRun(spec, home, *(word for key, value in changes.items() for word in ("--set", f"{key}={value}")))
    try:
        run.until_step(3)
        run.kill_controller("node-1")
        outcome = run.wait()
    finally:
        run.close()
    assert outcome.code == 0, outcome.output
    assert outcome.summary["audit"] == "clean"
    assert outcome.summary["steps"] == 12
    assert outcome.summary["eval_accuracy_after"] >= outcome.summary["eval_accuracy_before"] + 0.2
    stale = [step for step in steps_of(home) if step["staleness"] > 0]
    assert stale
    # Only older weights make the trainer's log-probabilities differ so much from the engine's: something is corrected.
    assert max(step["mismatch_max"] for step in stale) > 0.01
