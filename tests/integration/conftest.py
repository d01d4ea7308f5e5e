"""For tests that run whole clusters: the arithmetic example, and a folder of which nothing is left running."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_run import gcore, processes_of

from gcore.quickstart import arithmetic as arithmetic_judge
from gcore.quickstart.arithmetic import prepare_arithmetic

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def example() -> Path:
    """The prepared example's folder; cached between runs as it is for a user."""
    folder = ROOT / ".cache" / "examples" / "arithmetic"
    prepare_arithmetic(folder, progress=False)
    return folder


@pytest.fixture(scope="session")
def judge() -> Path:
    """The folder of the example's prepared judge; cached likewise."""
    folder = ROOT / ".cache" / "examples" / "arithmetic-judge"
    arithmetic_judge.prepare_arithmetic_judge(folder, progress=False)
    return folder


@pytest.fixture(scope="session")
def spec(example: Path) -> Path:
    """The example's spec, whose model and data are prepared."""
    return ROOT / "examples" / "arithmetic" / "grpo.yaml"


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A cluster's folder; nothing of it is left running."""
    folder = tmp_path / "home"
    yield folder
    gcore("down", "--home", str(folder), check=None)
    assert processes_of(folder) == []
