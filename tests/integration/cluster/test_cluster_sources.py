"""Whole runs over several sources: each policy for truncated responses, curricula, and data that yield no training prompts.

On the shared cluster, with a random model of a few thousand weights; nothing is learned here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster_run import Outcome, run_job, stored

from gcore.config.local_cluster import LocalClusterState
from gcore.ledger.records.chain import EpochRecord
from gcore.ledger.records.job import Evaluation
from gcore.observability.samples import read_groups
from gcore.store.keys import JobKeys
from gcore.testing.models import make_tiny_model
from gcore.types import Version

pytestmark = [pytest.mark.serial, pytest.mark.timeout(600)]

STOP = list("0123456789abcdefg")
"""A third of what the model may say ends a response, so that some are cut off and some are not."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the model and the data."""
    folder = tmp_path_factory.mktemp("sources")
    make_tiny_model(folder / "model", seed=3)
    for name, count in (("digits", 6), ("letters", 5)):
        # One of the digits' prompts is longer than the spec allows.
        texts = [f"{name} {n}" if n < 5 else f"{name} {n}, and many more" for n in range(count)]
        lines = [json.dumps({"prompt": text, "answer": "x", "none": "", "level": n}) for n, text in enumerate(texts)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def run(cluster: LocalClusterState, data: Path, name: str, changes: dict[str, Any]) -> Outcome:
    """A job of its own name, followed to its end. `changes` are sections of the spec."""
    letters = {"name": "letters", "path": "letters.jsonl", "sampling": {"temperature": 0.7, "max_new_tokens": 3}}
    spec: dict[str, Any] = {
        "name": name,
        "model": {"path": "model"},
        "data": {
            "sources": [{"name": "digits", "path": "digits.jsonl", "weight": 2.0}, letters],
            "shards": 4,
            "max_prompt_tokens": 12,
        },
        "flow": {"steps": 4, "groups_per_step": 8, "samples_per_prompt": 2},
        "rollout": {"max_new_tokens": 5, "stop": STOP},
        "reward": {"name": "exact"},
        "checkpoint": {"every": 2, "keep": 1, "best": "letters/pass@4"},
        "eval": {
            "every": 3,
            "sources": [
                {"name": "digits", "path": "digits.jsonl"},
                {
                    "name": "letters",
                    "path": "letters.jsonl",
                    "samples": 4,
                    "temperature": 1.0,
                    "pass_k": [1, 2, 4],
                    "reward": {"name": "exact", "answer": "none"},  # right is who says nothing, now and then
                },
            ],
        },
    }
    for section, fields in changes.items():
        spec[section] = spec[section] | fields
    file = data / f"{name}.yaml"
    file.write_text(yaml.safe_dump(spec))
    return run_job(cluster, file)


def check(outcome: Outcome) -> dict[str, Any]:
    """It did all its steps, its accounts are right, and it says what came of each source."""
    assert outcome.code == 0, outcome.output
    assert outcome.summary["audit"] == "clean"
    assert outcome.summary["steps"] == 4
    sources: dict[str, Any] = outcome.summary["sources"]
    assert set(sources) == {"digits", "letters"}
    assert sum(source["trained"] for source in sources.values()) == 32
    kept = Path(outcome.summary["run_dir"]) / "samples"
    for step in range(1, 5):
        groups = read_groups(kept.parent, Version(0, step))
        assert len(groups) == 8, "all of a step: no holder has more than the samples that are kept"
        assert not any("cannot be read" in group.prompt.text for group in groups)
    for source in sources.values():
        assert source["mean_length"] >= 1.0
        assert source["eval_accuracy_before"] is not None
        assert source["eval_accuracy_after"] is not None
    assert sources["letters"]["mean_length"] <= 3.0, "its own longest response"
    assert sources["digits"]["filtered"] > 0, "one of its prompts is too long"
    return sources


def records_of(cluster: LocalClusterState, uid: str, prefix: str) -> dict[str, bytes]:
    """The store under a prefix of the job's, by key."""
    return stored(cluster, f"{JobKeys(uid).prefix}{prefix}")


def check_evaluations(cluster: LocalClusterState, summary: dict[str, Any]) -> None:
    """Both controllers answered, each set was drawn and counted as it says, and the best checkpoint is kept."""
    records = records_of(cluster, summary["uid"], "eval/")
    evaluations = sorted(
        (Evaluation.decode(value, key) for key, value in records.items()), key=lambda e: e.version.step
    )
    assert [e.version.step for e in evaluations] == [0, 3, 4]
    assert records_of(cluster, summary["uid"], "evalpart/") == {}
    assert len(evaluations[-1].responses_by) == 2, "each controller has a part of it"
    for one in evaluations:
        assert sum(one.responses_by.values()) == 6 + 4 * 5
        assert set(one.by_source["digits"].metrics) == {"mean@1", "pass@1"}
        metrics = one.by_source["letters"].metrics
        assert set(metrics) == {"mean@4", "pass@1", "pass@2", "pass@4"}
        assert 0.0 < metrics["mean@4"] == metrics["pass@1"] <= metrics["pass@2"] <= metrics["pass@4"]
    assert summary["sources"]["letters"]["eval_after"] == evaluations[-1].by_source["letters"].metrics
    best = summary["best"]
    values = {e.version.step: e.by_source["letters"].metrics["pass@4"] for e in evaluations}
    assert best["value"] == max(values.values())
    assert best["step"] == min(step for step, value in values.items() if value == best["value"])
    kept = {folder.name.split("-")[1] for folder in (Path(summary["run_dir"]) / "checkpoints").iterdir()}
    assert {int(step) for step in kept} >= {4, best["step"]} - {0}, "the newest and the best"
    assert (Path(best["checkpoint"]) / "config.json").is_file() if best["step"] else best["checkpoint"] == ""


def begun_epochs(cluster: LocalClusterState, uid: str) -> list[EpochRecord]:
    """The records of epochs in the store."""

    return [EpochRecord.decode(value) for value in records_of(cluster, uid, "epoch/").values()]


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        pytest.param("keep", {}, marks=pytest.mark.chaos),
        pytest.param("mask", {"curriculum": "hard_sources_first"}, marks=pytest.mark.chaos),
        pytest.param(
            "penalise",
            {"curriculum": "easy_first", "curriculum_options": {"field": "level", "epochs": 2}},
            marks=pytest.mark.chaos,
        ),
        pytest.param("drop_group", {"curriculum": "hard_sources_first"}, marks=pytest.mark.chaos),
    ],
)
def test_truncated_responses_in_a_whole_run(
    cluster: LocalClusterState, data: Path, policy: str, order: dict[str, Any]
) -> None:
    """With 17 prompts an epoch the four steps reach into the second, and where groups are dropped beyond it."""
    outcome = run(cluster, data, f"truncated-{policy}", {"rollout": {"truncated": policy}, "data": order})
    sources = check(outcome)
    check_evaluations(cluster, outcome.summary)
    cut_off = [source["truncated"] for source in sources.values()]
    if policy == "drop_group":
        assert cut_off == [0.0, 0.0]
        assert sum(source["filtered"] for source in sources.values()) > 0
    else:
        assert max(cut_off) > 0.0
    assert bool(begun_epochs(cluster, outcome.summary["uid"])) == bool(order), (
        "only a curriculum leaves records of epochs"
    )
    if policy == "penalise":
        assert min(source["mean_reward"] for source in sources.values()) < 0.0


def test_a_job_whose_groups_are_all_filtered_fails_after_an_epoch_and_says_so(
    cluster: LocalClusterState, data: Path
) -> None:
    always = {"truncated": "drop_group", "max_new_tokens": 3, "min_new_tokens": 3, "stop": []}
    outcome = run(cluster, data, "barren", {"rollout": always})
    assert outcome.code == 1
    assert outcome.summary["state"] == "FAILED"
    assert outcome.summary["audit"] == "clean"
    assert (
        "(17 were filtered, 0 failed); most common reason (15 times): "
        "a response was truncated at 3 tokens (rollout.max_new_tokens)" in (outcome.summary["reason"])
    )
    assert outcome.summary["sources"]["digits"]["filtered"] >= 12
