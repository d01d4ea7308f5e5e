"""Whole runs with a reward of one's own in a file and from Python, on a cluster that the run starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cluster_run import ClusterRun

import gcore as package
from gcore.errors import UsageError
from gcore.quickstart.arithmetic import prepare_arithmetic

pytestmark = [pytest.mark.serial, pytest.mark.chaos, pytest.mark.timeout(300)]

LENGTH = 3


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """A spec whose model has learned nothing."""
    folder = tmp_path_factory.mktemp("example") / "arithmetic"
    prepare_arithmetic(folder, progress=False, warm_updates=1, must_fit=False)
    return {
        "name": "own",
        "model": {"path": str(folder / "model")},
        "data": {"path": str(folder / "train.jsonl")},
        "flow": {"steps": 2, "groups_per_step": 8, "samples_per_prompt": 2},
        "rollout": {"max_new_tokens": 4},
        "train": {"dtype": "fp32"},
    }


def test_a_reward_in_a_file_runs_from_the_copy_in_the_runs_folder(tree: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("def score(response, fields):\n    return len(response) / 8\n")
    (tmp_path / "reward.py").chmod(0o600)
    spec = tmp_path / "own.yaml"
    sections = {**tree, "reward": {"file": "reward.py:score"}}
    spec.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in sections.items()))
    run = ClusterRun(spec, tmp_path / "home")
    try:
        ended = run.wait()
    finally:
        run.close()
    assert ended.code == 0, ended.output
    assert ended.summary["audit"] == "clean"
    (copy,) = (tmp_path / "home" / "runs").glob("own-*/code/*/reward.py")
    assert copy.read_text() == (tmp_path / "reward.py").read_text()


def graded(response: str) -> float:
    return min(len(response), LENGTH) / LENGTH


def test_a_function_is_run_from_python_on_a_cluster_that_is_started_and_stopped(
    tree: dict[str, object], tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="lambda"):
        package.run(tree, reward=lambda response: 1.0, home=tmp_path / "home", progress=False)
    run = package.run(tree, reward=graded, home=tmp_path / "home", progress=False)
    assert run.job.state == "SUCCEEDED"
    assert len(run.metrics()) == 2
    assert all(0.0 <= sample.reward <= 1.0 for group in run.samples() for sample in group.samples)
    assert not (tmp_path / "home" / "cluster.json").exists()
