"""PPO with a critic through DeepSpeed equals a plain loop, and resumes from a checkpoint with the same results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rank_splits import named
from rank_worlds import RUNS, STAGES, WHOLE, WORLDS, run_worlds
from safetensors.numpy import load_file

from gcore.models.export import copy_model
from gcore.models.layout import has_critic, verify_checkpoint

PROGRAM = Path(__file__).with_name("train_critic_program.py")
GRADIENTS = ("values", "reward", "rows")
UPDATES = ("updates", "fresh")
ONCE = ("rows", "fresh")
"""Cases that two ranks run at ZeRO 3 only."""
BETA1 = 0.9
NUMBERS = (
    "loss",
    "value_loss",
    "grad_norm",
    "critic_grad_norm",
    "value_mean",
    "return_mean",
    "value_explained_variance",
    "learning_rate",
    "critic_learning_rate",
    "clip_fraction",
    "value_clip_fraction",
)

pytestmark = pytest.mark.timeout(600)  # everything is run once, for the first test


def runs_of(cases: Sequence[str]) -> list[Any]:
    """Size of the world, ZeRO stage and case."""
    return [
        pytest.param(size, stage, case, id=f"{named(size, stage)}, {case}")
        for size, stage in WORLDS
        for case in cases
        if case not in ONCE or size == 1 or stage == 3
    ] + [
        # Four ranks in sequence groups of two: the critic is a copy of the policy, whose heads two ranks can share.
        pytest.param(4, 3, case, id=f"{named(4, 3)}, {case}")
        for case in cases
        if WHOLE and case == "fresh"
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything run once: the plain loop, one rank, and two, which go on from the one's checkpoint."""
    folder = tmp_path_factory.mktemp("critic")
    run_worlds(PROGRAM, folder, limit_s=560)
    return folder


def checkpoint(folder: Path, name: str, step: int = 1) -> Path:
    return folder / name / "checkpoints" / f"0-{step}"


def part(checkpoint: Path, which: str) -> Path:
    return checkpoint / "critic" if which == "critic" else checkpoint


