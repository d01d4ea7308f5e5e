"""`gcore demo` runs the arithmetic example with its data and model beside the spec, also from an installed package."""

from __future__ import annotations

import tomllib
from pathlib import Path

import yaml

from controllers.cli.commands.run import demo_spec
from gcore.config.load import new_spec

ROOT = Path(__file__).parents[3]


def test_the_spec_of_the_demo_is_the_examples_with_paths_beside_it(tmp_path: Path) -> None:
    spec = new_spec(yaml.safe_load(demo_spec()), base=tmp_path)
    example = yaml.safe_load((ROOT / "examples" / "arithmetic" / "grpo.yaml").read_text())
    assert spec.model.path == str(tmp_path / "model")
    assert spec.flow.steps == example["flow"]["steps"]
    assert ".cache" not in demo_spec()


def test_the_example_is_part_of_the_wheel() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"] == {
        "examples/arithmetic/grpo.yaml": "gcore/quickstart/arithmetic.yaml"
    }
