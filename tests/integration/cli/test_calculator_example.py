"""examples/calculator, shortened: with its tool the model learns to call it; without the tool there is little to learn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cluster_run import gcore, run_to_the_end

from gcore.quickstart.calculator import prepare_calculator

pytestmark = [pytest.mark.serial, pytest.mark.chaos]
ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "calculator"
STEPS = 8


@pytest.fixture(scope="module")
def prepared() -> Path:
    folder = ROOT / ".cache" / "examples" / "calculator"
    prepare_calculator(folder, progress=False)
    return folder


def test_with_the_tool_it_ends_at_least_20_points_above_without(prepared: Path, tmp_path: Path) -> None:
    accuracy = {}
    for kind in ("with_tool", "without_tool"):
        home = tmp_path / kind
        outcome = run_to_the_end(EXAMPLE / f"{kind}.yaml", home, ["--set", f"flow.steps={STEPS}"])
        assert outcome.code == 0, outcome.output
        assert (outcome.summary["steps"], outcome.summary["audit"]) == (STEPS, "clean")
        accuracy[kind] = outcome.summary["eval_accuracy_after"]
    assert accuracy["with_tool"] >= accuracy["without_tool"] + 0.2
    (run,) = (tmp_path / "with_tool" / "runs").glob("*")
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    told = [line["metrics"] for line in steps if line["kind"] == "step"]
    assert all(one["mismatch_abs"] < 1e-3 for one in told), "what the rank scores is what the engine drew, turn by turn"
    assert all(one["ratio_mean"] == pytest.approx(1.0, abs=1e-3) for one in told[:1])


def test_a_tool_that_is_misspelt_is_refused_before_there_is_a_job(prepared: Path) -> None:
    wrong = ("--set", "environment.tools.names=[calculater]")
    refused = gcore("validate", str(EXAMPLE / "with_tool.yaml"), *wrong, check=None)
    assert refused.returncode != 0
    assert "no tool is called 'calculater'" in refused.stdout + refused.stderr
