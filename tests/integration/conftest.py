"""Fixtures for tests of whole clusters: one shared cluster for tests that kill nothing, a folder for a private cluster, the arithmetic example."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_run import cluster_up, gcore, processes_of

from gcore.config.local_cluster import LocalClusterState
from gcore.quickstart import arithmetic as arithmetic_judge
from gcore.quickstart.arithmetic import prepare_arithmetic
from gcore.quickstart.counting import prepare_counting

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
def judge_adapter() -> Path:
    """The folder of the example's base model with the judge as its adapter; cached likewise."""
    folder = ROOT / ".cache" / "examples" / "arithmetic-judge-adapter"
    arithmetic_judge.prepare_judge_adapter(folder, progress=False)
    return folder


@pytest.fixture(scope="session")
def counting() -> Path:
    """The folder of the prepared counting example; cached likewise."""
    folder = ROOT / ".cache" / "examples" / "counting"
    prepare_counting(folder, progress=False)
    return folder


@pytest.fixture(scope="session")
def spec(example: Path) -> Path:
    """The example's spec, whose model and data are prepared."""
    return ROOT / "examples" / "arithmetic" / "grpo.yaml"


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalClusterState]:
    """Two controllers of a slot each, for all tests that kill nothing. Each has jobs of other names and leaves none running."""
    with cluster_up(tmp_path_factory.mktemp("cluster") / "home") as found:
        yield found


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A cluster's folder; nothing of it is left running."""
    folder = tmp_path / "home"
    yield folder
    gcore("down", "--home", str(folder), check=None)
    assert processes_of(folder) == []
