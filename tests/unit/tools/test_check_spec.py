"""The checker of the spec's documentation finds each kind of fault."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, Field

from gcore.config.base import Section
from tools import check_spec
from tools.problem import ROOT


class Good(Section):
    """A section."""

    steps: int = Field(1, description="Steps of the job")


class Bad(BaseModel):
    steps: int = 1
    rate: float = Field(1.0, description="how fast")


class Planted(Section):
    """A spec."""

    good: Good = Good()
    bad: Bad = Bad()


def test_each_fault_of_a_section_and_a_field_is_found() -> None:
    found = [str(problem) for problem in check_spec.spec_is_documented(Planted, ROOT)]
    lines = Path(__file__).read_text().splitlines()
    where = "tests/unit/tools/test_check_spec.py:"
    bad, steps, rate = (1 + next(n for n, line in enumerate(lines) if text in line) for text in MARKS)
    assert found == [
        f"{where}{bad}: Bad is no Section: derive it from gcore's base of all sections",
        f"{where}{bad}: Bad is not frozen: freeze it",
        f"{where}{bad}: Bad accepts unknown keys: forbid them",
        f"{where}{bad}: Bad has no docstring: say what the section is",
        f"{where}{steps}: bad.steps has no description: write one",
        f"{where}{rate}: the description of bad.rate begins in lower case: begin with a capital",
    ]


MARKS = ("class Bad(", "    steps: int = 1", "    rate: float")


def test_an_example_cluster_that_is_not_valid_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "deploy" / "local" / "clusters"
    folder.mkdir(parents=True)
    good = (ROOT / "deploy" / "local" / "clusters").glob("*.yaml")
    for file in good:
        (folder / file.name).write_text(file.read_text())
    assert list(check_spec.example_clusters_are_valid(tmp_path)) == []
    (folder / "bad.yaml").write_text("nodes: [{accelerators: many, device: h100}]\n")
    (problem,) = check_spec.example_clusters_are_valid(tmp_path)
    assert problem.path == "deploy/local/clusters/bad.yaml"
    assert "accelerators" in problem.message
