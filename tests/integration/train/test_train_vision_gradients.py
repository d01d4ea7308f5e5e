"""The gradient of a step with pictures equals that of a plain loop, for every backend, with unequal numbers of pictures per rank."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from rank_splits import FSDP2, named
from rank_worlds import run_worlds
from safetensors.numpy import load_file

PROGRAM = Path(__file__).with_name("train_vision_program.py")
CASES = ("mixed", "rows", "again", "lonely", "text", "clip", "parts")
BETA1 = 0.9
RUNS = [(1, 2), *((2, stage) for stage in (1, 2, 3, FSDP2))]

pytestmark = pytest.mark.timeout(900)  # everything is run once, for the first test


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything run once: the plain loop, one rank, and two."""
    folder = tmp_path_factory.mktemp("vision")
    run_worlds(PROGRAM, folder, limit_s=800)
    return folder


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("size", "stage"), [pytest.param(*one, id=named(*one)) for one in RUNS])
def test_the_gradient_of_a_step_with_pictures_is_that_of_a_plain_loop(
    folder: Path, case: str, stage: int, size: int
) -> None:
    expected = load_file(folder / f"plain-{case}.safetensors")
    found = load_file(folder / f"{case}-{stage}-{size}" / "checkpoints" / "0-1" / "exp_avg.safetensors")
    assert found.keys() == expected.keys()
    scale = max(float(np.abs(gradient).max()) for gradient in expected.values())
    assert scale > 1e-3
    for name, gradient in expected.items():
        np.testing.assert_allclose(found[name] / (1 - BETA1), gradient, rtol=0, atol=1e-5 * scale, err_msg=name)
    tower = [float(np.abs(one).max()) for name, one in found.items() if "visual" in name or "vision" in name]
    assert (max(tower) > 1e-3 * scale) == (case != "text")
