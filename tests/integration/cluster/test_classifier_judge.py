"""A whole cluster with a classic reward model as the judge: a random policy learns the outputs that the model scores high."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from cluster_run import run_to_the_end
from run_read import metrics_of, newest_run
from tiny_classifiers import make_liking_classifier

from gcore.testing.models import make_tiny_model

pytestmark = [pytest.mark.serial, pytest.mark.chaos, pytest.mark.timeout(300)]

STEPS = 12
LIKED = "aeiou"


def rewards(home: Path) -> list[float]:
    """The mean of each step."""
    return [line["metrics"]["reward"] for line in metrics_of(newest_run(home)) if line["kind"] == "step"]


def test_a_policy_comes_to_write_what_a_classifier_likes(home: Path, tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model", seed=2, ends=False)
    make_liking_classifier(tmp_path / "judge", LIKED)
    prompts = [json.dumps({"prompt": f"{n}+{m}="}) for n in range(20) for m in range(20)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(prompts) + "\n")
    tree = {
        "name": "taste",
        "model": {"path": "model"},
        "data": {"path": "prompts.jsonl", "shards": 16},
        "flow": {"name": "grpo", "steps": STEPS, "groups_per_step": 16, "samples_per_prompt": 8},
        "rollout": {"max_new_tokens": 6},
        "judges": [{"name": "taste", "kind": "classifier", "model": {"path": "judge"}, "template": "={{ response }}"}],
        "reward": {"judge": "taste"},
        "train": {"learning_rate": 1.0e-2, "micro_batch_tokens": 1024},
    }
    (tmp_path / "taste.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    outcome = run_to_the_end(tmp_path / "taste.yaml", home, controllers=1, slots=1)
    assert outcome.code == 0, outcome.output
    assert outcome.summary["audit"] == "clean"
    told = rewards(home)
    assert len(told) == STEPS
    # From -2.3 (nothing that it likes) to 2.3 (nothing else).
    assert sum(told[-3:]) / 3 > sum(told[:3]) / 3 + 2.0, told
