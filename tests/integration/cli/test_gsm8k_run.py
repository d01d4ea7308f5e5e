"""examples/gsm8k as its README describes it for a machine without a GPU, with fewer steps."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from cluster_run import gcore, run_to_the_end

pytestmark = [pytest.mark.serial, pytest.mark.chaos]
EXAMPLE = Path(__file__).parents[3] / "examples" / "gsm8k"


def test_the_example_runs_with_a_small_random_model_and_its_accounts_are_right(tmp_path: Path) -> None:
    data = tmp_path / "gsm8k"
    prepared = subprocess.run(
        [sys.executable, str(EXAMPLE / "prepare.py"), "--synthetic", "--tiny-model", "--to", str(data)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert prepared.returncode == 0, prepared.stderr
    here = [
        *("--set", f"model.path={data}/tiny-model"),
        *("--set", f"data.path={data}/train.jsonl"),
        *("--set", f"eval.path={data}/eval.jsonl"),
    ]
    shown = gcore("validate", str(EXAMPLE / "tiny.yaml"), *here).stdout
    assert 'system: Solve the problem step by step. End with a line that holds only "####"' in shown
    outcome = run_to_the_end(EXAMPLE / "tiny.yaml", tmp_path / "home", [*here, "--set", "flow.steps=2"])
    assert outcome.code == 0, outcome.output
    summary = outcome.summary
    assert (summary["steps"], summary["audit"]) == (2, "clean")
    assert sum(summary["groups_by_controller"].values()) == 16
    assert summary["eval_accuracy_after"] is not None