def numbers(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.mark.parametrize("which", ["policy", "critic"])
@pytest.mark.parametrize(("size", "stage", "case"), runs_of(GRADIENTS))
def test_the_gradients_of_policy_and_critic_are_those_of_a_plain_loop(
    folder: Path, case: str, stage: int, size: int, which: str
) -> None:
    expected = load_file(folder / f"plain-{case}-{which}-gradient.safetensors")
    found = load_file(part(checkpoint(folder, f"{case}-{stage}-{size}"), which) / "exp_avg.safetensors")
    assert found.keys() == expected.keys()
    scale = max(float(np.abs(gradient).max()) for gradient in expected.values())
    assert scale > 1e-3
    for name, gradient in expected.items():
        # The policy's hangs on the critic's float32 values, through whitening.
        np.testing.assert_allclose(found[name] / (1 - BETA1), gradient, rtol=0, atol=1e-5 * scale, err_msg=name)


@pytest.mark.parametrize("which", ["policy", "critic"])
@pytest.mark.parametrize(("size", "stage", "case"), runs_of(UPDATES))
def test_six_updates_of_both_lead_to_the_weights_of_a_plain_loop(
    folder: Path, case: str, stage: int, size: int, which: str
) -> None:
    origin = folder / ("judge" if which == "critic" and case == "updates" else "model")
    before = load_file(origin / "model.safetensors")
    expected = load_file(folder / f"plain-{case}-{which}.safetensors")
    found = load_file(part(checkpoint(folder, f"{case}-{stage}-{size}"), which) / "model.safetensors")
    assert found.keys() == expected.keys()
    start = {name: before.get(name, np.zeros_like(one)) for name, one in expected.items()}  # a new head is zeros
    moved = np.sqrt(sum(float(((expected[name] - start[name]) ** 2).sum()) for name in expected))
    apart = np.sqrt(sum(float(((expected[name] - found[name]) ** 2).sum()) for name in expected))
    assert moved > 1e-2
    assert apart < 1e-3 * moved


@pytest.mark.parametrize(("size", "stage", "case"), runs_of((*GRADIENTS, *UPDATES)))
def test_every_rank_reports_the_plain_loops_losses_and_values(folder: Path, case: str, stage: int, size: int) -> None:
    run = folder / f"{case}-{stage}-{size}"
    reports = [numbers(run / f"metrics-{rank}.json") for rank in range(size)]
    assert all(report == reports[0] for report in reports)
    plain = numbers(folder / f"plain-{case}.json")
    assert {name: reports[0][name] for name in plain} == pytest.approx(plain, rel=1e-4, abs=2e-6)


@pytest.mark.parametrize("stage", STAGES)
def test_several_updates_leave_the_first_policy_and_both_clips_act(folder: Path, stage: int) -> None:
    metrics = numbers(folder / f"updates-{stage}-2" / "metrics-0.json")
    assert metrics["clip_fraction"] > 0
    assert metrics["value_clip_fraction"] > 0
    assert min(metrics["ratio_deviation"], metrics["ratio_deviation_last"]) > 0.01
    assert metrics["ratio_min"] < 0.99 < 1.01 < metrics["ratio_max"]


@pytest.mark.parametrize(("size", "stage"), RUNS)
def test_a_job_goes_on_from_a_checkpoint_of_another_stage_or_world_with_the_same_losses(
    folder: Path, stage: int, size: int
) -> None:
    for step in (2, 3):
        # The checkpoint is of one rank at stage 2; one rank goes on from it at stage 3, two do at each.
        straight = numbers(folder / "straight" / f"straight-{step}.json")
        resumed = numbers(folder / f"resumed-{stage}-{size}" / f"resumed-{step}.json")
        assert {name: resumed[name] for name in NUMBERS} == pytest.approx(
            {name: straight[name] for name in NUMBERS}, rel=1e-5, abs=1e-6
        )
    assert straight["critic_learning_rate"] == pytest.approx(1e-2 * 1 / 18), "the last of 18 updates"


@pytest.mark.parametrize(("size", "stage"), RUNS)
def test_in_a_warm_up_step_the_critic_learns_and_the_policy_does_not_change_by_a_bit(
    folder: Path, stage: int, size: int
) -> None:
    run = folder / f"warm-{stage}-{size}"
    before = load_file(folder / "model" / "model.safetensors")
    first, second = (load_file(checkpoint(folder, run.name, step) / "model.safetensors") for step in (1, 2))
    assert all(np.array_equal(first[name], before[name]) for name in before)
    assert not all(np.array_equal(second[name], before[name]) for name in before)
    moments = load_file(checkpoint(folder, run.name) / "exp_avg.safetensors")
    assert not any(one.any() for one in moments.values())
    head = load_file(checkpoint(folder, run.name) / "critic" / "model.safetensors")["score.weight"]
    assert not np.array_equal(head, load_file(folder / "judge" / "model.safetensors")["score.weight"])
    alone, both = (numbers(run / f"metrics-{step}.json") for step in (1, 2))
    assert "loss" not in alone
    assert {"value_loss", "mismatch_kl", "mismatch_max"} <= alone.keys()
    assert {"loss", "value_loss", "mismatch_kl"} <= both.keys()
    manifest = verify_checkpoint(checkpoint(folder, run.name, 2))
    assert (manifest.updates, manifest.critic_updates) == (6, 12)


@pytest.mark.parametrize("stage", STAGES)
def test_engines_and_exports_get_the_policy_alone(folder: Path, stage: int, tmp_path: Path) -> None:
    run = folder / f"updates-{stage}-2"
    staged = run / "weights" / "0-1"
    assert sorted(path.name for path in staged.glob("**/*.safetensors")) == ["model.safetensors"]
    whole = checkpoint(folder, run.name)
    assert has_critic(verify_checkpoint(whole))
    copy_model(whole, tmp_path / "exported")
    assert {path.name for path in (tmp_path / "exported").iterdir()} == {
        path.name for path in (folder / "model").iterdir()
    }
    trained = load_file(tmp_path / "exported" / "model.safetensors")
    assert trained.keys() == load_file(folder / "model" / "model.safetensors").keys()
