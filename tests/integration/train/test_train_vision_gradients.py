"""The gradient of a step with pictures equals that of a plain loop, for every backend, with unequal numbers of pictures per rank."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from rank_splits import FSDP2, named, vision_cases
from rank_worlds import run_worlds
from safetensors.numpy import load_file

from gcore.models.vision import part_of

PROGRAM = Path(__file__).with_name("train_vision_program.py")
FROZEN = {"frozen": {"vision"}, "frozen-both": {"vision", "projector"}}
CASES = ("mixed", "rows", "again", "lonely", "text", "clip", "parts", *FROZEN)
BETA1 = 0.9
WORLDS = [(1, 2), *((2, stage) for stage in (1, 2, 3, FSDP2))]
RUNS = [
    pytest.param(size, stage, case, id=f"{named(size, stage)}-{case}")
    for size, stage in WORLDS
    for case in vision_cases(stage, CASES, size)
]

pytestmark = pytest.mark.timeout(1200)  # everything is run once, for the first test


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything run once: the plain loop, one rank, and two."""
    folder = tmp_path_factory.mktemp("vision")
    run_worlds(PROGRAM, folder, limit_s=1100)
    return folder


@pytest.mark.parametrize(("size", "stage", "case"), RUNS)
def test_the_gradient_of_a_step_with_pictures_is_that_of_a_plain_loop(
    folder: Path, case: str, stage: int, size: int
) -> None:
    expected = load_file(folder / f"plain-{case}.safetensors")
    found = load_file(folder / f"{case}-{stage}-{size}" / "checkpoints" / "0-1" / "exp_avg.safetensors")
    trained = {name for name in expected if part_of(name) not in FROZEN.get(case, ())}
    assert found.keys() == trained
    scale = max(float(np.abs(gradient).max()) for gradient in expected.values())
    assert scale > 1e-3
    for name in trained:
        np.testing.assert_allclose(found[name] / (1 - BETA1), expected[name], rtol=0, atol=1e-5 * scale, err_msg=name)
    tower = [float(np.abs(one).max()) for name, one in expected.items() if part_of(name) == "vision"]
    assert (max(tower) > 1e-3 * scale) == (case != "text")


@pytest.mark.parametrize(("size", "stage", "case"), [one for one in RUNS if one.values[2] in FROZEN])
def test_frozen_parts_stay_and_are_in_checkpoints_but_not_published(
    folder: Path, case: str, stage: int, size: int
) -> None:
    before = load_file(folder / "qwen3_vl" / "model.safetensors")
    run = folder / f"{case}-{stage}-{size}"
    saved = load_file(run / "checkpoints" / "0-1" / "model.safetensors")
    assert saved.keys() == before.keys()
    frozen = {name for name in before if part_of(name) in FROZEN[case]}
    assert frozen
    assert all((saved[name] == before[name]).all() for name in frozen)
    assert not any((saved[name] == before[name]).all() for name in before.keys() - frozen if before[name].ndim > 1)
    published = run / "weights" / "0-1"
    assert load_file(published / "model.safetensors").keys() == before.keys() - frozen
    assert set(json.loads((published / "frozen.json").read_text())) == frozen


@pytest.mark.parametrize("stage", [3, FSDP2])
def test_a_checkpoint_with_frozen_parts_continues_with_another_backend(folder: Path, stage: int) -> None:
    run = folder / f"frozen-{stage}-2"
    saved = run / "checkpoints" / "0-1"
    for kind, file in (("master", "model"), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq")):
        resumed, written = load_file(run / f"resumed-{kind}.safetensors"), load_file(saved / f"{file}.safetensors")
        assert resumed
        assert all((value == written[name]).all() for name, value in resumed.items())
