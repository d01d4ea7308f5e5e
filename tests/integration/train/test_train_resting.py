"""Train worlds that release their memory between steps train exactly as those that keep it, at every ZeRO stage and with FSDP2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rank_worlds import run_worlds

PROGRAM = Path(__file__).with_name("train_worlds_program.py")
CASES = ("zero1", "zero2", "zero3", "fsdp2", "fsdp2-kept")
COSTS = ("release_s", "restore_s", "released_bytes")
NUMBERS = ("loss", "grad_norm", "kl_reference", "value_loss", "critic_grad_norm", "mismatch_kl", "learning_rate")
STEPS = 4

pytestmark = [
    pytest.mark.chaos,  # ten worlds of real ranks; the pieces have tests of their own
    pytest.mark.timeout(900),  # everything is run once, for the first test
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything run once."""
    folder = tmp_path_factory.mktemp("resting")
    run_worlds(PROGRAM, folder, "resting", limit_s=850)
    return folder


def found(folder: Path, case: str, how: str, rank: int = 0) -> Any:
    return json.loads((folder / f"{case}-{how}" / f"found-{rank}.json").read_text())


@pytest.mark.parametrize("case", CASES)
def test_a_world_that_rests_has_exactly_the_losses_of_one_that_does_not(folder: Path, case: str) -> None:
    awake, resting = (found(folder, case, how)["losses"] for how in ("awake", "resting"))
    assert len(awake) == len(resting) == STEPS
    assert len({one["loss"] for one in awake}) == STEPS, "a run whose loss stands still proves nothing"
    for step, (expected, got) in enumerate(zip(awake, resting, strict=True), start=1):
        for number in NUMBERS:
            assert got.get(number) == expected.get(number), f"{number} of step {step}"
    assert "loss" in awake[0]
    assert ("value_loss" in awake[0]) == (case in ("zero3", "fsdp2"))


@pytest.mark.parametrize("case", CASES)
def test_next_step_reports_the_cost_of_releasing_memory(folder: Path, case: str) -> None:
    first, *later = found(folder, case, "resting")["losses"]
    assert not any(name in first for name in COSTS), "before the first step nobody had rested"
    for metrics in later:
        assert all(metrics[name] > 0 for name in COSTS)
    assert found(folder, case, "resting", rank=1)["losses"][1:] == later, "all ranks report the same"
    assert not any(name in metrics for metrics in found(folder, case, "awake")["losses"] for name in COSTS)


@pytest.mark.parametrize("case", CASES)
def test_a_rank_that_rests_gives_its_memory_back(folder: Path, case: str) -> None:
    released = found(folder, case, "resting")["losses"][1]["released_bytes"]
    freed = 0
    for rank in range(2):
        of_step = [one for one in found(folder, case, "resting", rank)["memory"] if one[0] == 2]
        (_, parts, awake, without_optimizer), (_, _, _, resting) = of_step
        assert parts == ["optimizer"]
        assert awake > without_optimizer > resting
        freed += awake - resting
    assert released > (80 if case == "fsdp2-kept" else 100) * 2**20  # without a critic, and one float32 copy less
    assert freed > 0.9 * released
